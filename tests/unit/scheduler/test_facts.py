"""Which workers fit the mesh, and what their facts make of the limits."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from libs.errors import ErrorCode, TokenloomError
from services.scheduler.config import SchedulerConfig
from services.scheduler.facts import check_fit, limits_of, model_facts, most_logprobs, welcome_of, window_of
from services.scheduler.windows import Share
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2


def facts(**changes: Any) -> worker_pb2.WorkerFacts:
    prints = {name: changes.pop(name) for name in ("model", "tokenizer", "numerics") if name in changes}
    values: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 64,
        "kv_dtype": "float32",
        "max_model_len": 128,
        "num_slots": 8,
        "max_tokens_per_step": 256,
        "vocab_size": 40,
        "eos_token_ids": [0, 1],
        "constraint_backend": "llguidance",
        "logits_processors": ["calm", "tint"],
    }
    fingerprints = common_pb2.Fingerprints(**{"model": "m", "tokenizer": "t", "numerics": "n", **prints})
    return worker_pb2.WorkerFacts(fingerprints=fingerprints, **{**values, **changes})


def check(worker: worker_pb2.WorkerFacts, mesh: worker_pb2.WorkerFacts | None = None, *, alone: bool = False, **config: Any) -> None:
    check_fit("w1", worker, mesh or facts(), "t", SchedulerConfig(**config), alone=alone)


def test_an_equal_worker_fits():
    check(facts())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokenizer": "other"}, "tokenizer fingerprint"),
        ({"model": "other"}, "model fingerprint"),
        ({"numerics": "other"}, "numerics"),
        ({"kv_dtype": "float16"}, "KV dtype"),
        ({"max_model_len": 64}, "max_model_len"),
        ({"block_size": 32}, "block size"),
        ({"constraint_backend": "xgrammar"}, "constraint backend"),
        ({"logits_processors": ["tint"]}, "logits processors"),
    ],
)
def test_a_worker_that_differs_is_refused_by_name_with_both_values(change: dict[str, Any], what: str):
    with pytest.raises(TokenloomError, match=rf"worker w1: its {what} is .+, the mesh has .+") as caught:
        check(facts(**change))
    assert caught.value.code is ErrorCode.FINGERPRINT_MISMATCH


def test_a_worker_that_could_hold_longer_sequences_serves_the_meshs():
    check(facts(max_model_len=256), facts(max_model_len=128))
    check(facts(max_model_len=256, num_blocks=8), facts(max_model_len=128))
    with pytest.raises(TokenloomError, match="7 blocks cannot hold a sequence of 128"):
        check(facts(max_model_len=256, num_blocks=7), facts(max_model_len=128))


def test_the_only_worker_may_come_back_with_other_lengths_and_steps_but_not_as_another_model():
    check(facts(max_model_len=64, num_blocks=4, max_tokens_per_step=32), alone=True)
    check(facts(max_model_len=512), alone=True)
    with pytest.raises(TokenloomError, match="its model fingerprint is other, the mesh has m"):
        check(facts(model="other"), alone=True)
    with pytest.raises(TokenloomError, match="3 blocks cannot hold a sequence of 64"):
        check(facts(max_model_len=64, num_blocks=3), alone=True)


def test_even_the_first_worker_must_have_the_meshs_tokenizer():
    other = facts(tokenizer="other")
    with pytest.raises(TokenloomError, match="tokenizer fingerprint"):
        check(other, other)


def test_a_worker_that_cannot_hold_one_sequence_is_refused():
    check(facts(num_blocks=8))
    with pytest.raises(TokenloomError, match="7 blocks cannot hold a sequence of 128") as caught:
        check(facts(num_blocks=7))
    assert caught.value.code is ErrorCode.CANNOT_FIT


def test_without_chunked_prefill_a_step_must_hold_a_whole_prompt():
    small = facts(max_tokens_per_step=127)
    check(small, small)
    with pytest.raises(TokenloomError, match="without chunked prefill 128 are needed"):
        check(small, small, enable_chunked_prefill=False)


def test_a_second_worker_must_hold_the_steps_that_are_planned_for_the_first():
    with pytest.raises(TokenloomError, match="hold 128 tokens, the mesh's have up to 256"):
        check(facts(max_tokens_per_step=128))
    check(facts(max_tokens_per_step=128), max_num_batched_tokens=128)


def test_limits_are_the_smaller_of_configuration_and_worker():
    config = SchedulerConfig(max_num_batched_tokens=100, max_num_seqs=64, max_queue=5)
    limits = limits_of(config, facts())
    assert (limits.max_tokens_per_step, limits.max_sequences, limits.max_requests, limits.max_model_len) == (100, 8, 5, 128)
    assert limits_of(SchedulerConfig(max_num_batched_tokens=9999, max_num_seqs=3), facts()).max_tokens_per_step == 256
    assert limits_of(SchedulerConfig(max_num_seqs=3), facts()).max_sequences == 3


def test_no_further_prompt_begins_once_prompts_take_two_fifths_of_the_budget():
    assert limits_of(SchedulerConfig(max_num_batched_tokens=200), facts()).enough_prefill == 80
    assert limits_of(SchedulerConfig(max_num_batched_tokens=1, max_num_seqs=1), facts()).enough_prefill == 1


def test_without_chunked_prefill_the_budget_is_raised_to_the_context():
    limits = limits_of(SchedulerConfig(max_num_batched_tokens=100, enable_chunked_prefill=False), facts())
    assert (limits.max_tokens_per_step, limits.chunked_prefill) == (128, False)


def test_switches_reach_the_limits():
    limits = limits_of(SchedulerConfig(enable_prefix_caching=False), facts())
    assert (limits.prefix_caching, limits.chunked_prefill) == (False, True)


def test_gateways_are_told_what_they_need_of_the_model():
    told = model_facts(facts(defaults=common_pb2.GenerationDefaults(temperature=0.5)), SchedulerConfig(max_queue=7, max_queue_tokens=900))
    assert (told.max_model_len, told.vocab_size, list(told.eos_token_ids)) == (128, 40, [0, 1])
    assert (told.fingerprints.tokenizer, told.defaults.temperature) == ("t", 0.5)
    assert (told.max_live_sequences, told.max_live_tokens) == (7, 900)


@pytest.mark.parametrize(("policy", "served"), [("fcfs", False), ("priority", True)])
def test_gateways_are_told_whether_priorities_are_served(policy: Literal["fcfs", "priority"], served: bool):
    config = SchedulerConfig(scheduling_policy=policy, shard=3)
    assert welcome_of(facts(), 9, config).model.priority_scheduling is served
    early = welcome_of(None, 9, config)
    assert (early.HasField("model"), early.leader_token, early.shard) == (False, 9, 3)


def test_a_window_without_a_bound_on_tokens_holds_what_its_sequences_can_have() -> None:
    window = window_of(Share(4, 0), 128, "")
    assert (window.max_outstanding, window.max_outstanding_tokens, window.ready) == (4, 512, True)
    assert window_of(Share(4, 300), 128, "").max_outstanding_tokens == 300


def test_a_window_says_why_it_is_shut() -> None:
    window = window_of(Share(1, 0), 128, "no worker is attached")
    assert (window.ready, window.not_ready_reason) == (False, "no worker is attached")


@pytest.mark.parametrize("what", ["num_blocks", "num_slots", "max_tokens_per_step", "max_model_len", "vocab_size"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_worker_that_could_run_nothing_is_refused_by_name(what: str, alone: bool):
    with pytest.raises(TokenloomError, match=f"worker w1: its {what} is 0: it could run nothing"):
        check(facts(**{what: 0, "max_model_len": 0 if what == "max_model_len" else 128}), alone=alone)


def test_gateways_learn_what_compiles_constraints_and_which_processors_run():
    told = model_facts(facts(), SchedulerConfig())
    assert (told.constraint_backend, list(told.logits_processors)) == ("llguidance", ["calm", "tint"])
    assert model_facts(facts(constraint_backend=""), SchedulerConfig()).constraint_backend == ""


def test_alternatives_are_what_the_workers_list_and_one_answer_holds():
    """24 MiB of 8 bytes each for the tokens of all rows, and as many for all prompt positions of a step."""
    entries = 3 * 1024 * 1024
    wide = facts(max_logprobs=10**6, vocab_size=10**6, num_slots=256, max_tokens_per_step=4096)
    assert most_logprobs(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048), wide) == (entries // 64 - 1, entries // 2048 - 1)
    whole = SchedulerConfig(max_num_batched_tokens=100, enable_chunked_prefill=False)
    assert most_logprobs(whole, facts(max_logprobs=10**6, vocab_size=10**6))[1] == entries // 128 - 1
    assert most_logprobs(SchedulerConfig(), facts(max_logprobs=20)) == (20, 20)
    assert most_logprobs(SchedulerConfig(), facts(max_logprobs=100)) == (40, 40), "there are no more ids"
    assert model_facts(facts(max_logprobs=20), SchedulerConfig()).max_logprobs == 20


def test_a_worker_that_lists_fewer_log_probabilities_than_the_mesh_is_refused():
    check(facts(max_logprobs=21), facts(max_logprobs=20))
    check(facts(max_logprobs=5), facts(max_logprobs=20), alone=True)
    with pytest.raises(TokenloomError, match="w1: its --max-logprobs is 19, the mesh has 20") as caught:
        check(facts(max_logprobs=19), facts(max_logprobs=20))
    assert caught.value.code is ErrorCode.CANNOT_FIT
