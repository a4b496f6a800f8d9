"""Constrained requests through a real scheduler over real gRPC: checked before they queue, opened where their constraint is, gone with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.core import RULES
from tests.support.model_constraints import multiples
from tests.support.model_worker import expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SchedulerMesh]:
    async with SchedulerMesh(tmp_path) as mesh:
        yield mesh


@pytest.mark.composes("structured output")
async def test_a_constrained_request_ends_with_its_constraint(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    constraint = multiples(3, 7)
    await session.submit(1, [5, 6], params(seed=4), constraint=constraint.to_proto())
    got = await session.ended(1)
    assert got.tokens == expected_output(RULES, [5, 6], params(seed=4), constraint)
    assert (len(got.tokens), [token % 3 for token in got.tokens]) == (7, [0] * 7)
    assert got.ending is not None
    assert got.ending.reason == common_pb2.FINISH_REASON_CONSTRAINT_COMPLETE
    assert not got.ending.HasField("keep_bytes")
    assert [ask.constraint for ask in worker.prepares] == [constraint.to_proto()]
