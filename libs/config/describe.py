"""A setting in words: how its values are written, and what it is when nobody gives it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo


def spellings(annotation: Any) -> Iterator[str]:
    """How values of a type are written on a command line: INT, TEXT, or the choices."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for part in get_args(annotation):
            if part is not types.NoneType:
                yield from spellings(part)
    elif origin is Literal:
        yield from map(str, get_args(annotation))
    elif origin is list:
        yield from spellings(get_args(annotation)[0])
    elif hasattr(annotation, "__metadata__"):
        yield from spellings(annotation.__origin__)
    else:
        yield {int: "INT", float: "NUMBER", bool: "BOOL", Path: "PATH"}.get(annotation, "TEXT")


def default_of(info: FieldInfo) -> str:
    """The default as it would be typed; empty where there is none or where it is nothing."""
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return "on" if default else "off"
    return ", ".join(default) if isinstance(default, list) else "" if default is None else str(default)


def help_of(info: FieldInfo, *, with_default: bool = True) -> str:
    """The field's docs, and its default."""
    default = default_of(info) if with_default else ""
    required = " Required." if info.is_required() else ""
    return f"{info.description or ''}{f' Default: {default}.' if default else ''}{required}"
