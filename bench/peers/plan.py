"""Which loads a comparison runs, in which order, and which of them are done: pure, so that it can be told before hours are spent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.servers import BUSY, Server
from bench.workload import NAMED

MACHINE_SHARE = 0.05  # of the machine's cores: a load during which others used more is repeated, and marked if that was no better
_SEED, _PER_ROUND, _PER_ATTEMPT, _PER_COMPANY = 11, 1000, 100, 10


@dataclass(frozen=True, slots=True)
class Load:
    """One load of one server in one round."""

    round: int
    server: str
    name: str

    @property
    def workload(self) -> str:
        """Its name in bench.workload."""
        return self.name.removesuffix(BUSY)

    @property
    def busy(self) -> bool:
        """Whether a process that only counts runs beside it."""
        return self.name.endswith(BUSY)

    def seed(self, attempt: int) -> int:
        """A seed that no other load of the same server's process has, and all servers share: no prefix cache finds yesterday's prompts."""
        place = sorted(NAMED).index(self.workload) + _PER_COMPANY * self.busy
        return _SEED + _PER_ROUND * self.round + _PER_ATTEMPT * attempt + place

    def file(self, out: Path) -> Path:
        """Where its result lies."""
        return folder(out, self.round, self.server) / f"{self.name}.json"


def folder(out: Path, round_number: int, server: str) -> Path:
    """Where a server's files of one round lie."""
    return out / f"round-{round_number}" / server


def perplexity_file(out: Path, server: str) -> Path:
    """Where what a server's quantisation costs in quality lies."""
    return out / f"perplexity-{server}.json"


def order(servers: Sequence[Server], round_number: int) -> list[Server]:
    """The servers of a round (1, 2, ...): every second round backwards, then rotated by one, so that none is always behind the same one."""
    present = [server for server in servers if server.rounds is None or round_number <= server.rounds]
    turn = (round_number - 1) // 2 % len(present) if present else 0
    turned = present[turn:] + present[:turn]
    return turned if round_number % 2 else turned[::-1]


def loads(server: Server, round_number: int, workloads: Sequence[str] | None) -> list[Load]:
    """The loads of a server in a round; `workloads`: only those, by the name without "+busy"."""
    wanted = [Load(round_number, server.name, name) for name in server.loads]
    return [load for load in wanted if workloads is None or load.workload in workloads]


def missing(server: Server, round_number: int, workloads: Sequence[str] | None, out: Path, *, gated: bool) -> list[Load]:
    """The loads that have no result yet, or a failure; all of them where nothing but what is known of the server itself is missing.

    `gated`: the answer to the accuracy gate belongs to what must be known of a server that can be asked.
    """
    wanted = loads(server, round_number, workloads)
    rest = [load for load in wanted if good(load.file(out)) is None and unfinished(load.file(out)) is None]
    facts = good(folder(out, round_number, server.name) / "server.json")
    known = facts is not None and (not gated or server.exact is None or "equal" in facts.get("gate", {}))
    return rest if rest or known else wanted


def good(file: Path) -> dict[str, Any] | None:
    """A result that is none of a failure."""
    content = read(file)
    return None if content is None or "failed" in content else content


def unfinished(file: Path) -> float | None:
    """The seconds after which a load that had not ended was given up; None: it was not. That is a result: it is not tried again."""
    seconds = (read(file) or {}).get("unfinished_s")
    return None if seconds is None else float(seconds)


def disturbed(result: dict[str, Any]) -> bool:
    """Whether others used more of the machine than a comparison allows."""
    return bool(result["cpu"]["others_cores"] > MACHINE_SHARE * result["machine"]["cores"])


def stolen(result: dict[str, Any]) -> float:
    """The cores that the machine's host gave to somebody else meanwhile, where that is more than a comparison allows; else 0."""
    cores = float(result["cpu"]["steal_s"] / result["cpu"]["wall_s"])
    return cores if cores > MACHINE_SHARE * result["machine"]["cores"] else 0.0


def read(file: Path) -> dict[str, Any] | None:
    """A result; None where it is missing or was being written when the run was interrupted."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content
