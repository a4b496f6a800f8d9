"""Where requests wait that come while the mesh cannot take them: the scheduler's restart is a pause for them, not an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libs.errors import ErrorCode, TokenloomError

# Seconds between looks at whether the mesh can take requests; one look for all who wait.
LOOK = 0.05
# Requests that may wait at once; each holds its body.
MAX_WAITING = 1024


class WaitingRoom:
    """`obstacle` says why the mesh cannot take a request now (None: it can); `patience` is in seconds, 0: nobody waits."""

    def __init__(self, obstacle: Callable[[], TokenloomError | None], patience: float) -> None:
        self._obstacle, self._patience = obstacle, patience
        self._watch: asyncio.Task[None] | None = None
        self.waiting = 0

    async def enter(self, problem: TokenloomError) -> None:
        """Returns as soon as the mesh can take a request; `problem` is the obstacle that stood in the way when it came.

        Raises the obstacle (a 503) when that takes longer than the patience, when the room is full, and at once when this gateway drains.
        """
        if _is_final(problem) or self.waiting >= MAX_WAITING:
            raise problem
        self.waiting += 1
        try:
            left = await self._wait()
        finally:
            self.waiting -= 1
        if left is not None:
            raise left

    async def _wait(self) -> TokenloomError | None:
        """What still stands in the way after the patience."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while (problem := self._obstacle()) is not None and not _is_final(problem) and (left := until - loop.time()) > 0:
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._until_changed())
            await asyncio.wait({self._watch}, timeout=left)
        return problem

    async def _until_changed(self) -> None:
        # No event: what stands in the way is spread over session, tokenizers and the clock.
        while self.waiting and (problem := self._obstacle()) is not None and not _is_final(problem):  # noqa: ASYNC110
            await asyncio.sleep(LOOK)


def _is_final(problem: TokenloomError) -> bool:
    return problem.code is ErrorCode.DRAINING
