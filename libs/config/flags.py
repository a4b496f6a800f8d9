"""The command line of a settings class, read by the library, with the flags grouped by concern in its help."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pydantic_settings import CliSettingsSource

from libs.config.describe import help_of, spellings
from libs.config.names import ALIASES, RENAMED, belongs_to, suggestion, warn_renamed
from libs.config.settings import ENV_PREFIX, Settings, flag_of


def read_flags(config: type[Settings], args: Sequence[str], *, prog: str) -> Mapping[str, Any]:
    """The settings that `args` give, as they were typed. Prints the help, or the error, and raises SystemExit as argparse does."""
    parser = _Parser(
        prog=prog,
        description=config.__doc__,
        epilog=f"Every flag is also an environment variable: --max-num-seqs is {ENV_PREFIX}MAX_NUM_SEQS.",
        allow_abbrev=False,
    )
    parser.refused = config.refused
    groups = {}
    for group in config.groups():
        groups.update(dict.fromkeys(group.fields, parser.add_argument_group(group.title)))

    def add_argument(_parser: argparse.ArgumentParser, *names: str, **options: Any) -> Any:
        field = options.get("dest", names[0])
        info = config.model_fields[field]
        options["help"] = help_of(info).replace("%", "%%")
        if "metavar" in options:
            options["metavar"] = "|".join(spellings(info.annotation))
        return groups[field].add_argument(*names, **options)

    source: CliSettingsSource[_Parser] = CliSettingsSource(
        config,
        root_parser=parser,
        parse_args_method=_Parser.parse_args,
        add_argument_method=add_argument,
        cli_shortcuts=_shortcuts(config),
        cli_parse_args=list(args),
    )
    _warn_of_older_names(config, args)
    return source()


def _shortcuts(config: type[Settings]) -> dict[str, list[str]]:
    shortcuts: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        if name in config.model_fields:
            shortcuts.setdefault(flag_of(name)[2:], []).append(flag_of(alias)[2:])
    return shortcuts


def _warn_of_older_names(config: type[Settings], args: Sequence[str]) -> None:
    given = {word.partition("=")[0] for word in args}
    for alias, name in RENAMED.items():
        if name in config.model_fields and flag_of(alias) in given:
            warn_renamed(flag_of(alias), alias)


class _Parser(argparse.ArgumentParser):
    """argparse, saying "error" the way every other message of a start does, and naming the flag that a typo meant."""

    refused: Mapping[str, str] = {}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse. A word that is no flag here is an error that says which flag or service may have been meant."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._explanation(unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """See argparse; without the usage, which is longer than a screen."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _explanation(self, unknown: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        name = flag[2:].replace("-", "_")
        if name in self.refused:
            return f"; {self.refused[name]}"
        return belongs_to(name) or suggestion(flag, self._option_string_actions)
