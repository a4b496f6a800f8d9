"""`python -m services.tokenizer --model DIR`: one replica of the tokenizer service."""

from __future__ import annotations

import asyncio
import sys

from libs.config import parse
from libs.errors import TokenloomError
from libs.process import instance_name, run_service
from libs.telemetry.logs import configure, get_logger
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.server import run


def main() -> int:
    """Parses the command line and serves until SIGTERM or SIGINT. Exit code 1: it could not start, and the log says why."""
    config = parse(TokenizerConfig, sys.argv[1:], prog="tokenizer")
    config = config.model_copy(update={"instance": instance_name("tokenizer", config.instance)})
    configure("tokenizer", config.instance, level=config.log_level, log_format=config.log_format)

    async def serve(stop: asyncio.Event) -> int:
        try:
            return await run(config, stop)
        except (TokenloomError, OSError) as error:
            get_logger("tokenizer").error("cannot serve", error=str(error))
            return 1

    return run_service(serve)


if __name__ == "__main__":
    sys.exit(main())
