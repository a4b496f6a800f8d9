"""A value as somebody gave it, and where."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Source(enum.IntEnum):
    """Where a value comes from; a later one wins over an earlier one."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3
    # What the process that starts a service decides for it (`tokenloom serve`: addresses, ports, names).
    DECIDED = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A value before it is checked; `where` names it in messages: `--port`, `TOKENLOOM_PORT`, `mesh.yaml: gateway.port`."""

    value: Any
    source: Source
    where: str
