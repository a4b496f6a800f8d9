"""The waiting queue: who is next, decided by a policy, in O(log n).

A preempted or migrated request comes back with the place of its arrival, so that nobody who came later (and, under the priority policy,
is no more urgent) overtakes it.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator

from services.scheduler.core.request import Request

# Entries that the heap may have beyond twice its members before those of requests that have left are swept out.
_SLACK = 64


class Policy(enum.Enum):
    """Order of the waiting queue (`--scheduling-policy`)."""

    FCFS = "fcfs"
    PRIORITY = "priority"

    def rank(self, request: Request, order: int) -> tuple[int, int]:
        """The place of the `order`-th admission of a group among those that run there: lower is served first and preempted last."""
        return (request.priority if self is Policy.PRIORITY else 0, order)


_KEYS: dict[Policy, Callable[[Request], tuple[int, ...]]] = {
    Policy.FCFS: lambda request: (request.arrival,),
    Policy.PRIORITY: lambda request: (request.priority, request.arrival),
}


class WaitingQueue:
    """Waiting requests in the policy's order. Removal is lazy: an entry whose request has left is skipped when it comes up, or swept out
    when most have, so that those who came and left behind one who waits long do not pile up.

    A parked request is a member that has no place in the order until it is pushed.
    """

    def __init__(self, policy: Policy = Policy.FCFS) -> None:
        self._key = _KEYS[policy]
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        self._members: dict[Request, int] = {}
        self._entries = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""
        return iter(self._members)

    def push(self, request: Request) -> None:
        """Adds a request at the place its key gives it."""
        self._entries += 1
        self._members[request] = self._entries
        heapq.heappush(self._heap, (self._key(request), self._entries, request))
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [entry for entry in self._heap if self._members.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def park(self, request: Request) -> None:
        """Adds a request that does not come up until it is pushed, so that it is in nobody's way."""
        self._members[request] = 0

    def is_parked(self, request: Request) -> bool:
        """Whether a member has no place in the order."""
        return self._members[request] == 0

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        del self._members[request]

    def discard(self, request: Request) -> None:
        """Takes a request out, if it is a member."""
        self._members.pop(request, None)

    def peek(self) -> Request | None:
        """The next request; None when nobody waits."""
        while self._heap:
            _, entry, request = self._heap[0]
            if self._members.get(request) == entry:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Takes the next request. Raises IndexError when nobody waits."""
        request = self.peek()
        if request is None:
            raise IndexError("the queue is empty")
        self.remove(request)
        return request
