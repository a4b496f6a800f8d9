"""Metrics: the core's numbers of one instant, whichever thread asks, and a help text that helps."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from libs.errors import ErrorCode, TokenloomError
from services.scheduler.core.plan import Effects
from services.scheduler.core.request import CancelReason, Ending, Request
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason
from services.scheduler.metrics import SchedulerMetrics
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import planned, step, submit


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"tokenloom:{name}", labels)


async def watched(state: SchedulerState | None) -> SchedulerMetrics:
    metrics = SchedulerMetrics()
    metrics.watch(asyncio.get_running_loop(), lambda: state)
    return metrics


async def scrape(metrics: SchedulerMetrics) -> dict[str, float]:
    """As a scrape does it: from another thread."""
    text = await asyncio.to_thread(generate_latest, metrics.registry)
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if line and not line.startswith("#")]
    return {name: float(number) for name, _, number in lines}


async def test_the_core_is_read_from_another_thread():
    state = make_state()
    group = add_group(state, slots=1)
    submit(state, [1] * 20)
    submit(state, [2])
    step(state, group)
    numbers = await scrape(await watched(state))
    assert numbers["tokenloom:num_requests_running"] == 1
    assert numbers["tokenloom:num_requests_waiting"] == 1
    assert numbers['tokenloom:num_requests_waiting_by_reason{reason="token_budget"}'] == 0
    assert numbers['tokenloom:num_requests_waiting_by_reason{reason="no_slot"}'] == 1
    assert numbers["tokenloom:kv_cache_usage_perc"] == pytest.approx(0.25)


async def test_blocks_of_all_states_add_up():
    state = make_state(max_tokens_per_step=64)
    group = add_group(state)
    submit(state, [1] * 33, max_tokens=1)
    step(state, group)
    submit(state, [2] * 20)
    gone = submit(state, [3] * 10)
    planned(state, group)
    state.cancel(gone.key, CancelReason.CLIENT_DISCONNECTED, 2)
    numbers = await scrape(await watched(state))
    blocks = {kind: numbers[f'tokenloom:kv_blocks{{state="{kind}"}}'] for kind in ("held", "draining", "cached", "free")}
    assert blocks == {"held": 2, "draining": 1, "cached": 2, "free": 3}


async def test_before_a_worker_has_attached_a_scrape_works():
    assert "tokenloom:num_requests_running" not in await scrape(await watched(None))


async def test_conservation_holds_at_every_scrape_while_requests_come_and_go():
    state = make_state(max_requests=10_000)
    group = add_group(state)
    metrics = await watched(state)

    scraped = asyncio.Event()

    async def traffic() -> None:
        for number in itertools.count():
            if scraped.is_set():
                return
            submit(state, [number % 7 + 1], max_tokens=1 + number % 3)
            if number % 3 == 0:
                state.cancel(next(iter(state.requests)), CancelReason.CLIENT_DISCONNECTED, 1)
            if state.requests:
                step(state, group)
            await asyncio.sleep(0)

    running = asyncio.create_task(traffic())
    for _ in range(5):
        numbers = await scrape(metrics)
        ended = sum(numbers[f"tokenloom:requests_{kind}_total"] for kind in ("finished", "failed", "cancelled"))
        assert numbers["tokenloom:requests_admitted_total"] == ended + numbers["tokenloom:num_requests_live"]
    scraped.set()
    await running
    assert state.counters.admitted > 5


def ended(ending: Ending) -> Request:
    state = make_state()
    request = submit(state, [1, 2, 3])
    request.timeline.received_ns = 1
    state.finish(request, ending, 2_000_000_001, Effects())
    return request


@pytest.mark.parametrize(
    ("ending", "name", "labels"),
    [
        (Ending(FinishReason.STOP), "request_success_total", {"finished_reason": "stop"}),
        (Ending(FinishReason.LENGTH), "request_success_total", {"finished_reason": "length"}),
        (
            Ending(FinishReason.CANCELLED, cancel=CancelReason.SLOW_READER),
            "request_cancelled_total",
            {"reason": "slow_reader"},
        ),
        (Ending(FinishReason.DEADLINE), "request_cancelled_total", {"reason": "deadline"}),
        (
            Ending(FinishReason.FAILED, error=TokenloomError(ErrorCode.NON_FINITE, "nan")),
            "request_failed_total",
            {"reason": "non_finite"},
        ),
    ],
)
def test_every_ending_is_counted_under_its_label(ending: Ending, name: str, labels: dict[str, str]):
    metrics = SchedulerMetrics()
    metrics.ended(ended(ending))
    assert value(metrics.registry, name, **labels) == 1
    assert value(metrics.registry, "prompt_tokens_total") == 3
    assert value(metrics.registry, "request_queue_time_seconds_sum") == 2.0


def test_a_request_without_output_has_no_prefill_time():
    metrics = SchedulerMetrics()
    metrics.ended(ended(Ending(FinishReason.DEADLINE)))
    assert value(metrics.registry, "request_prefill_time_seconds_count") == 0


def test_what_a_request_took_leads_to_its_trace():
    metrics, exemplar = SchedulerMetrics(), {"trace_id": "0af7651916cd43dd8448eb211c80319c"}
    metrics.ended(ended(Ending(FinishReason.STOP)), exemplar)
    found = [sample for family in metrics.registry.collect() for sample in family.samples if sample.exemplar]
    assert {sample.name for sample in found} == {"tokenloom:request_queue_time_seconds_bucket"}  # it had no output: no other stage
    assert [sample.exemplar.labels for sample in found] == [exemplar]


def test_every_ending_has_a_series_before_the_first_of_its_kind():
    metrics = SchedulerMetrics()
    assert all(value(metrics.registry, "request_cancelled_total", reason=reason.value) == 0 for reason in CancelReason)
    assert all(value(metrics.registry, "request_failed_total", reason=code.spec.label) == 0 for code in ErrorCode)


def test_two_schedulers_in_one_process_do_not_share_numbers():
    first, second = SchedulerMetrics(), SchedulerMetrics()
    first.worker_losses.inc()
    assert value(second.registry, "worker_losses_total") == 0


async def test_every_metric_has_a_help_text():
    state = make_state()
    add_group(state)
    text = (await asyncio.to_thread(generate_latest, (await watched(state)).registry)).decode()
    helps = [line.split(" ", 3) for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helps) > 30
    assert all(len(parts) == 4 and parts[3] for parts in helps)
