"""What a worker's recorded steps say: how long it computed, how long it stood still between them, and what a mesh added to both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.stats import percentile
from bench.stream import RequestRecord
from services.worker.step_log import LoggedStep


@dataclass(frozen=True, slots=True)
class Moment:
    """One step: when it began, how long it took, and how long nothing ran before it, in microseconds.

    `waiting`: all its rows are new, so that before it nobody was there to be computed. `prefill`: it computes more than a token a row.
    """

    began_us: float
    total_us: int
    idle_us: int
    forward_us: int
    prepare_us: int
    sample_us: int
    rows: int
    waiting: bool
    prefill: bool

    @property
    def period_us(self) -> int:
        """From the end of the step before to its own, without time in which nobody was there."""
        return self.total_us + (0 if self.waiting else self.idle_us)


def moments(steps: Sequence[LoggedStep]) -> list[Moment]:
    """The steps as times; those of a lease have the rows of its first one. The time before the first step is nobody's."""
    made, batch = list[Moment](), None
    for index, step in enumerate(steps):
        batch = step.batch if step.batch is not None else batch
        if batch is None or not batch.slots:
            continue
        timings, opened = step.result.timings, {item.slot for item in batch.opens}
        waiting = not index or (step.batch is not None and opened.issuperset(batch.slots))
        prefill = any(count > 1 for count in batch.counts)
        made.append(
            Moment(
                step.began_ns / 1000, timings.total_us, timings.idle_us, timings.forward_us, timings.prepare_us, timings.sample_us,
                len(batch.slots), waiting, prefill,
            )
        )  # fmt: skip
    return made


@dataclass(frozen=True, slots=True)
class Line:
    """A run's time line, milliseconds a step by what the worker did; `idle_share`: of the time in which somebody was there, 0 to 1."""

    steps: int
    rows: float
    step_ms: float
    forward_ms: float
    prepare_ms: float
    sample_ms: float
    rest_ms: float
    idle_ms: float
    idle_share: float

    @classmethod
    def of(cls, run: Sequence[Moment]) -> Line:
        """Means over the steps of a run. Raises ValueError without steps."""
        if not run:
            raise ValueError("no steps")
        count, idle = len(run), sum(step.idle_us for step in run if not step.waiting)
        total, forward, prepare, sample = (
            sum(getattr(step, name) for step in run) for name in ("total_us", "forward_us", "prepare_us", "sample_us")
        )
        rest = total - forward - prepare - sample
        total_ms, forward_ms, prepare_ms, sample_ms, rest_ms, idle_ms = (
            round(value / count / 1000, 3) for value in (total, forward, prepare, sample, rest, idle)
        )
        rows, share = round(sum(step.rows for step in run) / count, 1), round(idle / (total + idle), 4)
        return cls(count, rows, total_ms, forward_ms, prepare_ms, sample_ms, rest_ms, idle_ms, share)


def period_ratio(served: Sequence[Moment], alone: Sequence[Moment]) -> float:
    """What a served step takes over what it takes alone, idle time included: the median over the steps, which are the same in both.

    Raises ValueError when they are not.
    """
    if len(served) != len(alone) or not served:
        raise ValueError(f"{len(served)} steps were served, {len(alone)} ran alone")
    return statistics.median(mine.period_us / max(1, other.period_us) for mine, other in zip(served, alone, strict=True))


def added_to_first_token_ms(records: Sequence[RequestRecord], served: Sequence[Moment], alone: Sequence[Moment]) -> float | None:
    """Median over the requests: time to first token less what the worker alone takes for the steps that ran meanwhile.

    A step that ran in part counts in part. Clients and worker must share a monotonic clock. None without a first token.
    """
    pairs, added = list(zip(served, alone, strict=True)), list[float]()
    for record in records:
        if not record.chunk_times:
            continue
        due, first = record.due * 1e6, record.chunk_times[0] * 1e6
        computed = 0.0
        for step, other in pairs:
            overlap = min(first, step.began_us + step.total_us) - max(due, step.began_us)
            computed += max(0.0, overlap) / max(1, step.total_us) * other.total_us
        added.append((first - due - computed) / 1000)
    return round(percentile(sorted(added), 0.5), 2) if added else None


def hops_ms(records: Sequence[RequestRecord], served: Sequence[Moment]) -> tuple[float, float] | None:
    """Medians of two ways, in milliseconds: from when a request was due to the beginning of its first step, and from its first token's step
    to the client. Of requests that found an idle worker; None where there are none."""
    there, back = list[float](), list[float]()
    for record in records:
        due, first = record.due * 1e6, record.chunk_times[0] * 1e6 if record.chunk_times else 0.0
        begun = next((step for step in served if step.began_us >= due), None)
        if begun is None or not begun.waiting or begun.began_us > first:
            continue
        there.append((begun.began_us - due) / 1000)
        back.append((first - max(end for step in served if (end := step.began_us + step.total_us) <= first)) / 1000)
    return (round(statistics.median(there), 2), round(statistics.median(back), 2)) if there else None
