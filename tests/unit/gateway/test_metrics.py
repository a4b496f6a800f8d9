"""What the gateway's metrics read when they are scraped."""

from __future__ import annotations

from services.gateway.admission import Admission
from services.gateway.metrics import GatewayMetrics
from services.gateway.session import Window


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
