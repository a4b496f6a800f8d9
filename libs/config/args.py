"""Settings as a command line again: how one process hands them to another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libs.config.settings import NONE_WORD, Settings
from libs.errors import ErrorCode, TokenloomError


def to_args(config: Settings, fields: Sequence[str]) -> list[str]:
    """The flags that make `parse` give the named fields the values they have in `config`; fields left at their default are left out.

    Raises TokenloomError (INVALID_REQUEST) for an item of a list with a comma in it, and for the text NONE_WORD.
    """
    args: list[str] = []
    for name in fields:
        value = getattr(config, name)
        if name not in config.model_fields_set or value is None:
            continue
        flag = name.replace("_", "-")
        args.append(f"--{flag}={to_text(value, flag)}" if not isinstance(value, bool) else f"--{flag}" if value else f"--no-{flag}")
    return args


def to_text(value: Any, flag: str) -> str:
    """A value as it is written behind `--flag=` or in the environment. Raises as to_args."""
    if isinstance(value, list) and any("," in item for item in value):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--{flag}: an item must not contain a comma", param=flag)
    text = ",".join(value) if isinstance(value, list) else str(value) if isinstance(value, str | Path) else json.dumps(value)
    if text == NONE_WORD:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--{flag}: {NONE_WORD} stands for no value", param=flag)
    return text
