"""Teams of threads: they sleep when idle, end cleanly, lose no work to a busy neighbour, and faults leave them whole."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from libs.errors import TokenloomError
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import VARIANT_ENV, CpuLibrary, Team
from services.worker.ops.recording import Kind
from tests.kernels.support import Running, Shapes, randn, sequences

SHAPES = Shapes()
KNOWN = sequences([40, 30, 20], SHAPES.vocabulary, 3)
STEP = [(0, 0, 40), (1, 0, 30), (2, 0, 20)]
WAIT_SECONDS = 60


def members() -> dict[str, str]:
    """State letter (S: sleeping, R: running) of each thread of any team in this process, by thread id."""
    states = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if name == "tokenloom-cpu":
            states[task.name] = rest.split()[0]
    return states


def until(holds: object) -> None:
    assert callable(holds)
    ends = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.005)


@pytest.fixture
def alone() -> set[str]:
    """Threads of teams that others own."""
    gc.collect()
    return set(members())


def test_members_sleep_between_steps_and_end_with_their_team(best: CpuLibrary, alone: set[str]):
    running = Running(CpuOps(best, Team(best, 4)), SHAPES, KNOWN.num_blocks)
    running(KNOWN.step(STEP))
    ours = set(members()) - alone
    assert len(ours) == 3
    until(lambda: all(state == "S" for task, state in members().items() if task in ours))
    del running
    gc.collect()
    until(lambda: not ours & set(members()))


def test_a_team_of_one_has_no_threads(best: CpuLibrary, alone: set[str]):
    running = Running(CpuOps(best, Team(best, 1)), SHAPES, KNOWN.num_blocks)
    assert torch.isfinite(running(KNOWN.step(STEP))).all()
    assert set(members()) <= alone


def test_members_keep_to_the_cores_they_are_given_and_its_leader_only_once_it_says_so(best: CpuLibrary, alone: set[str]):
    everywhere, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    team = Team(best, 2, [core, core])
    running = Running(CpuOps(best, team), SHAPES, KNOWN.num_blocks)
    expected = Running(CpuOps(best, Team(best, 1)), SHAPES, KNOWN.num_blocks)(KNOWN.step(STEP))
    (member,) = set(members()) - alone
    until(lambda: os.sched_getaffinity(int(member)) == {core})
    assert os.sched_getaffinity(0) == everywhere
    seen = []

    def lead() -> None:
        team.settle()
        seen.append((os.sched_getaffinity(0), torch.equal(running(KNOWN.step(STEP)), expected)))

    leader = threading.Thread(target=lead)
    leader.start()
    leader.join(WAIT_SECONDS)
    assert seen == [({core}, True)]
    assert os.sched_getaffinity(0) == everywhere


def test_teams_that_start_and_end_again_and_again_leave_nothing(best: CpuLibrary, alone: set[str]):
    for size in (2, 5, 3, 8) * 5:
        Running(CpuOps(best, Team(best, size)), SHAPES, KNOWN.num_blocks)(KNOWN.step(STEP))
    gc.collect()
    until(lambda: set(members()) <= alone)


def test_two_models_may_share_a_team_from_threads_that_come_and_go(best: CpuLibrary):
    team = Team(best, 3)
    models = [Running(CpuOps(best, team), SHAPES, KNOWN.num_blocks, seed) for seed in (1, 2)]
    expected = [model(KNOWN.step(STEP)) for model in models]
    wrong: list[int] = []

    def compute(which: int) -> None:
        for _ in range(50):
            if not torch.equal(models[which](KNOWN.step(STEP)), expected[which]):
                wrong.append(which)

    for _ in range(2):
        threads = [threading.Thread(target=compute, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
    assert not wrong


def test_programs_come_and_go_while_a_team_lives(best: CpuLibrary):
    team = Team(best, 4)
    expected = Running(CpuOps(best, team), SHAPES, KNOWN.num_blocks)(KNOWN.step(STEP))
    for _ in range(100):
        assert torch.equal(Running(CpuOps(best, team), SHAPES, KNOWN.num_blocks)(KNOWN.step(STEP)), expected)


def _burn(ready: object) -> None:
    ready.set()  # type: ignore[attr-defined]
    while True:
        pass


def test_steps_end_beside_busy_processes_and_with_more_threads_than_cores(best: CpuLibrary):
    context = multiprocessing.get_context("spawn")
    ready = [context.Event() for _ in range(3)]
    burning = [context.Process(target=_burn, args=(event,), daemon=True) for event in ready]
    for process in burning:
        process.start()
    try:
        assert all(event.wait(WAIT_SECONDS) for event in ready)
        expected = Running(CpuOps(best, Team(best, 1)), SHAPES, KNOWN.num_blocks)(KNOWN.step(STEP))
        running = Running(CpuOps(best, Team(best, 6)), SHAPES, KNOWN.num_blocks)
        for _ in range(30):
            assert torch.equal(running(KNOWN.step(STEP)), expected)
    finally:
        for process in burning:
            process.kill()
            process.join(WAIT_SECONDS)


def test_a_process_ends_at_once_although_its_team_sleeps_or_works():
    program = textwrap.dedent("""
        import threading
        from services.worker.kernels.cpu.build import ensure_library
        from services.worker.ops.cpu import CpuOps
        from services.worker.ops.native import CpuLibrary, Team
        from tests.kernels.support import Running, Shapes, sequences

        library, known = CpuLibrary(ensure_library()), sequences([200] * 4, 70)
        idle, busy = (Running(CpuOps(library, Team(library, 3)), Shapes(), known.num_blocks) for _ in range(2))
        inputs, began = known.step([(which, 0, 200) for which in range(4)]), threading.Event()
        idle(inputs)

        class Endless:
            # Nothing but native calls, again and again: to drop a tensor in a thread while the interpreter ends makes torch abort.

            def tokenloom_program_run(self, *args: object) -> None:
                while True:
                    library.calls.tokenloom_program_run(*args)
                    began.set()

        def work() -> None:
            busy.run._calls = Endless()
            busy(inputs)

        threading.Thread(target=work, daemon=True).start()
        assert began.wait(60)
        print("leaving")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", torch.full((90,), 70), "vocabulary"),
        ("token_ids", torch.full((90,), -1), "vocabulary"),
        ("token_ids", torch.zeros(90, dtype=torch.int32), "type torch.int32"),
        ("positions", torch.full((90,), 10**6), "position"),
        ("positions", torch.zeros(89, dtype=torch.int64), "shape"),
        ("cache_slots", torch.full((90,), 2**40), "slot"),
        ("sampled", torch.tensor([90]), "sampled"),
        ("query_starts", torch.tensor([0, 40, 70, 89], dtype=torch.int32), "rows"),
        ("query_starts", torch.tensor([0, 70, 40, 90], dtype=torch.int32), "shorter"),
        ("kv_lengths", torch.tensor([39, 30, 20], dtype=torch.int32), "shorter"),
        ("kv_lengths", torch.tensor([400, 30, 20], dtype=torch.int32), "fewer blocks"),
        ("block_tables", torch.full((3, 3), 10**6, dtype=torch.int32), "block"),
        ("block_tables", torch.zeros(3, 6, dtype=torch.int32)[:, ::2], "shape"),
    ],
)
def test_inputs_that_cannot_be_are_named_and_change_nothing(best: CpuLibrary, field: str, value: torch.Tensor, message: str):
    running = Running(CpuOps(best, Team(best, 2)), SHAPES, KNOWN.num_blocks)
    inputs = KNOWN.step(STEP)
    expected = running(inputs)
    with pytest.raises(ValueError, match=message):
        running(replace(inputs, **{field: value}))
    assert torch.equal(running(inputs), expected)


def test_a_step_of_more_tokens_than_agreed_is_refused(best: CpuLibrary):
    ops = CpuOps(best, Team(best, 1))
    step = ops.bind(lambda inputs, cache: ops.embedding(inputs.token_ids, randn(70, 8)), [], 89)
    with pytest.raises(ValueError, match="90 tokens"):
        step(KNOWN.step(STEP))


def test_want_of_memory_is_an_error_after_which_smaller_steps_run(best: CpuLibrary):
    """Activations of this step need more than any address space has."""
    ops, tokens = CpuOps(best, Team(best, 2)), 1 << 21
    small, wide, packed = randn(1, 16), torch.zeros(1, 1 << 25), ops.pack_linear(randn(4, 16, seed=1), None)

    def forward(inputs, cache):
        ops.embedding(inputs.token_ids, wide)
        return ops.head(ops.embedding(inputs.token_ids, small), inputs.sampled, packed)

    step = ops.bind(forward, [], tokens)
    inputs = sequences([1], 1).step([(0, 0, 1)])
    expected = step(inputs).clone()
    zeros = torch.zeros(tokens, dtype=torch.int64)
    huge = replace(
        inputs,
        token_ids=zeros,
        positions=zeros,
        cache_slots=zeros,
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        kv_lengths=torch.tensor([tokens], dtype=torch.int32),
        block_tables=torch.zeros(1, tokens // 16, dtype=torch.int32),
    )
    with pytest.raises(MemoryError, match="2097152 tokens"):
        step(huge)
    assert torch.equal(step(inputs), expected)


def test_threads_that_cannot_be_had_are_an_error(best: CpuLibrary, monkeypatch: pytest.MonkeyPatch):
    class NoThreads:
        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    monkeypatch.setattr(best, "calls", NoThreads())
    with pytest.raises(TokenloomError, match="--threads"):
        Team(best, 4)


def test_time_is_told_by_kind_of_instruction(best: CpuLibrary):
    running = Running(CpuOps(best, Team(best, 2)), SHAPES, KNOWN.num_blocks)
    running(KNOWN.step(STEP))
    assert not any(running.run.timing().values())
    running.run.start_timing()
    running(KNOWN.step(STEP))
    of_integers = {Kind.QUANTIZE, Kind.INTEGER_LINEAR}
    assert {kind for kind, spent in running.run.timing().items() if spent > 0} == set(Kind) - of_integers


def test_a_program_keeps_what_it_points_at(best: CpuLibrary):
    ops = CpuOps(best, Team(best, 2))
    running = Running(ops, SHAPES, KNOWN.num_blocks)
    expected = running(KNOWN.step(STEP))
    step, running = running.run, None
    del ops
    gc.collect()
    rubbish = [torch.full((70, 48), float("nan")) for _ in range(200)]
    assert torch.equal(step(KNOWN.step(STEP)), expected)
    del rubbish


def test_the_best_instruction_set_is_chosen_and_can_be_forced(library: Path, monkeypatch: pytest.MonkeyPatch):
    flags = Path("/proc/cpuinfo").read_text()
    monkeypatch.delenv(VARIANT_ENV, raising=False)
    if "avx512_vnni" in flags:
        assert CpuLibrary(library).variant == "avx512vnni"
    elif "avx512f" in flags:
        assert CpuLibrary(library).variant == "avx512"
    elif "avx2" in flags:
        assert CpuLibrary(library).variant == "avx2"
    monkeypatch.setenv(VARIANT_ENV, "generic")
    assert CpuLibrary(library).variant == "generic"
    with pytest.raises(TokenloomError, match="vax"):
        CpuLibrary(library, "vax")


def test_the_library_uses_no_openmp(library: Path):
    content = library.read_bytes()
    assert b"GOMP_" not in content
    assert b"omp.so" not in content
