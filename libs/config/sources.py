"""Reads a settings class from everything that can hold a setting: default < environment < flag."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from libs.config.flags import read_flags
from libs.config.settings import ConfigT, flag_of


def parse(config: type[ConfigT], args: Sequence[str], *, prog: str) -> ConfigT:
    """Reads `args` and the environment into `config`. Prints help or the error and raises SystemExit as argparse does."""
    flags = read_flags(config, args, prog=prog)
    try:
        return config(**{**EnvSettingsSource(config)(), **flags})
    except ValidationError as error:
        for problem in error.errors():
            named = f"{flag_of('.'.join(map(str, problem['loc'])))}: " if problem["loc"] else ""
            print(f"{prog}: error: {named}{problem['msg']}", file=sys.stderr)
        raise SystemExit(2) from None
