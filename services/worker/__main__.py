"""`python -m services.worker`: the worker process."""

from __future__ import annotations

import sys

from libs.config import parse
from libs.process import instance_name, run_service
from libs.telemetry import logs
from services.worker import openmp
from services.worker.config import WorkerConfig
from services.worker.service import serve


def main() -> int:
    """Reads flags and environment, serves until SIGTERM; 1 when the model cannot be loaded."""
    config = parse(WorkerConfig, sys.argv[1:], prog="python -m services.worker")
    instance = instance_name("worker", config.instance)
    logs.configure("worker", instance, level=config.log_level, log_format=config.log_format)
    logs.get_logger(__name__).debug("OpenMP", spin_count=openmp.SPIN_COUNT)
    return run_service(lambda stop: serve(config, instance, stop))


if __name__ == "__main__":
    sys.exit(main())
