"""All files of a comparison read again: the figures by server, load and round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.plan import disturbed, folder, good, loads, perplexity_file, read, stolen, unfinished
from bench.peers.servers import BOUND_BY_MEMORY, BUSY, Server
from bench.peers.targets import TARGETS, Reached, median, reached

_DISTRIBUTIONS = ("ttft", "tpot", "itl")
_FLOOR_FACTOR, _READY_S, _MEMORY_MB = 1.25, 8.0, 2000.0


@dataclass(frozen=True, slots=True)
class Condition:
    """A target that is no ratio of two servers' figures: what was reached, and whether that is enough (None: not measured).

    One that is not `judged` is stated alone.
    """

    label: str
    wanted: str
    reached: str
    met: bool | None
    judged: bool = True

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.met is None:
            return "not measured" if self.judged else ""
        return "met" if self.met else "NOT met"


class Results:
    """What lies in the folder of a comparison."""

    def __init__(
        self, out: Path, servers: Sequence[Server], rounds: int, weight_bytes: int, workloads: Sequence[str] | None = None
    ) -> None:
        """`workloads`: only these were asked for (None: all); what lies there of others is shown, and not missed."""
        self.servers, self.rounds = list(servers), range(1, rounds + 1)
        self._weight_bytes, self._workloads = weight_bytes, workloads
        self.perplexities = {server.name: good(perplexity_file(out, server.name)) for server in servers if server.form}
        self.machines = {number: read(out / f"round-{number}" / "machine.json") or {} for number in self.rounds}
        self.facts: dict[tuple[str, int], dict[str, Any]] = {}
        self.runs: dict[tuple[str, str, int], dict[str, Any]] = {}
        self.endless: dict[tuple[str, str, int], float] = {}
        for number in self.rounds:
            for server in servers:
                self.facts[server.name, number] = read(folder(out, number, server.name) / "server.json") or {}
                for load in loads(server, number, None):
                    seconds, result = unfinished(load.file(out)), good(load.file(out))
                    if seconds is not None:
                        self.endless[server.name, load.name, number] = seconds
                    if result is not None:
                        self.runs[server.name, load.name, number] = result

    def figure(self, name: str, server: str, load: str, number: int) -> float | None:
        """One figure of one run: a rate by its name in the statistics, or "ttft_p50" and the like in milliseconds."""
        result = self.runs.get((server, load, number))
        if result is None or result["statistics"]["completed"] == 0:
            return None
        kind, _, part = name.partition("_")
        facts = result["statistics"]
        value = facts[f"{kind}_ms"][part] if kind in _DISTRIBUTIONS else facts[name]
        return None if value is None else float(value)

    def middle(self, name: str, server: str, load: str) -> float | None:
        """The median of a figure over the rounds."""
        return median(partial(self.figure, name), server, load, self.rounds)

    def others(self, server: str, load: str) -> float | None:
        """The most cores that other processes used during a load, the busy one of "+busy" among them."""
        found = [result["cpu"]["others_cores"] for (s, w, _), result in self.runs.items() if (s, w) == (server, load)]
        return max(found, default=None)

    def trees(self) -> list[str]:
        """The commits that the runs were made with: more than one where a run went on after a commit."""
        return sorted({str(result["machine"].get("client_commit")) for result in self.runs.values()})

    def ratios(self) -> list[Reached]:
        """Every target that is a ratio of two servers that were both asked for."""
        names = {server.name for server in self.servers}
        wanted = [target for target in TARGETS if {target.ours, target.peer} <= names]
        return [reached(target, partial(self.figure, target.figure), self.rounds) for target in wanted]

    def fact(self, server: str, *path: str) -> float | None:
        """The median over rounds of what is known of a server itself, such as ("memory_ready", "pss_mb")."""
        found = []
        for number in self.rounds:
            value: Any = self.facts.get((server, number))
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                found.append(float(value))
        return statistics.median(found) if found else None

    def slowdown(self, server: str, load: str) -> float | None:
        """How many times slower a load is beside a busy process: the median of the rounds' ratios of output tokens a second.

        A load that had not ended when it was given up is so many times slower at least as it had more seconds.
        """
        found = []
        for number in self.rounds:
            quiet, beside = (self.figure("output_tokens_per_s", server, name, number) for name in (load, load + BUSY))
            seconds = self.endless.get((server, load + BUSY, number))
            if quiet and beside:
                found.append(quiet / beside)
            elif quiet and seconds:
                found.append(seconds / self.runs[server, load, number]["cpu"]["wall_s"])
        return statistics.median(found) if found else None

    def gate(self, server: Server) -> tuple[str, bool | None]:
        """What the accuracy gate says of a server in every round that has runs, in words and as a verdict (None: it was asked in none).

        A round whose gate was not answered has not passed; nor, where tokens must be equal, one whose answers were texts.
        """
        ran = sorted({number for name, _, number in self.runs if name == server.name})
        gates = [self.facts[server.name, number].get("gate", {}) for number in ran]
        answered = [one for one in gates if "equal" in one]
        if not any(gates):
            return "not asked", None
        if not answered:
            return "failed", False
        worst = min(answered, key=lambda one: one["equal"])
        texts = sum(one.get("texts", 0) for one in answered) if server.exact else 0
        words = [f"{worst['equal']} of {worst['prompts']}"]
        words += [f"in {len(answered)} of {len(ran)} rounds"] if len(answered) < len(ran) else []
        words += [f"{texts} as text alone"] if texts else []
        return ", ".join(words), worst["equal"] == worst["prompts"] and len(answered) == len(ran) and not texts

    def quality(self, server: Server) -> Condition | None:
        """What a server's quantisation costs in perplexity; None for one that has none."""
        if not server.form:
            return None
        found = self.perplexities[server.name]
        ratio = None if found is None else float(found["ratio"])
        shown = "-" if ratio is None else f"{ratio:.4f}x"
        met = None if ratio is None else ratio <= server.most_perplexity
        return Condition(f"perplexity of {server.name} over float32's", f"at most {server.most_perplexity:g}x", shown, met)

    def against(self, name: str, load: str) -> list[str]:
        """Why a server's figures of a load do not count, whatever they are: its gate, its perplexity, requests that failed."""
        server = next(server for server in self.servers if server.name == name)
        found = []
        if server.exact and not self.gate(server)[1]:
            found.append(f"gate {self.gate(server)[0]}")
        quality = self.quality(server)
        if quality is not None and not quality.met:
            found.append(f"perplexity {quality.reached}, {quality.wanted}" if quality.met is False else "no perplexity")
        lost = sum(result["statistics"]["failed"] for (s, w, _), result in self.runs.items() if (s, w) == (name, load))
        return found + ([f"{lost} requests failed"] if lost else [])

    def verdict(self, one: Reached) -> str:
        """A ratio's verdict, with what speaks against it."""
        reasons = self.against(one.target.ours, one.target.load) if one.ratio is not None else []
        return f"{one.verdict}, but does not count: {'; '.join(reasons)}" if reasons else one.verdict

    def bandwidths(self, server: str, number: int) -> tuple[float, ...]:
        """The medians of the gigabytes read a second, just before and just after the load that memory bounds; those that are known."""
        found = self.runs.get((server, BOUND_BY_MEMORY, number), {}).get("ceilings", {})
        return tuple(found[when]["read_median_gb_s"] for when in ("before", "after") if found.get(when, {}).get("read_median_gb_s"))

    def floor_factor(self, server: str) -> float | None:
        """Time per output token at one stream over what reading the weights once takes at the bandwidth sustained around it.

        Of the medians before and after the greater counts: company slows the reading, and would make the floor too easy to reach."""
        found = []
        for number in self.rounds:
            tpot = self.figure("tpot_p50", server, BOUND_BY_MEMORY, number)
            speeds = self.bandwidths(server, number)
            if tpot and speeds:
                found.append(tpot * 1e-3 / (self._weight_bytes / (max(speeds) * 1e9)))
        return statistics.median(found) if found else None

    def _floor(self) -> Condition:
        """The time per token over the floor, with the bandwidths of each round, before and after."""
        found = _at_most("TPOT p50 at 1 stream over the time of reading the weights", self.floor_factor("tokenloom"), _FLOOR_FACTOR, "x")
        pairs = [speeds for number in self.rounds if (speeds := self.bandwidths("tokenloom", number))]
        shown = ", ".join(" / ".join(f"{speed:.1f}" for speed in speeds) for speeds in pairs)
        return replace(found, reached=f"{found.reached} (GB/s before / after: {shown})") if pairs else found

    def marked(self) -> list[str]:
        """Loads during which others used too much of the machine, those whose answers were not whole, and those without a result."""
        found = []
        for (name, load, number), result in sorted(self.runs.items()):
            where = f"round {number}, {name} {load}"
            if not load.endswith(BUSY) and disturbed(result):
                found.append(f"{where}: others used {result['cpu']['others_cores']:.2f} cores")
            if lost := stolen(result):
                found.append(f"{where}: the machine's host took {lost:.2f} cores")
            facts = result["statistics"]
            if facts["failed"]:
                found.append(f"{where}: {facts['failed']} requests failed ({facts['failures']})")
            if facts["without_usage"]:
                found.append(f"{where}: {facts['without_usage']} answers without usage are missing from the rates")
            if facts["short_outputs"]:
                found.append(f"{where}: {facts['short_outputs']} outputs ended early")
        for (name, load, number), seconds in sorted(self.endless.items()):
            found.append(f"round {number}, {name} {load}: had not ended after {seconds:.0f} s")
        return found + self.absent()

    def absent(self) -> list[str]:
        """What was asked for and has no result."""
        known = self.runs.keys() | self.endless.keys()
        found = []
        asked = [(server, number) for server in self.servers for number in self.rounds if server.rounds is None or number <= server.rounds]
        for server, number in asked:
            names = [load.name for load in loads(server, number, self._workloads) if (server.name, load.name, number) not in known]
            if names:
                found.append(f"round {number}, {server.name}: no result of {', '.join(names)}")
        return found + [f"{name}: no perplexity" for name, found_ in self.perplexities.items() if found_ is None]

    def conditions(self) -> list[Condition]:
        """The targets of this project alone, and those about company."""
        found = []
        ready = self.fact("tokenloom", "ready_s")
        at_start, at_end = self.fact("tokenloom", "memory_ready", "pss_mb"), self.fact("tokenloom", "memory_after", "pss_mb")
        found.append(self._floor())
        found.append(_at_most("seconds until /ready answers", ready, _READY_S, " s"))
        found.append(_at_most("memory of the whole mesh once ready (PSS; the KV cache untouched)", at_start, _MEMORY_MB, " MB"))
        # The bound is of memory without the cache, and nobody tells which part of it was touched.
        shown = "-" if at_end is None else f"{at_end:.2f} MB"
        found.append(
            Condition("memory after all loads (PSS; with what was touched of the KV cache)", "stated alone", shown, None, judged=False)
        )
        found += [one for server in self.servers if (one := self.quality(server))]
        for load in ("a", "b"):
            ours = self.slowdown("tokenloom", load)
            for peer in ("vllm", "llamacpp"):
                theirs = self.slowdown(peer, load)
                label = f"slowdown beside a busy process, workload {load}, not above {peer}'s"
                known = ours is not None and theirs is not None
                wanted, got = (f"{theirs:.2f}x" if theirs else "-"), (f"{ours:.2f}x" if ours else "-")
                found.append(Condition(label, wanted, got, ours <= theirs if known else None))  # type: ignore[operator]
        return found


def _at_most(label: str, value: float | None, bound: float, unit: str) -> Condition:
    shown = "-" if value is None else f"{value:.2f}{unit}"
    return Condition(label, f"at most {bound:g}{unit}", shown, None if value is None else value <= bound)
