"""Windows: never more than the bound, never less than the floor, and where the demand is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.windows import Share, Windows, floor_of, split

USES = st.lists(st.integers(0, 5000), min_size=1, max_size=60)


def sequences(windows: Windows, *sessions: int) -> list[int]:
    return [windows.share(session).sequences for session in sessions]


def opened(count: int, max_sequences: int = 100, max_tokens: int = 0) -> Windows:
    windows = Windows(max_sequences, max_tokens)
    for session in range(count):
        windows.open(session)
    return windows


class TestSplit:
    @given(st.integers(1, 10_000), USES)
    def test_the_sum_is_within_the_bound_and_everybody_has_the_floor(self, bound: int, used: list[int]):
        shares = split(bound, used)
        assert len(shares) == len(used)
        assert sum(shares) <= max(bound, len(used))
        assert min(shares) >= floor_of(bound, len(used))

    @given(st.integers(1, 10_000), USES)
    def test_little_of_the_bound_is_left_over(self, bound: int, used: list[int]):
        assert sum(split(bound, used)) > bound - len(used)

    @given(st.integers(1, 10_000), USES)
    def test_who_used_more_gets_no_less(self, bound: int, used: list[int]):
        shares = split(bound, sorted(used))
        assert shares == sorted(shares)

    @given(st.integers(1, 10_000), USES, st.randoms())
    def test_the_order_of_the_sessions_does_not_matter(self, bound: int, used: list[int], random: object):
        shuffled = sorted(range(len(used)), key=lambda _: random.random())  # type: ignore[attr-defined]
        shares, again = split(bound, used), split(bound, [used[index] for index in shuffled])
        assert again == [shares[index] for index in shuffled]

    @given(st.integers(1, 10_000), USES)
    def test_those_who_want_little_get_it_before_anybody_gets_more(self, bound: int, used: list[int]):
        shares = split(bound, used)
        level = max(shares)
        for share, most in zip(shares, used, strict=True):
            assert share >= min(level - 1, most)

    @given(st.integers(1, 10_000), st.integers(0, 10_000))
    def test_one_session_gets_everything(self, bound: int, used: int):
        assert split(bound, [used]) == [bound]

    def test_nobody_needs_no_windows(self):
        assert split(100, []) == []

    def test_all_that_are_idle_and_all_that_are_busy_have_equal_shares(self):
        assert split(100, [0] * 4) == [25] * 4
        assert split(100, [90] * 4) == [25] * 4

    def test_one_busy_session_gets_what_idle_ones_leave(self):
        assert split(100, [50, 0, 0, 0]) == [80, 6, 6, 6]

    def test_a_thousand_sessions_share(self):
        shares = split(1024, [0] * 900 + [5] * 100)
        assert sum(shares) <= 1024
        assert min(shares) == 1
        assert split(64, [1] * 1000) == [1] * 1000


class TestFloor:
    @pytest.mark.parametrize(("bound", "sessions", "floor"), [(100, 1, 25), (100, 5, 5), (3, 1, 1), (3, 10, 1), (100, 0, 25)])
    def test_it_is_a_quarter_of_an_equal_share_and_never_nothing(self, bound: int, sessions: int, floor: int):
        assert floor_of(bound, sessions) == floor


class TestDemand:
    def test_a_lone_session_has_everything_and_shares_with_the_next(self):
        windows = opened(1, 100, 1000)
        assert windows.share(0) == Share(100, 1000)
        assert windows.open(1) == [0, 1]
        assert [windows.share(0), windows.share(1)] == [Share(50, 500), Share(50, 500)]

    def test_what_a_lost_session_had_is_the_others_at_once(self):
        windows = opened(2)
        windows.add(0, 50, 50)
        assert windows.close(0) == [1]
        assert sequences(windows, 0, 1) == [0, 100]

    def test_a_session_that_uses_its_whole_window_gets_an_idle_ones_within_four_intervals(self):
        windows = opened(2)
        for _ in range(4):
            windows.add(0, sequences(windows, 0)[0], 0)
            windows.end_interval()
            windows.add(0, -windows._sessions[0].sequences.now, 0)
        busy, idle = sequences(windows, 0, 1)
        assert busy >= 85
        assert idle == floor_of(100, 2)

    def test_a_session_that_wakes_up_has_its_fair_share_within_four_intervals(self):
        windows = opened(2)
        live = [0, 0]

        def fill(*sessions: int) -> None:
            for session in sessions:
                want = windows.share(session).sequences
                windows.add(session, want - live[session], 0)
                live[session] = want
            windows.end_interval()

        for _ in range(4):
            fill(0)
        for _ in range(4):
            fill(0, 1)
        assert sequences(windows, 0, 1) == [50, 50]

    def test_the_most_of_this_interval_and_the_last_counts(self):
        windows = opened(2)
        windows.add(0, 60, 0)
        windows.add(0, -60, 0)
        for _ in range(2):
            windows.end_interval()
            assert sequences(windows, 0)[0] > 80
        windows.end_interval()
        assert sequences(windows, 0, 1) == [50, 50]

    def test_tokens_are_split_by_tokens(self):
        windows = opened(2, 100, 1000)
        windows.add(0, 1, 600)
        windows.add(1, 40, 10)
        windows.end_interval()
        first, second = windows.share(0), windows.share(1)
        assert first.sequences < second.sequences
        assert first.tokens > second.tokens
        assert first.tokens + second.tokens <= 1000

    def test_unbounded_tokens_are_not_split(self):
        windows = opened(2)
        windows.add(0, 1, 600)
        windows.end_interval()
        assert windows.share(0).tokens == 0

    def test_endings_after_the_session_was_lost_are_nobodys(self):
        windows = opened(2)
        windows.close(0)
        windows.add(0, -1, -10)
        assert windows.share(1) == Share(100, 0)

    def test_only_material_changes_are_told_when_a_session_comes_or_goes(self):
        windows = opened(20, 1000)
        assert windows.open(20) == [20]
        assert windows.close(20) == []
        for session in range(17):
            windows.close(session)
        assert windows.close(17) == [18, 19]

    @given(st.lists(st.tuples(st.sampled_from(["open", "close", "add", "remove", "tick"]), st.integers(0, 7), st.integers(1, 300))))
    def test_whatever_happens_the_shares_stay_within_the_bounds(self, events: list[tuple[str, int, int]]):
        windows, live = Windows(64, 4000), dict[int, list[int]]()
        for event, session, amount in events:
            if event == "open" and session not in live:
                live[session] = []
                windows.open(session)
            elif event == "close" and session in live:
                del live[session]
                windows.close(session)
            elif event == "add" and session in live:
                live[session].append(amount)
                windows.add(session, 1, amount)
            elif event == "remove" and live.get(session):
                windows.add(session, -1, -live[session].pop())
            elif event == "tick":
                windows.end_interval()
            shares = [windows.share(name) for name in live]
            assert sum(share.sequences for share in shares) <= 64
            assert sum(share.tokens for share in shares) <= 4000
            assert all(share.sequences >= floor_of(64, len(live)) for share in shares)
            assert all(share.tokens >= floor_of(4000, len(live)) for share in shares)
