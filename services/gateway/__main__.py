"""`python -m services.gateway --flags`: one gateway process."""

from __future__ import annotations

import sys

from libs import config, process
from libs.telemetry import logs
from services.gateway.config import GatewayConfig
from services.gateway.server import instance_name, run


def main() -> int:
    """Parses the command line and serves until SIGTERM or SIGINT. Returns the exit code."""
    settings = config.parse(GatewayConfig, sys.argv[1:], prog="gateway")
    logs.configure("gateway", instance_name(settings), level=settings.log_level, log_format=settings.log_format)
    return process.run_service(lambda stop: run(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
