"""Who may have how much outstanding: the bound on live requests and tokens, split among the gateways' sessions by recent demand.

    sum of wants <= bound     everybody gets what it wants, and the rest in proportion: one busy session among idle ones gets nearly all
    sum of wants >  bound     everybody gets what it wants up to one level for all (max-min fairness, water filling)

A session wants a third more than the most it had live lately, and a floor on top; so one that uses its whole window, or nearly (what is
still being encoded is not live here), always wants more than it has, and doubles what it has within about three intervals. `Lately` is this
interval and the last, so that what an idle session had goes to the others after one to two intervals. The split is advice: the
scheduler's own bound (SchedulerState.accept) is the truth (PROTOCOL.md rule 20).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# The floor is this part of an equal share: what a session that was idle may begin with before the next split.
_FLOOR_PART = 4


def floor_of(bound: int, sessions: int) -> int:
    """What every one of `sessions` may always have: a quarter of an equal share of `bound`, at least 1."""
    return max(1, bound // (_FLOOR_PART * max(1, sessions)))


def split(bound: int, used: Sequence[int]) -> list[int]:
    """Windows for sessions that had at most `used` live lately.

    Each is at least `floor_of(bound, sessions)`. Their sum is at most `bound`, or where there are more sessions than that, 1 each.
    """
    floor = floor_of(bound, len(used))
    wants = [floor + most + most // 3 for most in used]
    total = sum(wants)
    if total <= bound:
        return [want * bound // total for want in wants]
    level = _level(bound, wants)
    return [max(1, min(want, level)) for want in wants]


def _level(bound: int, wants: Sequence[int]) -> int:
    """The highest level up to which all `wants` (whose sum is over `bound`) can be met."""
    left, remaining = bound, len(wants)
    for want in sorted(wants):
        if want * remaining > left:
            break
        left -= want
        remaining -= 1
    return left // remaining


@dataclass(frozen=True, slots=True)
class Share:
    """One session's window: sequences, and tokens (prompts plus max_tokens; 0 where tokens are not bounded)."""

    sequences: int
    tokens: int

    def differs(self, other: Share) -> bool:
        """Whether the session should hear of the change at once: more than an eighth of either."""
        return abs(self.sequences - other.sequences) * 8 > other.sequences or abs(self.tokens - other.tokens) * 8 > other.tokens


@dataclass(slots=True)
class _Use:
    """What is live, and the most that was in this interval and the last."""

    now: int = 0
    most: int = 0
    before: int = 0

    def add(self, amount: int) -> None:
        self.now += amount
        self.most = max(self.most, self.now)

    def roll(self) -> None:
        self.before, self.most = self.most, self.now


@dataclass(slots=True)
class _Session:
    sequences: _Use = field(default_factory=_Use)
    tokens: _Use = field(default_factory=_Use)


class Windows:
    """The sessions' uses and shares. All methods but `add`, `share` and `is_short` are O(sessions log sessions)."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        """`max_tokens` 0: tokens are not bounded."""
        self._max_sequences, self._max_tokens = max_sequences, max_tokens
        self._sessions: dict[int, _Session] = {}
        self._shares: dict[int, Share] = {}

    def open(self, session: int) -> list[int]:
        """A session is there. Returns those whose share has changed materially, itself included."""
        self._sessions[session] = _Session()
        return self._split_anew()

    def close(self, session: int) -> list[int]:
        """A session is lost: its share returns to the others at once. Returns those whose share has changed materially."""
        del self._sessions[session]
        return self._split_anew()

    def add(self, session: int, sequences: int, tokens: int) -> None:
        """The session has so many more (negative: fewer) sequences and tokens live. One that is closed is ignored."""
        use = self._sessions.get(session)
        if use is not None:
            use.sequences.add(sequences)
            use.tokens.add(tokens)

    def is_short(self, session: int) -> bool:
        """Whether the session has three quarters of its share live, and may soon be refused what the bound would allow."""
        use, share = self._sessions.get(session), self.share(session)
        if use is None:
            return False
        return use.sequences.now * 4 >= share.sequences * 3 or (share.tokens > 0 and use.tokens.now * 4 >= share.tokens * 3)

    def widen(self) -> list[int]:
        """Splits within an interval, by what was live so far. Returns those whose share has changed materially."""
        return self._split_anew()

    def end_interval(self) -> None:
        """Splits by what was live in this interval and the last."""
        self._split_anew()
        for use in self._sessions.values():
            use.sequences.roll()
            use.tokens.roll()

    def share(self, session: int) -> Share:
        """The session's share as of the last split; nothing for one that is closed."""
        return self._shares.get(session, Share(0, 0))

    def _split_anew(self) -> list[int]:
        uses, before = self._sessions.values(), self._shares
        sequences = split(self._max_sequences, [max(use.sequences.most, use.sequences.before) for use in uses])
        tokens = [0] * len(uses)
        if self._max_tokens:
            tokens = split(self._max_tokens, [max(use.tokens.most, use.tokens.before) for use in uses])
        self._shares = {name: Share(*share) for name, *share in zip(self._sessions, sequences, tokens, strict=True)}
        return [name for name, share in self._shares.items() if name not in before or share.differs(before[name])]
