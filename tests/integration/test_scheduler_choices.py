"""Several choices and priorities through a real scheduler: shared blocks, tokens of their own, counters that agree with the endings."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import ErrorCode
from libs.packing import pack_ids, unpack_ids
from libs.sampling import SamplingParams
from tests.support.core import RULES
from tests.support.fake_worker import FakeWorker
from tests.support.gateway_session import SessionClient
from tests.support.model_worker import VOCABULARY, expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2

PROMPT = [*range(1, 38)]  # two full blocks and five tokens


def choice(number: int) -> SamplingParams:
    return params(seed=number, max_tokens=10)


async def submit_family(session: SessionClient, choices: int, *, first: int = 1, prompt: list[int] = PROMPT) -> list[int]:
    """Submits as a gateway does: the first choice, then its children. Returns their ids."""
    numbers = list(range(first, first + choices))
    for number in numbers:
        await session.submit(number, prompt, choice(number), parent_id=0 if number == first else first)
    return numbers


def opens(worker: FakeWorker) -> list[worker_pb2.Open]:
    return [entry for batch in worker.batches for entry in batch.opens]


@pytest.mark.composes("n", "prefix caching", "seed")
@pytest.mark.parametrize("caching", [True, False], ids=["prefix-caching", "no-prefix-caching"])
async def test_choices_share_the_prompts_full_blocks_and_have_tokens_of_their_own(tmp_path: Path, caching: bool):
    async with SchedulerMesh(tmp_path, enable_prefix_caching=caching) as mesh:
        worker = await mesh.worker()
        session = await (await mesh.session()).ready()
        for number in await submit_family(session, 5):
            assert (await session.ended(number)).tokens == expected_output(RULES, PROMPT, choice(number))
        parent, *children = opens(worker)
        assert parent.computed_tokens == 0
        assert {entry.computed_tokens for entry in children} == {32}
        assert {tuple(unpack_ids(entry.block_ids)[:2]) for entry in (parent, *children)} == {tuple(unpack_ids(parent.block_ids)[:2])}
        assert await mesh.sample("sibling_shared_tokens_total") == 4 * 32
        assert await mesh.sample("prefix_cache_hits_total") == 0
        assert await mesh.sample("prefix_cache_queries_total") == (37 if caching else 0)


@pytest.mark.composes("n", "chunked prefill")
async def test_while_children_wait_for_the_prompt_others_run(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_num_batched_tokens=16) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        await submit_family(session, 4, prompt=PROMPT * 2)
        await mesh.until(lambda: len(mesh.state.requests) == 4)
        assert await mesh.sample("num_requests_waiting_by_reason", reason="parent_prompt") == 3
        await session.submit(9, [1], params(max_tokens=1))
        worker.gate.set()
        await session.ended(9)
        for number in range(1, 5):
            assert (await session.ended(number)).tokens == expected_output(RULES, PROMPT * 2, choice(number))


@pytest.mark.composes("n", "cancel", "seed")
async def test_children_go_on_when_the_first_choice_is_cancelled(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        await submit_family(session, 3)
        await worker.wait_batches(1)
        await session.cancel(1)
        await session.ended(1)
        worker.gate.set()
        for number in (2, 3):
            assert (await session.ended(number)).tokens == expected_output(RULES, PROMPT, choice(number))


@pytest.mark.composes("n", "worker loss", "seed")
async def test_choices_outlive_a_worker_that_dies_in_the_prompt(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        await submit_family(session, 4)
        await worker.wait_batches(1)
        await worker.stop()
        await mesh.worker()
        for number in range(1, 5):
            assert (await session.ended(number)).tokens == expected_output(RULES, PROMPT, choice(number))


@pytest.mark.composes("n", "preemption", "seed")
async def test_choices_in_a_cache_too_small_for_them_all_come_to_their_ends(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        await mesh.worker(blocks=8)
        session = await (await mesh.session()).ready()
        sampling = {number: params(seed=number, max_tokens=60) for number in range(1, 9)}
        for number, wanted in sampling.items():
            await session.submit(number, PROMPT, wanted, parent_id=0 if number == 1 else 1)
        for number, wanted in sampling.items():
            assert (await session.ended(number)).tokens == expected_output(RULES, PROMPT, wanted)
        assert await mesh.sample("num_preemptions_total", reason="no_blocks") > 0


@pytest.mark.composes("n", "preemption", "prefix caching")
async def test_what_clients_are_told_of_cached_tokens_sums_to_the_counters(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        await mesh.worker(blocks=8, slots=3)  # preemptions and evictions happen
        session = await (await mesh.session()).ready()
        firsts, numbers = list[int](), list[int]()
        for family in range(6):
            firsts.append(family * 10 + 1)
            prompt = PROMPT[: 20 + 3 * (family % 3)]
            numbers += await submit_family(session, 1 + family % 3, first=firsts[-1], prompt=prompt)
        endings = {number: (await session.ended(number)).ending for number in numbers}
        told = sum(ending.cached_tokens for ending in endings.values() if ending)
        assert told == await mesh.sample("prefix_cache_hits_total") > 0
        assert sum(ending.cached_tokens for number, ending in endings.items() if ending and number not in firsts) == 0
        prompts = sum(ending.prompt_tokens for number, ending in endings.items() if ending and number in firsts)
        assert prompts == await mesh.sample("prefix_cache_queries_total")


@pytest.mark.composes("session loss", "prefix caching", "seed")
async def test_cached_tokens_are_told_once_also_when_a_session_was_lost(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        worker = await mesh.worker(step_seconds=0.002)
        old = await (await mesh.session()).ready()
        await old.submit(1, PROMPT, params(max_tokens=1))
        seen = (await old.ended(1)).ending
        sampling = params(seed=3, max_tokens=60)
        await old.submit(2, PROMPT, sampling)
        await old.until(lambda: len(old.received[2].tokens) >= 3)
        await old.close()
        new = await (await mesh.session()).ready()
        has = old.received[2].tokens
        await new.submit(2, PROMPT, sampling, output_ids=pack_ids(has), attempt=1)
        got = await new.ended(2)
        assert got.tokens == expected_output(RULES, PROMPT, sampling)
        assert seen is not None
        assert got.ending is not None
        assert (seen.cached_tokens, got.ending.cached_tokens) == (0, 32)
        assert await mesh.sample("prefix_cache_hits_total") == 32
        assert await mesh.sample("prefix_cache_queries_total") == 2 * 37
        assert worker.violations == []


@pytest.mark.composes("priority")
async def test_lower_priorities_run_first_and_equal_ones_in_order(tmp_path: Path):
    async with SchedulerMesh(tmp_path, scheduling_policy="priority") as mesh:
        worker = await mesh.worker(slots=1)
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        assert session.model is not None
        assert session.model.priority_scheduling
        await session.submit(1, [1], params(max_tokens=2))
        await worker.wait_batches(1)
        for number, priority in ((2, 5), (3, 0), (4, -5), (5, 0)):
            await session.submit(number, [number], params(max_tokens=2), priority=priority)
        await mesh.until(lambda: len(mesh.state.requests) == 5)
        worker.gate.set()
        for number in range(1, 6):
            await session.ended(number)
        started = [unpack_ids(entry.prompt_ids) for entry in opens(worker)]
        assert started == [[1], [4], [3], [5], [2]]


@pytest.mark.refuses("priority", reason="unless the queue is ordered by it: `--scheduling-policy priority`")
async def test_a_priority_without_the_policy_is_refused_with_the_flag_to_set(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        await mesh.worker()
        session = await (await mesh.session()).ready()
        assert session.model is not None
        assert not session.model.priority_scheduling
        await session.submit(1, [1], params(), priority=1)
        ending = (await session.ended(1)).ending
        assert ending is not None
        assert (ErrorCode.from_number(ending.error.code), ending.error.param) == (ErrorCode.INVALID_REQUEST, "priority")
        assert "--scheduling-policy priority" in ending.error.message
        assert ending.reason == common_pb2.FINISH_REASON_FAILED
        assert not ending.was_accepted


async def test_ids_that_the_model_does_not_have_never_reach_a_worker(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        worker = await mesh.worker()
        session = await (await mesh.session()).ready()
        await session.submit(1, [1, VOCABULARY], params())
        ending = (await session.ended(1)).ending
        assert ending is not None
        assert (ErrorCode.from_number(ending.error.code), ending.error.param) == (ErrorCode.INVALID_REQUEST, "prompt")
        assert worker.batches == []
