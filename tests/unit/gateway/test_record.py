"""How a choice's time is laid between the clocks of gateway and scheduler, and what its trace says of the sampling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.constraints import Constraint, ConstraintKind
from libs.sampling import SamplingParams
from services.gateway.record import hop_of, sampling_attributes
from tokenloom.scheduler.v1 import scheduler_pb2

NS = st.integers(0, 10**15)


def test_instants_in_order_are_taken_as_they_are():
    timings = scheduler_pb2.Timings(received_unix_ns=150, ended_unix_ns=190)
    hop = hop_of(timings, 100, 200)
    assert (hop.received_ns, hop.ended_ns) == (150, 190)


def test_instants_of_another_clock_split_the_rest_into_halves():
    timings = scheduler_pb2.Timings(received_unix_ns=9_000_000, ended_unix_ns=9_050_000, queue_us=10, prefill_us=20, decode_us=30)
    hop = hop_of(timings, 1_000_000, 1_100_000)
    assert (hop.received_ns, hop.ended_ns) == (1_020_000, 1_080_000)


def test_without_timings_all_is_transport():
    hop = hop_of(scheduler_pb2.Timings(), 1_000, 2_000)
    assert (hop.received_ns, hop.ended_ns) == (1_500, 1_500)


@given(NS, NS, NS, NS, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_whatever_the_clocks_say_the_stages_are_in_order(submitted, length, received, ended, queue, prefill, decode):
    timings = scheduler_pb2.Timings(received_unix_ns=received, ended_unix_ns=ended, queue_us=queue, prefill_us=prefill, decode_us=decode)
    hop = hop_of(timings, submitted, submitted + length)
    assert hop.submitted_ns <= hop.received_ns <= hop.ended_ns <= hop.returned_ns


def test_what_steers_the_output_is_named_where_it_has_an_effect():
    plain = sampling_attributes(SamplingParams(max_tokens=4), None)
    assert set(plain) == {f"gen_ai.request.{name}" for name in ("max_tokens", "temperature", "top_p", "top_k")}
    schema = Constraint(ConstraintKind.JSON_SCHEMA, ("{}",))
    steered = sampling_attributes(SamplingParams(max_tokens=4, frequency_penalty=0.5, presence_penalty=-1.0), schema)
    assert {name: value for name, value in steered.items() if name not in plain} == {
        "gen_ai.request.frequency_penalty": 0.5,
        "gen_ai.request.presence_penalty": -1.0,
        "gen_ai.output.type": "json",
        "tokenloom.constraint": "json_schema",
    }
    expression = sampling_attributes(SamplingParams(max_tokens=4), Constraint(ConstraintKind.REGEX, ("a",)))
    assert ("gen_ai.output.type" in expression, expression["tokenloom.constraint"]) == (False, "regex")
