"""From token ids to text, a few at a time, so that the pieces joined are exactly the full decode.

Three things make text wait: a character whose last bytes are not there yet, a run of byte-fallback tokens (valid or not only as
a whole), and bytes that begin, or are, a stop string. What waits is released by later tokens or by `finish`.

    raw bytes   | released as text | held: incomplete character, open byte run, possible stop string |
                0                  ^                                                                 ^ count
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.text.automaton import StopAutomaton
from libs.text.table import TextRule, TextTable, TokenClass


class OutputBytes:
    """The raw bytes of one choice's output.

    `count` is how many there were so far; all `keep_bytes` of the mesh count these. `stripped` says that the first space was dropped.
    """

    __slots__ = ("_classes", "_strip", "_tokens", "count", "stripped")

    def __init__(self, table: TextTable, *, skip_special_tokens: bool = True) -> None:
        self._tokens = table.spelling if skip_special_tokens else table.tokens
        self._classes = table.classes
        self._strip = table.strip_first_space
        self.count = 0
        self.stripped = False

    def push_one(self, token_id: int) -> bytes:
        """The bytes that one more token adds; empty for special (when skipped), unused and unknown ids."""
        data = self._tokens[token_id] if 0 <= token_id < len(self._tokens) else b""
        if self._strip and data:
            self._strip = False
            # A space spelled by a byte token stays: whether it is one depends on the rest of its run (see _ByteFallbackText).
            if data[0] == 0x20 and self._classes[token_id] != TokenClass.BYTE:
                data = data[1:]
                self.stripped = True
        self.count += len(data)
        return data

    def push(self, token_ids: Iterable[int]) -> bytes:
        """The bytes that several tokens add."""
        return b"".join([self.push_one(token_id) for token_id in token_ids])


class IncrementalText:
    """The text of one choice, as far as it is safe to show.

    `push` never returns half a character, nor anything that is or may become part of a stop string: whether a match counts is the
    scheduler's decision (below min_tokens it does not), which arrives with the ending. A stop string completed by one `push` is held
    until the next one, which proves that it did not count. Costs O(new bytes).
    """

    __slots__ = ("_automaton", "_classes", "_output", "_skip", "_state", "_text")

    def __init__(self, table: TextTable, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        """Raises ValueError when a stop string is empty."""
        self._output = OutputBytes(table, skip_special_tokens=skip_special_tokens)
        self._automaton = StopAutomaton(stop) if stop else None
        self._state = 0
        self._text: _ByteLevelText | _ByteFallbackText
        self._text = _ByteLevelText() if table.rule is TextRule.BYTE_LEVEL else _ByteFallbackText(table, self._output)
        self._classes = table.classes
        self._skip = (TokenClass.SPECIAL, TokenClass.UNUSED) if skip_special_tokens else (TokenClass.UNUSED,)

    @property
    def bytes_so_far(self) -> int:
        """Raw bytes pushed so far, shown or held."""
        return self._output.count

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make safe to show; may be empty."""
        return self._text.take(hold=self._append(token_ids))

    def finish(self, keep_bytes: int | None = None, token_ids: Iterable[int] = ()) -> str:
        """The rest of the text, after the last `token_ids`, cut so that `keep_bytes` raw bytes of the whole output remain (None: all).

        The tokens of the frame that carries the ending belong in `token_ids`, not in a `push` before it: a stop token spells text
        that must not be shown. Text that was already returned stays, whatever `keep_bytes` says.
        """
        self._append(token_ids)
        return self._text.finish(drop=0 if keep_bytes is None else max(0, self._output.count - keep_bytes))

    def _append(self, token_ids: Iterable[int]) -> int:
        """Takes the tokens in; returns how many bytes at the end may belong to a stop string."""
        hold = 0
        for token_id in token_ids:
            if not 0 <= token_id < len(self._classes) or self._classes[token_id] in self._skip:
                continue
            data = self._output.push_one(token_id)
            self._text.append(data, self._classes[token_id] == TokenClass.BYTE)
            if self._automaton is not None:
                hold = self._watch(data, hold)
        return max(hold, self._automaton.depth[self._state]) if self._automaton is not None else 0

    def _watch(self, data: bytes, hold: int) -> int:
        """Steps the automaton; `hold` reaches back to the start of the earliest stop string that is complete in this push."""
        assert self._automaton is not None
        state = self._state
        for byte in data:
            state = self._automaton.step(state, byte)
            longest = self._automaton.longest[state]
            hold = max(hold + 1, longest) if hold else longest
        self._state = state
        return hold


def decode_text(table: TextTable, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """The text of a whole list of ids."""
    return IncrementalText(table, skip_special_tokens=skip_special_tokens).finish(token_ids=token_ids)


class _ByteLevelText:
    """Held bytes of a byte-level vocabulary: UTF-8, each maximal invalid part replaced by U+FFFD."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = bytearray()

    def append(self, data: bytes, _is_byte: bool) -> None:
        self._held += data

    def take(self, hold: int) -> str:
        size = len(self._held) - hold
        if size <= 0:
            return ""
        text, used = codecs.utf_8_decode(bytes(self._held[:size]), "replace", False)
        del self._held[:used]
        return text

    def finish(self, drop: int) -> str:
        kept = bytes(self._held[: max(0, len(self._held) - drop)])
        self._held.clear()
        return kept.decode("utf-8", "replace")


@dataclass(slots=True)
class _Segment:
    """Consecutive bytes of text tokens, or one run of byte tokens."""

    is_run: bool
    data: bytearray


class _ByteFallbackText:
    """Held bytes of a vocabulary with byte fallback: a run of byte tokens is UTF-8 as a whole, or each of its bytes is U+FFFD."""

    __slots__ = ("_held", "_output", "_run_closed", "_segments", "_strip")

    def __init__(self, table: TextTable, output: OutputBytes) -> None:
        self._output = output
        self._segments: deque[_Segment] = deque()
        self._held = 0
        self._run_closed = False
        # OutputBytes strips the space of a text token; here only one that a run at the very start spells is left to strip.
        self._strip = table.strip_first_space

    def append(self, data: bytes, is_byte: bool) -> None:
        last = self._segments[-1] if self._segments else None
        if not data:  # an empty token still ends a run
            self._run_closed = True
            return
        if last is None or last.is_run != is_byte or (is_byte and self._run_closed):
            self._segments.append(_Segment(is_byte, bytearray(data)))
            self._run_closed = False
        else:
            last.data += data
        self._held += len(data)

    def take(self, hold: int) -> str:
        parts, available = [], self._held - hold
        while self._segments and available > 0:
            segment = self._segments[0]
            if segment.is_run:
                closed = len(self._segments) > 1 or self._run_closed
                if not closed or len(segment.data) > available:
                    break
                text, used = _spell_run(segment.data), len(segment.data)
            else:
                text, used = codecs.utf_8_decode(bytes(segment.data[:available]), "replace", False)
            parts.append(self._stripped(text, segment.is_run))
            available -= used
            self._held -= used
            if used < len(segment.data):
                del segment.data[:used]
                break
            self._segments.popleft()
        return "".join(parts)

    def finish(self, drop: int) -> str:
        parts, available = [], self._held - drop
        for segment in self._segments:
            kept = segment.data[: max(0, available)]
            available -= len(kept)
            if kept:
                text = _spell_run(kept) if segment.is_run else kept.decode("utf-8", "replace")
                parts.append(self._stripped(text, segment.is_run))
        self._segments.clear()
        self._held = 0
        return "".join(parts)

    def _stripped(self, text: str, is_run: bool) -> str:
        if not self._strip or not text:
            return text
        self._strip = False
        return text[1:] if is_run and text[0] == " " and not self._output.stripped else text


def _spell_run(data: bytearray) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}" * len(data)
