"""A worker without work takes part in what another worker's result has set free."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.core import RULES
from tests.support.model_worker import expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params

PROMPT = [*range(1, 38)]


@pytest.mark.composes("several workers", "n")
async def test_a_worker_without_work_takes_the_children_whose_parent_fills_the_other(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2, max_num_seqs=1, dispatch_margin_ms=0) as mesh:
        busy, idle = await mesh.worker(0), await mesh.worker(1)
        session = await (await mesh.session()).ready()
        await mesh.until(lambda: len(mesh.state.groups) == 2)
        for worker in (busy, idle):
            worker.gate.clear()
        for number in (1, 2):
            await session.submit(number, PROMPT, params(seed=number), parent_id=number - 1)
        await mesh.until(lambda: len(mesh.state.requests) == 2 and (busy.batches or idle.batches))
        if idle.batches:
            busy, idle = idle, busy
        busy.gate.set()
        await busy.wait_batches(2)
        busy.gate.clear()
        await idle.wait_batches(1)  # while the parent runs: nothing else happens that would make the scheduler look at this worker
        idle.gate.set()
        busy.gate.set()
        for number in (1, 2):
            assert (await session.ended(number)).tokens == expected_output(RULES, PROMPT, params(seed=number))
