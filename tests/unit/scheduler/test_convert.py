"""Between the wire and the core: what is refused, what is kept, and that nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from libs.blocks import block_hashes
from libs.clock import ManualClock
from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids, unpack_ids
from libs.sampling import SamplingParams
from libs.telemetry.tracing import TraceParent
from services.scheduler import convert
from services.scheduler.convert import SubmitRules, WireTrace
from services.scheduler.core.plan import BatchOutcome, Effects, RowOutcome, StepTimings
from services.scheduler.core.request import CancelReason, Ending, Request, RequestKey
from services.scheduler.core.stopping import FinishReason, Stop, StopRules
from tests.support.core import RULES, add_group, make_request, make_state
from tests.support.model_constraints import multiples
from tests.support.model_worker import VOCABULARY, text_table
from tests.unit.scheduler.core.outcomes import planned, step, submit
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2


def message(prompt: list[int], outputs: list[int] | None = None, **sampling: Any) -> scheduler_pb2.Submit:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return scheduler_pb2.Submit(
        id=5,
        attempt=2,
        prompt_ids=pack_ids(prompt),
        output_ids=pack_ids(outputs or []),
        block_hashes=b"".join(block_hashes(prompt)),
        sampling=params.to_proto(),
        tenant="acme",
    )


def message_params(**sampling: Any) -> SamplingParams:
    return SamplingParams.from_proto(message([1], **sampling).sampling)


def to_request(submit: scheduler_pb2.Submit, stopping: StopRules = RULES, **rules: Any) -> tuple[Request, Stop | None]:
    return convert.to_request(submit, 7, SubmitRules(stopping, VOCABULARY, **rules), 1, 1000)


class TestSubmit:
    def test_everything_arrives(self):
        submit_message = message([1] * 33, [4, 5], seed=2**63, stop=("zz",), stop_token_ids=(9,), min_tokens=1)
        submit_message.deadline_remaining_us = 250
        request, stop = to_request(submit_message)
        assert (request.key.gateway, request.key.id, request.attempt, request.tenant) == (7, 5, 2, "acme")
        assert (request.prompt_ids, request.output_ids, stop) == ([1] * 33, [4, 5], None)
        assert (request.deadline_ns, request.timeline.received_ns) == (1000 + 250_000, 1000)
        assert request.sampling == SamplingParams.from_proto(submit_message.sampling)
        assert (request.block_names, request.cacheable) == (block_hashes([1] * 33), True)

    def test_without_a_deadline_there_is_none_and_one_of_zero_has_passed(self):
        assert to_request(message([1]))[0].deadline_ns is None
        expired = message([1])
        expired.deadline_remaining_us = 0
        assert to_request(expired)[0].deadline_ns == 1000

    def test_the_chain_of_hashes_goes_on_over_outputs_that_came_along(self):
        request, _ = to_request(message([1] * 16, list(range(1, 17)), max_tokens=40))
        assert request.block_names == block_hashes([*[1] * 16, *range(1, 17)])

    def test_a_constraint_arrives_with_the_parameter_that_it_came_from(self):
        submit_message = message([1])
        constraint = multiples(3, 5, begin_after=(9,), param="response_format")
        submit_message.constraint.CopyFrom(constraint.to_proto())
        request, _ = to_request(submit_message, constraints=True)
        assert request.constraint == constraint
        assert request.constraint.param == "response_format"
        assert to_request(message([1]), constraints=True)[0].constraint is None

    @pytest.mark.parametrize(
        ("constraint", "served"),
        [
            (common_pb2.Constraint(regex="a", param="guided_regex"), False),
            (common_pb2.Constraint(param="guided_regex"), True),
            (common_pb2.Constraint(json_schema=b"\xff", param="guided_regex"), True),
        ],
        ids=["no backend", "a kind of a later version", "no UTF-8"],
    )
    def test_a_constraint_that_cannot_be_served_is_refused_and_named(self, constraint: common_pb2.Constraint, served: bool):
        submit_message = message([1])
        submit_message.constraint.CopyFrom(constraint)
        with pytest.raises(TokenloomError) as caught:
            to_request(submit_message, constraints=served)
        assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED, "guided_regex")

    def test_without_hashes_nothing_is_cached(self):
        submit_message = message([1] * 33)
        submit_message.block_hashes = b""
        request, _ = to_request(submit_message)
        assert (request.cacheable, request.block_names) == (False, [])

    def test_stop_matching_goes_on_where_the_client_has_it(self):
        request, stop = to_request(message([1], [1], stop=("ab",)))
        assert stop is None
        request.output_ids.append(2)
        assert request.stops.push(2, request.output_ids) == Stop(FinishReason.STOP, stop_string="ab", keep_bytes=0)

    @pytest.mark.parametrize(
        ("outputs", "sampling", "reason"),
        [
            ([4] * 8, {}, FinishReason.LENGTH),
            ([4, 0], {}, FinishReason.STOP),
            ([1, 2], {"stop": ("ab",)}, FinishReason.STOP),
        ],
    )
    def test_outputs_that_were_complete_already_bring_their_stop(self, outputs: list[int], sampling: dict[str, Any], reason: FinishReason):
        stop = to_request(message([1], outputs, **sampling))[1]
        assert stop is not None
        assert stop.reason is reason

    def test_a_long_resumption_is_replayed_in_linear_time(self):
        rules = StopRules((0,), 10**6, text_table())
        request, _ = to_request(message([1], [4] * 100_000, max_tokens=200_000), rules)
        assert len(request.output_ids) == 100_000

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"prompt_ids": b""}, "prompt"),
            ({"prompt_ids": b"abc"}, "prompt"),
            ({"output_ids": b"abc"}, "prompt"),
            ({"block_hashes": b"short"}, "prompt"),
            ({"block_hashes": b"x" * 32}, "prompt"),
        ],
    )
    def test_bytes_that_do_not_fit_are_refused(self, change: dict[str, Any], param: str):
        submit_message = message([1] * 16)
        for name, value in change.items():
            setattr(submit_message, name, value)
        self.refused(submit_message, ErrorCode.INVALID_REQUEST, param)

    def test_a_submit_without_parameters_is_refused(self):
        self.refused(scheduler_pb2.Submit(id=1, prompt_ids=pack_ids([1])), ErrorCode.INVALID_REQUEST, "max_tokens")

    def test_an_empty_stop_string_is_refused(self):
        self.refused(message([1], stop=("a", "")), ErrorCode.INVALID_REQUEST, "stop")

    @pytest.mark.parametrize(("field", "value", "param"), [("adapter", "x", "model"), ("choices", 2, "n")])
    def test_what_is_not_built_is_refused_and_not_ignored(self, field: str, value: Any, param: str):
        submit_message = message([1])
        setattr(submit_message, field, value)
        self.refused(submit_message, ErrorCode.UNSUPPORTED, param)

    def test_a_priority_is_refused_by_the_flags_name_where_the_queue_is_not_ordered_by_it(self):
        submit_message = message([1])
        submit_message.priority = -1
        with pytest.raises(TokenloomError, match="--scheduling-policy priority") as caught:
            to_request(submit_message)
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "priority")
        assert to_request(submit_message, priorities=True)[0].priority == -1

    @pytest.mark.parametrize(("prompt", "outputs"), [([1, VOCABULARY], []), ([1], [2, VOCABULARY])])
    def test_ids_beyond_the_vocabulary_are_refused(self, prompt: list[int], outputs: list[int]):
        to_request(message([VOCABULARY - 1], [VOCABULARY - 1]))
        with pytest.raises(TokenloomError, match=f"token id {VOCABULARY} is not in the vocabulary, which has {VOCABULARY} ids") as caught:
            to_request(message(prompt, outputs))
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "prompt")

    def test_a_further_choice_names_its_parent_of_the_same_gateway(self):
        submit_message = message([1])
        assert to_request(submit_message)[0].parent is None
        submit_message.parent_id = 4
        assert to_request(submit_message)[0].parent == RequestKey(7, 4)

    @pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
    def test_more_log_probabilities_than_the_workers_list_are_refused(self, field: str):
        rules = {"max_logprobs": 2, "max_prompt_logprobs": 2, f"max_{field}": 3}
        assert to_request(message([1], **{field: 3}), **rules)[0].sampling == message_params(**{field: 3})
        with pytest.raises(TokenloomError, match=f"{field} must be at most 3 .*; got 4") as caught:
            to_request(message([1], **{field: 4}), **rules)
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, field)

    def test_a_prompt_is_told_no_more_than_its_gateway_may_hold(self):
        """64 tokens with 65,535 alternatives are the bound."""
        to_request(message([1] * 64, prompt_logprobs=2**16 - 1), max_prompt_logprobs=2**17)
        for prompt, alternatives in (([1] * 65, 2**16 - 1), ([1] * 64, 2**16)):
            with pytest.raises(TokenloomError, match="at most 4194304 are given") as caught:
                to_request(message(prompt, prompt_logprobs=alternatives), max_prompt_logprobs=2**17)
            assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "prompt_logprobs")

    def test_stop_strings_are_refused_where_the_text_table_is_not_exact(self):
        table = text_table()
        unverified = type(table)("t", table.tokens, table.classes, table.rule, verified=False)
        with pytest.raises(TokenloomError) as caught:
            to_request(message([1], stop=("a",)), StopRules((0,), 128, unverified))
        assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED, "stop")

    @staticmethod
    def refused(submit_message: scheduler_pb2.Submit, code: ErrorCode, param: str) -> None:
        with pytest.raises(TokenloomError) as caught:
            to_request(submit_message)
        assert (caught.value.code, caught.value.param) == (code, param)


class TestBatch:
    def test_rows_are_parallel_arrays_in_the_order_of_the_plan(self):
        state = make_state()
        group = add_group(state)
        submit(state, [1] * 4)
        step(state, group)
        submit(state, [2] * 20)
        batch = planned(state, group)
        wire = convert.to_batch(batch, lambda _: None)
        assert (wire.epoch, wire.number, wire.predecessor, wire.lease_steps) == (1, 2, 1, 1)
        assert (list(wire.slots), list(wire.counts), list(wire.samples)) == ([0, 1], [1, 20], [1, 1])
        assert (list(wire.new_block_counts), unpack_ids(wire.new_block_ids)) == ([0, 0], [])
        opened = wire.opens[0]
        assert (opened.slot, opened.request, unpack_ids(opened.prompt_ids)) == (1, "7:2", [2] * 20)
        assert (opened.computed_tokens, len(unpack_ids(opened.block_ids))) == (0, 2)
        assert not opened.HasField("trace")

    def test_new_blocks_of_all_rows_follow_each_other(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state, blocks=16)
        for prompt in ([1] * 16, [2] * 15, [3] * 16):
            submit(state, prompt)
        step(state, group)
        wire = convert.to_batch(planned(state, group), lambda _: None)
        blocks = [request.residency.blocks for request in group.running if request.residency]
        assert list(wire.new_block_counts) == [1, 0, 1]
        assert unpack_ids(wire.new_block_ids) == [blocks[0][1], blocks[2][1]]

    def test_a_traced_request_carries_the_span_ids_that_the_workers_spans_may_be_children_of(self):
        state = make_state()
        group = add_group(state)
        submit(state, [1])
        trace = WireTrace(TraceParent(1, 2, state="k=v"), 3, 4)
        opened = convert.to_batch(planned(state, group), lambda _: trace).opens[0]
        assert (opened.trace.traceparent, opened.trace.tracestate) == (str(trace.prefill), "k=v")
        assert (opened.decode_span_id, opened.request_span_id) == (3, 4)


class TestResult:
    def test_tokens_are_dealt_out_to_their_rows(self):
        outcome = convert.from_result(
            worker_pb2.StepResult(
                epoch=3,
                number=4,
                outcome=worker_pb2.BATCH_OUTCOME_OK,
                row_outcomes=bytes([worker_pb2.ROW_OUTCOME_OK, worker_pb2.ROW_OUTCOME_NON_FINITE, worker_pb2.ROW_OUTCOME_OK]),
                token_counts=[2, 0, 1],
                token_ids=pack_ids([7, 8, 9]),
                timings=worker_pb2.StepTimings(queued_us=1, prepare_us=2, forward_us=3, sample_us=4, total_us=5, idle_us=6),
            )
        )
        assert (outcome.epoch, outcome.number, outcome.outcome) == (3, 4, BatchOutcome.OK)
        assert outcome.rows == [RowOutcome.OK, RowOutcome.NON_FINITE, RowOutcome.OK]
        assert outcome.tokens == [[7, 8], [], [9]]
        assert outcome.timings == StepTimings(1, 2, 3, 4, 5, 6)
        assert outcome.error is None

    def test_why_rows_are_dead_ends_comes_along(self):
        assert convert.from_result(worker_pb2.StepResult(dead_ends={2: "too wide"})).dead_ends == {2: "too wide"}

    def test_an_error_comes_along(self):
        error = TokenloomError(ErrorCode.STEP_FAILED, "out of memory")
        result = worker_pb2.StepResult(outcome=worker_pb2.BATCH_OUTCOME_FAILED, error=error.to_proto())
        outcome = convert.from_result(result)
        assert outcome.error is not None
        assert (outcome.outcome, outcome.error.message) == (BatchOutcome.FAILED, "out of memory")

    def test_outcomes_of_a_later_version_count_as_failed(self):
        result = worker_pb2.StepResult(row_outcomes=bytes([99]), token_counts=[0])
        result.outcome = 77  # type: ignore[assignment]
        outcome = convert.from_result(result)
        assert (outcome.outcome, outcome.rows) == (BatchOutcome.FAILED, [RowOutcome.FAILED])

    def test_counts_beyond_the_tokens_give_short_rows_and_no_crash(self):
        assert convert.from_result(worker_pb2.StepResult(token_counts=[3, 3], token_ids=pack_ids([1, 2, 3, 4]))).tokens == [[1, 2, 3], [4]]


class TestEnding:
    def ended(self, ending: Ending) -> scheduler_pb2.Ending:
        state = make_state()
        request = make_request(state, [1, 2, 3], outputs=[4, 5])
        request.timeline.received_ns, request.attempt = 1_000_000, 3
        state.accept(request)
        state.finish(request, ending, 9_000_000, Effects())
        return convert.to_ending(request, ManualClock())

    def test_it_carries_the_usage(self):
        wire = self.ended(Ending(FinishReason.LENGTH))
        assert (wire.id, wire.attempt, wire.reason, wire.was_accepted) == (1, 3, common_pb2.FINISH_REASON_LENGTH, True)
        assert (wire.prompt_tokens, wire.completion_tokens, wire.cached_tokens) == (3, 2, 0)
        assert not wire.HasField("keep_bytes")
        assert wire.WhichOneof("stop_reason") is None

    def test_a_stop_that_keeps_nothing_is_not_one_that_keeps_all(self):
        wire = self.ended(Ending(FinishReason.STOP, stop=Stop(FinishReason.STOP, keep_bytes=0)))
        assert wire.HasField("keep_bytes")
        assert wire.keep_bytes == 0

    def test_stop_token_zero_is_named(self):
        wire = self.ended(Ending(FinishReason.STOP, stop=Stop(FinishReason.STOP, stop_token=0, keep_bytes=1)))
        assert (wire.WhichOneof("stop_reason"), wire.stop_token) == ("stop_token", 0)

    def test_a_stop_string_is_named(self):
        assert self.ended(Ending(FinishReason.STOP, stop=Stop(FinishReason.STOP, stop_string="END", keep_bytes=1))).stop_string == "END"

    @pytest.mark.parametrize("reason", list(CancelReason))
    def test_every_cancel_reason_travels_both_ways(self, reason: CancelReason):
        wire = self.ended(Ending(FinishReason.CANCELLED, cancel=reason))
        assert wire.cancel_reason != common_pb2.CANCEL_REASON_UNSPECIFIED
        assert convert.cancel_reason(wire.cancel_reason) is reason

    def test_a_cancel_reason_of_a_later_version_counts_as_a_disconnect(self):
        assert convert.cancel_reason(99) is CancelReason.CLIENT_DISCONNECTED

    @pytest.mark.parametrize("reason", list(FinishReason))
    def test_every_finish_reason_has_its_own_number(self, reason: FinishReason):
        numbers = {convert._FINISH[other] for other in FinishReason}
        assert len(numbers) == len(FinishReason)
        assert convert._FINISH[reason] != common_pb2.FINISH_REASON_UNSPECIFIED

    def test_one_that_never_ran_spent_all_its_time_in_the_queue(self):
        timings = self.ended(Ending(FinishReason.CANCELLED)).timings
        assert (timings.queue_us, timings.prefill_us, timings.decode_us) == (8000, 0, 0)

    def test_the_stages_add_up_to_the_whole(self):
        state = make_state()
        group = add_group(state)
        request = submit(state, [1], max_tokens=3)
        request.timeline.received_ns = 1_000
        for now in (50_000, 90_000, 200_000):
            step(state, group, now)
        timings = convert.to_ending(request, ManualClock()).timings
        assert timings.queue_us + timings.prefill_us + timings.decode_us == (timings.ended_unix_ns - timings.received_unix_ns) // 1000
        assert (timings.queue_us, timings.prefill_us, timings.decode_us, timings.steps) == (49, 0, 150, 3)

    def test_a_live_request_has_no_ending(self):
        with pytest.raises(ValueError, match="alive"):
            convert.to_ending(make_request(make_state(), [1]), ManualClock())

    def test_a_refusal_was_never_accepted(self):
        wire = convert.refusal(5, 1, TokenloomError(ErrorCode.QUEUE_FULL, "full", retry_after_ms=7))
        assert (wire.was_accepted, wire.reason, wire.error.retry_after_ms) == (False, common_pb2.FINISH_REASON_FAILED, 7)
