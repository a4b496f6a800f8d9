"""Choices of one HTTP request (n > 1): the children wait, out of everybody's way, until their parent's prompt is computed.

Then they find its full blocks under the same names and compute only the tail (PROTOCOL.md rule 10). A child waits at most once and holds
nothing meanwhile; what it waits for is the progress or the end of a request that was live before it. So nobody waits in a circle,
whatever happens to the parent: preempted, in quarantine or without a worker, it waits for none of those that depend on it, and when it
ends they go on alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.core.request import Request, RequestKey


class Siblings:
    """Children by the parent that they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, dict[Request, None]] = {}

    def hold(self, child: Request, parent: Request) -> None:
        """The child waits from now on."""
        self._waiting.setdefault(parent.key, {})[child] = None

    def release(self, parent: RequestKey) -> list[Request]:
        """The children that waited for this one, in the order of their arrival; they wait no longer."""
        return list(self._waiting.pop(parent, ()))

    def discard(self, child: Request) -> None:
        """Forgets a child that has ended, whether it waits or not."""
        if child.parent in self._waiting:
            family = self._waiting[child.parent]
            family.pop(child, None)
            if not family:
                del self._waiting[child.parent]

    def check(self, live: Mapping[RequestKey, Request]) -> None:
        """Raises ValueError when somebody waits for nothing: a parent that has ended, or whose prompt is computed."""
        for key, family in self._waiting.items():
            parent = live.get(key)
            if parent is None or parent.prompt_is_computed:
                raise ValueError(f"{len(family)} children wait for {key}, which does not hold them")
