"""`python -m services.scheduler`: the scheduler process."""

from __future__ import annotations

import sys

from libs.config import parse
from libs.process import instance_name, run_service
from libs.telemetry import logs
from services.scheduler.config import SchedulerConfig
from services.scheduler.server import run


def main() -> int:
    """Reads flags and environment, serves until SIGTERM."""
    config = parse(SchedulerConfig, sys.argv[1:], prog="python -m services.scheduler")
    instance = instance_name("scheduler", config.instance)
    logs.configure("scheduler", instance, level=config.log_level, log_format=config.log_format)
    return run_service(lambda stop: run(config, instance, stop))


if __name__ == "__main__":
    sys.exit(main())
