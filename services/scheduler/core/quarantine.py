"""Who crashed the worker: the suspects of a failed batch run in halves until the culprit is alone.

After a batch failed, or a worker died with it, its requests are suspects. They are resumed one half at a time, each in a batch of its
own; a half that succeeds is cleared, one that fails is halved again. Only a request whose batch fails while it is alone, CRASHES_ALONE
times without progress, is poison: an operator's kill -9 must not end the request that happened to be alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.scheduler.core.request import Request

CRASHES_ALONE = 3


class Quarantine:
    """Sets of suspects, each in order; the first is the one that may run. By halving there are few sets, however many suspects."""

    def __init__(self) -> None:
        self._sets: list[dict[Request, None]] = []
        self._group = ""

    @property
    def suspects(self) -> Collection[Request]:
        """The suspects whose turn it is."""
        return self._sets[0].keys() if self._sets else ()

    def isolates(self, group: str, groups: Iterable[str]) -> bool:
        """Whether `group` is the one of `groups` (those that can hold the suspects whose turn it is; none: nobody) that runs them, and
        nobody else: the one that failed last, if it is still there."""
        return bool(self._sets) and group == (self._group if self._group in groups else min(groups, default=""))

    def may_run(self, request: Request, *, isolated: bool) -> bool:
        """Whether the request may stand in the next batch of a group that is isolated or not."""
        if not self._sets:
            return True
        return request in self._sets[0] if isolated else not any(request in suspects for suspects in self._sets)

    def accuse(self, suspects: Iterable[Request], group: str) -> Request | None:
        """A batch of `suspects` failed on `group`. Returns the poison request if one is convicted."""
        accused = list(suspects)
        self._group = group if accused else self._group
        for request in accused:
            self.discard(request)
        if len(accused) == 1:
            accused[0].crashes += 1
            if accused[0].crashes >= CRASHES_ALONE:
                return accused[0]
            self._sets.insert(0, dict.fromkeys(accused))
        elif accused:
            half = (len(accused) + 1) // 2
            self._sets[:0] = [dict.fromkeys(accused[:half]), dict.fromkeys(accused[half:])]
        return None

    def clear(self, requests: Iterable[Request]) -> None:
        """A batch with these requests succeeded: they are innocent. Who has crashed alone is in a set until then."""
        if self._sets:
            for request in requests:
                request.crashes = 0
                self.discard(request)

    def discard(self, request: Request) -> None:
        """Forgets a request (it is innocent, or has ended)."""
        for suspects in self._sets:
            if request in suspects:
                del suspects[request]
                if not suspects:
                    self._sets.remove(suspects)
                return
