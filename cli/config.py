"""`tokenloom config`: the settings that a start would have, with where each comes from; nothing is started."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.flags import DECIDED, SERVICES, ServeConfig, ServeOptions, help_groups, refuse_disagreements, service_config
from libs.config import Settings
from libs.config.describe import default_of, help_of, spellings
from libs.config.found import Found, Source
from libs.config.settings import flag_of
from libs.config.sources import load
from libs.errors import TokenloomError

# A service's concerns: title, and the settings with their names.
Concern = tuple[str, list[tuple[str, Found]]]
_HIDDEN = "********"
# user:password@ of a store's or a collector's URL.
_PASSWORD = re.compile(r"(?<=://)([^/@\s]*):([^/@\s]*)@")
_PROG = "tokenloom config"


def main(args: Sequence[str]) -> int:
    """`[SERVICE] [flags of serve or of the service]`, `--json` or `--docs`. Exit code 2 with the message that a start would end with."""
    own = {"--json", "--docs"}
    given, rest = own & set(args), [word for word in args if word not in own]
    service = rest.pop(0) if rest and rest[0] in SERVICES else ""
    if "--docs" in given:
        sys.stdout.write(documentation())
        return 0
    try:
        shown = _of_service(service, rest) if service else _of_mesh(rest)
    except TokenloomError as error:
        for line in error.message.splitlines():
            print(f"{_PROG}: error: {line}", file=sys.stderr)
        return 2
    if "--json" in given:
        print(json.dumps(_as_json(shown), indent=2))
    else:
        _print(shown)
    return 0


def _of_service(service: str, args: Sequence[str]) -> list[tuple[str, list[Concern]]]:
    """What `python -m services.SERVICE` with these flags would have."""
    config = load(SERVICES[service], args, prog=f"{_PROG} {service}")
    return [(service, _concerns(config, frozenset()))]


def _of_mesh(args: Sequence[str]) -> list[tuple[str, list[Concern]]]:
    """What `tokenloom serve` with these flags would have, without what it decides itself."""
    options = load(ServeConfig, args, prog=_PROG)
    # serve finds the model's directory first, which may mean a download; a worker cannot be without one.
    configs: Mapping[str, Settings] = {
        name: service_config(config, options, model=options.model or ".") for name, config in SERVICES.items()
    }
    refuse_disagreements(configs)
    common = frozenset(ServeOptions.model_fields) | DECIDED
    mesh = [("mesh", [(name, _shown(options, name)) for name in ServeOptions.model_fields])]
    return [("mesh", mesh), *((name, _concerns(config, common)) for name, config in configs.items())]


def _concerns(config: Settings, without: frozenset[str]) -> list[Concern]:
    found = []
    for group in type(config).groups():
        names = [name for name in group.fields if name not in without]
        if names:
            found.append((group.title, [(name, _shown(config, name)) for name in names]))
    return found


def _shown(config: Settings, name: str) -> Found:
    """A setting as it may be shown to anybody."""
    found = config.found(name)
    value = found.value
    if name in type(config).secrets():
        value = [_HIDDEN for _ in value]
    elif isinstance(value, list):
        value = [_without_password(item) for item in value]
    elif isinstance(value, str | Path):
        value = _without_password(str(value))
    return Found(value, found.source, found.where)


def _without_password(text: str) -> str:
    return _PASSWORD.sub(rf"\1:{_HIDDEN}@", text)


def _as_json(shown: Sequence[tuple[str, list[Concern]]]) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        service: {
            name: {"value": found.value, "source": found.source.name.lower(), "where": found.where}
            for _, settings in concerns
            for name, found in settings
        }
        for service, concerns in shown
    }


def _print(shown: Sequence[tuple[str, list[Concern]]]) -> None:
    # A line that is piped into another program is not to be broken.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    for service, concerns in shown:
        for title, settings in concerns:
            heading = title if title == service else f"{service}: {title}"
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), title=f"[bold]{heading}[/bold]", title_justify="left")
            for name, found in settings:
                style = "dim" if found.source is Source.DEFAULT else ""
                table.add_row(Text(name.replace("_", "-"), style), Text(_written(found.value), style), Text(found.where, style))
            console.print(table)
            console.print()


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return (", ".join(map(str, value)) or "-") if isinstance(value, list) else "-" if value in (None, "") else str(value)


def documentation() -> str:
    """The tables of docs/configuration.md: every setting of the mesh with its flag, variable, values, default and docs."""
    return "\n".join(_tables())


def _tables() -> Iterator[str]:
    seen: set[str] = set()
    groups = [*help_groups(), *_decided_groups()]
    for title, names, fields in groups:
        new = [name for name in names if name not in seen]
        seen.update(new)
        if not new:
            continue
        yield f"\n### {title}\n"
        yield "| flag | values | default | what it does |\n|---|---|---|---|"
        for name in new:
            info = fields[name]
            values = "on, off" if info.annotation is bool else " \\| ".join(spellings(info.annotation))
            docs = help_of(info, with_default=False).replace("|", "\\|")
            yield f"| `{flag_of(name)}` | {values} | {default_of(info) or '-'} | {docs} |"
    yield ""


def _decided_groups() -> Iterator[tuple[str, list[str], Mapping[str, Any]]]:
    """What is a flag of the services alone, because `tokenloom serve` decides it."""
    for service, config in SERVICES.items():
        for group in config.groups():
            names = [name for name in group.fields if name in DECIDED]
            if names:
                yield f"{service} by itself: {group.title}", names, config.model_fields
