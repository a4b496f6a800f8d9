"""What the gateway's metrics read when they are scraped."""

from __future__ import annotations

from libs.clock import SystemClock
from libs.errors import ErrorCode
from libs.telemetry.tracing import Tracer
from services.gateway.admission import Admission
from services.gateway.endings import label_of
from services.gateway.metrics import GatewayMetrics
from services.gateway.session import Window
from services.gateway.tickets import CancelReason, FinishReason
from services.gateway.tokenizer_client import TokenizerClient
from tokenloom.scheduler.v1 import scheduler_pb2


def test_what_is_outstanding_is_read_at_each_scrape():
    admission, metrics = Admission(), GatewayMetrics("tiny")
    metrics.watch(
        lambda unit: admission.tokens if unit == "tokens" else admission.sequences, lambda unit: {"tokens": 100, "sequences": 4}[unit]
    )

    def outstanding() -> tuple[float | None, float | None]:
        read = metrics.registry.get_sample_value
        return read("tokenloom:gateway_outstanding", {"unit": "sequences"}), read("tokenloom:gateway_outstanding", {"unit": "tokens"})

    leases = admission.admit(Window(max_outstanding=4, max_outstanding_tokens=100, ready=True), [30, 20])
    assert outstanding() == (2, 50)
    leases[0].settle(25)
    leases[1].release()
    assert outstanding() == (1, 25)
    leases[0].release()
    assert outstanding() == (0, 0)
    assert metrics.registry.get_sample_value("tokenloom:gateway_window", {"unit": "tokens"}) == 100


def samples(metrics: GatewayMetrics, name: str, label: str) -> dict[str, float]:
    """The series of a metric by one of their labels."""
    found = (sample for family in metrics.registry.collect() for sample in family.samples if sample.name == f"tokenloom:{name}")
    return {sample.labels[label]: sample.value for sample in found}


ENDINGS = [
    *(scheduler_pb2.Ending(reason=reason) for reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)),
    scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_CONSTRAINT_COMPLETE),
]
CANCELLED = [
    scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_DEADLINE),
    *(
        scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_CANCELLED, cancel_reason=reason)
        for reason in CancelReason.values()
        if reason != CancelReason.CANCEL_REASON_UNSPECIFIED
    ),
]


def test_every_way_to_end_has_a_series_before_anybody_ended_that_way():
    metrics = GatewayMetrics("tiny")
    assert samples(metrics, "request_success_total", "finished_reason") == {label_of(ending): 0 for ending in ENDINGS}
    assert samples(metrics, "request_cancelled_total", "reason") == {label_of(ending): 0 for ending in CANCELLED}
    assert samples(metrics, "request_rejected_total", "reason") == {code.spec.label: 0 for code in ErrorCode}


async def test_every_tokenizer_has_a_series_before_it_failed():
    metrics = GatewayMetrics("tiny")
    client = TokenizerClient(["127.0.0.1:1", "127.0.0.1:2"], SystemClock(), metrics, lambda: "", tracer=Tracer("gateway", "g"))
    assert samples(metrics, "gateway_tokenizer_failures_total", "address") == {"127.0.0.1:1": 0, "127.0.0.1:2": 0}
    await client.close()
