"""The waiting room: who comes while the mesh is away waits, boundedly, and for as long as there is something to wait for."""

from __future__ import annotations

import asyncio

import pytest

from libs.errors import ErrorCode, TokenloomError
from services.gateway import waiting_room
from services.gateway.waiting_room import WaitingRoom

AWAY = TokenloomError(ErrorCode.SCHEDULER_UNAVAILABLE, "away")
LEAVING = TokenloomError(ErrorCode.DRAINING, "leaving")


class Mesh:
    """What stands in the way now, and how often that was asked."""

    def __init__(self, problem: TokenloomError | None = AWAY) -> None:
        self.problem, self.looks = problem, 0

    def obstacle(self) -> TokenloomError | None:
        self.looks += 1
        return self.problem


async def test_nobody_waits_once_the_mesh_is_back():
    await WaitingRoom(Mesh(None).obstacle, 0.0).enter(AWAY)


async def test_all_who_wait_go_on_once_the_mesh_is_back():
    mesh = Mesh()
    room = WaitingRoom(mesh.obstacle, 60.0)
    tasks = [asyncio.create_task(room.enter(AWAY)) for _ in range(100)]
    while room.waiting < 100:
        await asyncio.sleep(0)
    mesh.problem = None
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert room.waiting == 0


@pytest.mark.parametrize("patience", [0.0, 0.01])
async def test_who_has_waited_long_enough_is_told_why(patience):
    room = WaitingRoom(Mesh().obstacle, patience)
    with pytest.raises(TokenloomError) as raised:
        await room.enter(AWAY)
    assert raised.value is AWAY
    assert room.waiting == 0


async def test_a_full_room_takes_nobody(monkeypatch):
    monkeypatch.setattr(waiting_room, "MAX_WAITING", 1)
    mesh = Mesh()
    room = WaitingRoom(mesh.obstacle, 60.0)
    first = asyncio.create_task(room.enter(AWAY))
    while not room.waiting:
        await asyncio.sleep(0)
    with pytest.raises(TokenloomError, match="away"):
        await room.enter(AWAY)
    mesh.problem = None
    await asyncio.wait_for(first, 20)


async def test_leaving_ends_the_wait_at_once():
    mesh = Mesh()
    room = WaitingRoom(mesh.obstacle, 60.0)
    waiting = asyncio.create_task(room.enter(AWAY))
    while not room.waiting:
        await asyncio.sleep(0)
    mesh.problem = LEAVING
    with pytest.raises(TokenloomError, match="leaving"):
        await asyncio.wait_for(waiting, 20)
    with pytest.raises(TokenloomError, match="leaving"):
        await room.enter(LEAVING)


async def test_one_look_is_for_all_who_wait(monkeypatch):
    monkeypatch.setattr(waiting_room, "LOOK", 0.005)
    mesh = Mesh()
    room = WaitingRoom(mesh.obstacle, 60.0)
    tasks = [asyncio.create_task(room.enter(AWAY)) for _ in range(200)]
    while room.waiting < 200:
        await asyncio.sleep(0)
    asked = mesh.looks
    while mesh.looks < asked + 10:
        await asyncio.sleep(0.005)
    assert mesh.looks < asked + 200, "each of them looked for itself"
    mesh.problem = None
    await asyncio.wait_for(asyncio.gather(*tasks), 20)


async def test_who_leaves_does_not_take_the_look_with_it():
    mesh = Mesh()
    room = WaitingRoom(mesh.obstacle, 60.0)
    one, other = (asyncio.create_task(room.enter(AWAY)) for _ in range(2))
    while room.waiting < 2:
        await asyncio.sleep(0)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert room.waiting == 1
    mesh.problem = None
    await asyncio.wait_for(other, 20)
