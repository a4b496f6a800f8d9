"""A run's result for people (tables) and for machines (JSON)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.machine import CpuUse, Machine
from bench.stats import Distribution, Statistics
from bench.workload import Workload

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Result:
    """All that is known of a run. `command` repeats it; `server` is what the server says of itself."""

    started_at: str
    command: str
    url: str
    model: str
    endpoint: str
    workload_name: str | None
    seed: int
    workload: Workload
    server: str
    machine: Machine
    cpu: CpuUse
    statistics: Statistics
    failure_examples: dict[str, str]
    note: str = ""
    format: int = FORMAT

    def write(self, path: Path) -> None:
        """Writes the result as indented JSON, making folders that are missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(dataclasses.asdict(self)), indent=2) + "\n")

    def show(self, console: Console) -> None:
        """Prints the tables, and a warning for whatever makes the numbers doubtful."""
        console.print(self._times())
        console.print(self._rates())
        for warning in self.warnings():
            console.print(f"warning: {warning}", style="yellow", markup=False)

    def warnings(self) -> list[str]:
        """Why the numbers may not mean what they seem to."""
        found, facts = [], self.statistics
        for kind, count in facts.failures.items():
            found.append(f"{count} requests failed: {kind}: {self.failure_examples.get(kind, '')}")
        if facts.without_usage:
            found.append(f"{facts.without_usage} answers came without usage: their tokens are not counted")
        if self.workload.ignore_eos and facts.short_outputs:
            found.append(
                f"{facts.short_outputs} outputs have less than {self.workload.output_len} tokens: the server does not ignore the end"
            )
        if self.cpu.others_cores > 0.1:
            found.append(f"other processes used {self.cpu.others_cores:.2f} of {self.machine.cores} cores meanwhile")
        return found

    def _times(self) -> Table:
        facts, name = self.statistics, f"workload {self.workload_name}" if self.workload_name else "load"
        load = f"{self.workload.concurrency} in flight" if self.workload.concurrency else f"{self.workload.rate:g} requests/s"
        shape = self.workload.shape
        lengths = f"{f'{shape.prefix_len} shared + ' if shape.prefix_len else ''}{shape.input_len} in / {self.workload.output_len} out"
        table = Table("ms", *(f.name for f in dataclasses.fields(Distribution)), title=f"{name}: {load}, {lengths}")
        for label, times in (("TTFT", facts.ttft_ms), ("TPOT", facts.tpot_ms), ("ITL", facts.itl_ms), ("E2E", facts.e2e_ms)):
            cells = (times.mean, times.p50, times.p95, times.p99, times.max)
            table.add_row(label, str(times.count), *("-" if cell is None else f"{cell:.1f}" for cell in cells))
        return table

    def _rates(self) -> Table:
        facts, cpu = self.statistics, self.cpu
        table = Table(show_header=False)
        table.add_row("requests", f"{facts.completed} completed, {facts.failed} failed in {facts.duration_s:.2f} s")
        table.add_row("tokens", f"{facts.prompt_tokens} prompt ({facts.cached_tokens} cached), {facts.output_tokens} output")
        table.add_row("output tok/s", f"{facts.output_tokens_per_s:.1f}")
        table.add_row("total tok/s", f"{facts.total_tokens_per_s:.1f}")
        server = "?" if cpu.server_s is None else f"{cpu.server_s:.1f}"
        table.add_row("CPU s", f"server {server}, client {cpu.client_s:.1f}, others {cpu.others_s:.1f}, steal {cpu.steal_s:.1f}")
        table.add_row("machine", f"{self.machine.cpu}, {self.machine.cores} cores; server {self.server or 'unknown'}")
        return table


def _rounded(value: object) -> object:
    """Floats to six digits after the point, so that results can be read and compared."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
