"""Reads a settings class from everything that can hold a setting: default < file < environment < flag."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from libs.config.environment import read_environment
from libs.config.file import SettingsFile, read_file
from libs.config.flags import read_flags
from libs.config.found import Found, Source
from libs.config.settings import ConfigT, Settings, flag_of
from libs.errors import ErrorCode, TokenloomError


def parse(config: type[ConfigT], args: Sequence[str], *, prog: str) -> ConfigT:
    """Reads file, environment and `args` into `config`. Prints help or the error and raises SystemExit as argparse does."""
    try:
        return load(config, args, prog=prog)
    except TokenloomError as error:
        for line in error.message.splitlines():
            print(f"{prog}: error: {line}", file=sys.stderr)
        raise SystemExit(2) from None


def load(config: type[ConfigT], args: Sequence[str], *, prog: str) -> ConfigT:
    """As parse, but raises TokenloomError (INVALID_REQUEST) for what the settings say; SystemExit still for help and unknown flags."""
    flags = {name: Found(value, Source.FLAG, flag_of(name)) for name, value in read_flags(config, args, prog=prog).items()}
    environment = read_environment(config, os.environ)
    named = flags.get("config") or environment.get("config")
    file = read_file(named.value) if named and named.value else None
    from_file = {name: found for name, found in file.of(config.section).items() if _takes(config, name)} if file else {}
    found = {**from_file, **environment, **flags}
    for name, reason in config.refused.items():
        if name in found:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{found[name].where}: {reason}", param=name)
    return build(config, found, file)


def build(config: type[ConfigT], found: Mapping[str, Found], file: SettingsFile | None = None) -> ConfigT:
    """`config` with the values that were found.

    Raises TokenloomError (INVALID_REQUEST; `param` is the first field at fault): one line for each problem, beginning with where the value
    stands.
    """
    try:
        built = config(**{name: value.value for name, value in found.items()})
    except ValidationError as error:
        problems = error.errors()
        lines = [_line(problem, found) for problem in problems]
        name = str(problems[0]["loc"][0]) if problems[0]["loc"] else None
        raise TokenloomError(ErrorCode.INVALID_REQUEST, "\n".join(lines), param=name) from None
    built.remember(found, file)
    return built


def _takes(config: type[Settings], name: str) -> bool:
    return name in config.model_fields or name in config.refused


def _line(problem: ErrorDetails, found: Mapping[str, Found]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name, *inner = problem["loc"]
    given = found.get(str(name))
    item = f"[{inner[0]}]" if inner and isinstance(inner[0], int) else ""
    quotes = " (write it in quotes)" if problem["type"] == "string_type" and given and given.source is Source.FILE else ""
    return f"{given.where if given else flag_of(str(name))}{item}: {message}{quotes}"
