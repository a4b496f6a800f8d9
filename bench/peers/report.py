"""The comparison for people (markdown) and for machines (JSON)."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import Machine
from bench.peers.environments import RECIPES
from bench.peers.places import machine_slug
from bench.peers.results import Results
from bench.peers.servers import BUSY, Server
from bench.peers.targets import Reached
from bench.peers.weights import SharedWeights

_KEPT = ("statistics", "cpu", "memory", "ceilings", "seed", "started_at", "attempt", "command")
_COLUMNS = ("output tok/s", "total tok/s", "TTFT p50 / p99", "TPOT p50 / p99", "ITL p50 / p99", "others, cores")


def markdown(results: Results, machine: Machine, weights: SharedWeights) -> str:
    """The whole report."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [f"# Comparison with other servers, {today}", ""]
    lines += [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.system}; "
        f"Python {machine.python}, torch {machine.packages.get('torch', 'unknown')}.",
        *_setting(results),
        f"Tree {', '.join(results.trees()) or 'unknown'}. Rounds: {len(results.rounds)}, "
        "servers one after the other, every second round backwards.",
        f"Model: {weights.model}; every float32 server has the same bits.",
        "Written by `make bench`; docs/benchmarks.md says what each figure means and what is weak in the comparison, "
        "docs/performance.md why a target was not reached.",
        "",
    ]
    lines += _targets(results)
    lines += _figures(results)
    lines += _servers(results)
    lines += _ceilings(results)
    marked = results.marked()
    lines += ["", "## Doubtful runs", "", *([f"- {line}" for line in marked] or ["None."]), ""]
    return "\n".join(lines)


def _setting(results: Results) -> list[str]:
    """The kernels' instruction set and the system's huge pages, as they were found when the rounds ran."""
    known = {(found["variant"], found["huge_pages"]) for found in results.machines.values() if "variant" in found}
    return [f"Tokenloom's kernels: {variant}; transparent huge pages: {pages}." for variant, pages in sorted(known)]


def _targets(results: Results) -> list[str]:
    lines = ["## Targets", "", "Ratio of the medians over rounds; in brackets the least and the most of the rounds' own ratios."]
    lines += ["Others: the most that other processes used of the cores meanwhile, beside the one and the other server.", ""]
    rows = [_ratio_row(one, results) for one in results.ratios()]
    lines += _table(("figure", "of", "over", "load", "at least (at most)", "goal", "reached", "others, cores", ""), rows)
    rows = [(one.label, one.wanted, one.reached, one.verdict) for one in results.conditions()]
    return [*lines, "", *_table(("figure", "wanted", "reached", ""), rows), ""]


def _ratio_row(one: Reached, results: Results) -> tuple[str, ...]:
    target = one.target
    shown = "-" if one.ratio is None else f"{one.ratio:.2f}x ({one.low:.2f} to {one.high:.2f})"
    others = " / ".join(_number(results.others(server, target.load), 2) for server in (target.ours, target.peer))
    goal = "-" if target.goal is None else f"{target.goal:g}x"
    least = f"{target.least:g}x" if target.rising else f"({target.least:g}x)"
    return target.label, target.ours, target.peer, target.load, least, goal, shown, others, results.verdict(one)


def _figures(results: Results) -> list[str]:
    lines = ["## Figures", "", "Medians over rounds; times in ms. Runs beside one busy process are marked +busy.", ""]
    rows = []
    for name in ("a", "b", "c", "d", "a" + BUSY, "b" + BUSY):
        for server in results.servers:
            if name in server.loads and results.middle("output_tokens_per_s", server.name, name) is not None:
                rows.append((name, server.title, *_cells(results, server.name, name)))
    return lines + _table(("load", "server", *_COLUMNS), rows) + [""]


def _cells(results: Results, server: str, load: str) -> Iterable[str]:
    yield _number(results.middle("output_tokens_per_s", server, load))
    yield _number(results.middle("total_tokens_per_s", server, load))
    for kind in ("ttft", "tpot", "itl"):
        yield " / ".join(_number(results.middle(f"{kind}_{part}", server, load)) for part in ("p50", "p99"))
    yield _number(results.others(server, load), 2)


def _servers(results: Results) -> list[str]:
    lines = ["## Servers", "", "Ready: /ready or /health answers; answer: a chat of one token does. Memory of all processes in MB.", ""]
    rows = []
    for server in results.servers:
        cells = [results.fact(server.name, *path) for path in (("ready_s",), ("first_answer_s",), ("memory_ready", "pss_mb"))]
        end = [results.fact(server.name, "memory_after", part) for part in ("pss_mb", "rss_mb")]
        cache = f"{server.kv_bytes / 2**30:.1f} GiB" if server.kv_bytes else "its default"
        ends = " / ".join(_number(value, 0) for value in end)
        rows.append((server.title, results.gate(server)[0], *(_number(value) for value in cells[:2]), _number(cells[2], 0), ends, cache))
    lines += _table(("server", "gate", "ready s", "answer s", "PSS ready", "PSS / RSS after", "KV cache"), rows)
    lines += ["", "Started with (words in braces: places of `bench/peers/servers.py`):", "", "```"]
    for server in results.servers:
        lines += [f"{server.name}: {words}" for words in _started(results, server)]
    lines += ["```", ""]
    for recipe in RECIPES:
        known = next((v for s in results.servers if s.environment == recipe.name for v in [_version(results, s)] if v), None)
        if known:
            lines.append(f"- {recipe.name}: {', '.join(f'{key} {value}' for key, value in known.items())}; {recipe.why}")
    return lines


def _started(results: Results, server: Server) -> list[str]:
    """The commands with which a server was started in the rounds that ran: more than one where the table of servers changed between."""
    facts = [found for number in results.rounds if "command" in (found := results.facts[server.name, number])]
    lines = [" ".join([*(f"{key}={value}" for key, value in found["variables"].items()), *found["command"]]) for found in facts]
    return list(dict.fromkeys(lines))


def _version(results: Results, server: Server) -> dict[str, str]:
    return next((facts["version"] for number in results.rounds if (facts := results.facts[server.name, number]).get("version")), {})


def _ceilings(results: Results) -> list[str]:
    rows = [
        (str(number), *(_number(found.get(key)) for key in ("read_gb_s", "read_median_gb_s", "gemm_gflop_s", "load_average")))
        for number, found in results.machines.items()
    ]
    return [
        "",
        "## The machine in each round",
        "",
        *_table(("round", "read GB/s", "median", "product GFLOP/s", "load average"), rows),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def document(results: Results, machine: Machine, weights: SharedWeights) -> dict[str, Any]:
    """The same for machines: every run, every server, every target."""
    runs = [
        {"round": number, "server": server, "load": load} | {key: result[key] for key in _KEPT if key in result}
        for (server, load, number), result in sorted(results.runs.items())
    ]
    ratios = [dataclasses.asdict(one) | {"verdict": results.verdict(one)} for one in results.ratios()]
    conditions = [dataclasses.asdict(one) | {"verdict": one.verdict} for one in results.conditions()]
    return {
        "machine": dataclasses.asdict(machine),
        "written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "weights": {"model": weights.model, "float32_bytes": weights.bytes_float32, "sha256": weights.checksums},
        "ceilings": results.machines,
        "servers": [{"server": server, "round": number} | facts for (server, number), facts in sorted(results.facts.items()) if facts],
        "targets": ratios + conditions,
        "doubtful": results.marked(),
        "runs": runs,
    }


def file_stem(machine: Machine) -> str:
    """The name of a report's files: DATE-peers-MACHINE."""
    return f"{datetime.datetime.now(datetime.UTC).date().isoformat()}-peers-{machine_slug(machine)}"


def write(results: Results, machine: Machine, weights: SharedWeights, folder: Path) -> Path:
    """Writes both files and returns the markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{file_stem(machine)}.md"
    target.write_text(markdown(results, machine, weights))
    target.with_suffix(".json").write_text(json.dumps(document(results, machine, weights), indent=1) + "\n")
    return target
