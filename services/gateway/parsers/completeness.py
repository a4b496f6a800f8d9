"""Whether calls are whole: a client may parse the arguments of those, and of no others."""

from __future__ import annotations

from collections.abc import Iterable

from services.gateway.parsers.base import CallArguments, CallBegins, Part
from services.gateway.parsers.json_scan import JsonScanner, skip_blanks


class Completeness:
    """Looks at the parts of a message as they come, whichever parser gives them.

    `called`: a call has begun. `complete`: and the arguments of every call that has begun are a JSON object, no less and no more.
    """

    def __init__(self) -> None:
        self._scanners: dict[int, JsonScanner] = {}

    @property
    def called(self) -> bool:
        """See the class."""
        return bool(self._scanners)

    @property
    def complete(self) -> bool:
        """See the class."""
        return self.called and all(scanner.done and not scanner.failed for scanner in self._scanners.values())

    def see(self, parts: Iterable[Part]) -> None:
        """Takes the next parts."""
        for part in parts:
            if isinstance(part, CallBegins):
                self._scanners[part.index] = JsonScanner()
            elif isinstance(part, CallArguments):
                self._take(self._scanners.setdefault(part.index, JsonScanner()), part.fragment)

    @staticmethod
    def _take(scanner: JsonScanner, fragment: str) -> None:
        begin = skip_blanks(fragment, 0)
        if begin == len(fragment) and (scanner.done or not scanner.begun):
            return
        if scanner.done or (not scanner.begun and fragment[begin] != "{"):
            scanner.failed = True
            return
        if skip_blanks(fragment, scanner.feed(fragment, 0)) < len(fragment):
            scanner.failed = True
