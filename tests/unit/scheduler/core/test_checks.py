"""The table of constraints: who is asked, whose answers count, what is forgotten and when."""

from __future__ import annotations

import pytest

from libs.errors import ErrorCode, TokenloomError
from services.scheduler.core import checks
from services.scheduler.core.checks import LONGEST_NS, PATIENCE_NS, REFUSAL_NS, RETRY_NS, Check, Checks, Standing
from tests.support.model_constraints import multiples

THREES, SEVENS = multiples(3, 5), multiples(7, 5)
INVALID = TokenloomError(ErrorCode.INVALID_CONSTRAINT, "no")
BUSY = TokenloomError(ErrorCode.CONSTRAINT_BUSY, "later")


def tell(table: Checks, group: str = "g", now: int = 0, *, sent: int = 0, settled: int = 0) -> tuple[list[int], list[int]]:
    """The asks and the forgets that the group is told now."""
    told = table.orders(group, now, sent=sent, settled=settled)
    return [ask.id for ask in told.prepares], told.forgets


def test_a_group_is_asked_once_for_what_many_want():
    table = Checks()
    check = table.want(THREES)
    assert tell(table) == ([1], [])
    assert table.want(multiples(3, 5, param="elsewhere")) is check
    assert tell(table) == ([], [])
    assert (len(table), check.wanted, table.unanswered) == (1, 2, 1)


def test_each_group_is_asked_and_answers_for_itself():
    table = Checks()
    check = table.want(THREES)
    assert tell(table, "a") == ([1], [])
    assert tell(table, "b") == ([2], [])
    assert table.answered("a", 1, None, 5) is not None
    assert (table.standing(check, "a"), table.standing(check, "b"), table.standing(check, "c")) == (
        Standing.READY,
        Standing.ASKED,
        Standing.ASKED,
    )
    assert table.id_in(check, "a") == 1
    with pytest.raises(ValueError, match="not prepared"):
        table.id_in(check, "b")


def test_a_constraint_that_begins_elsewhere_is_another_one():
    table = Checks()
    table.want(THREES)
    table.want(multiples(3, 5, begin_after=(9,)))
    assert tell(table) == ([1, 2], [])


def test_an_answer_counts_once_and_says_how_long_it_took():
    table = Checks()
    check = table.want(THREES)
    tell(table, now=10)
    heard = table.answered("g", 1, None, 25)
    assert heard is not None
    assert (heard.check, heard.took_ns) == (check, 15)
    assert table.answered("g", 1, INVALID, 30) is None
    assert table.answered("g", 7, None, 30) is None
    assert table.answered("nobody", 1, None, 30) is None
    assert table.standing(check, "g") is Standing.READY


def test_a_refusal_stands_for_a_while_and_is_asked_about_anew_afterwards():
    table = Checks()
    check = table.want(THREES)
    tell(table)
    table.answered("g", 1, INVALID, 100)
    assert (table.standing(check, "g"), table.error(check, "g")) == (Standing.FAILED, INVALID)
    table.expire(99 + REFUSAL_NS)
    table.release(check)
    assert table.want(THREES) is check
    assert (table.standing(check, "g"), tell(table)) == (Standing.FAILED, ([], []))
    table.expire(100 + REFUSAL_NS)
    assert (table.standing(check, "g"), tell(table)) == (Standing.ASKED, ([2], []))


def test_a_busy_group_is_asked_again_a_little_later_if_somebody_still_wants_it():
    table = Checks()
    wanted, released = table.want(THREES), table.want(SEVENS)
    tell(table)
    table.answered("g", 1, BUSY, 100)
    table.answered("g", 2, BUSY, 100)
    table.release(released)
    assert table.expire(99 + RETRY_NS) == []
    assert table.standing(wanted, "g") is Standing.BUSY
    table.expire(100 + RETRY_NS)
    assert tell(table) == ([3], [])
    table.want(SEVENS)
    assert tell(table) == ([4], [])


def test_a_group_that_answers_others_meanwhile_may_owe_one_for_longer_but_not_for_ever():
    table = Checks()
    table.want(THREES)
    late = table.want(SEVENS)
    tell(table, now=50)
    table.answered("g", 1, None, 40 + PATIENCE_NS)
    assert table.expire(39 + 2 * PATIENCE_NS) == []
    assert table.expire(40 + 2 * PATIENCE_NS) == [late]


def test_no_group_may_owe_an_answer_for_ever_however_many_others_it_gives():
    table = Checks()
    late = table.want(SEVENS)
    tell(table, now=50)
    table.want(THREES)
    tell(table, now=60)
    table.answered("g", 2, None, 49 + LONGEST_NS)
    assert table.expire(49 + LONGEST_NS) == []
    assert table.expire(50 + LONGEST_NS) == [late]


def test_a_group_that_owes_an_answer_for_too_long_has_refused_and_may_forget():
    table = Checks()
    check = table.want(THREES)
    tell(table, now=50)
    assert table.expire(49 + PATIENCE_NS) == []
    assert table.expire(50 + PATIENCE_NS) == [check]
    error = table.error(check, "g")
    assert error is not None
    assert (table.standing(check, "g"), error.code) == (Standing.FAILED, ErrorCode.CONSTRAINT_BUSY)
    assert tell(table) == ([], [1])
    assert table.answered("g", 1, None, 99) is None, "it was told to forget what it compiled"
    assert table.unanswered == 0


def test_the_one_that_is_idle_longest_is_forgotten_first_and_never_one_that_is_wanted():
    table = Checks(most_idle=1)
    old, wanted, new = (table.want(multiples(of, 5)) for of in (2, 3, 5))
    tell(table)
    for ask in (1, 2, 3):
        table.answered("g", ask, None, 0)
    table.release(old)
    assert tell(table) == ([], [])
    table.release(new)
    assert tell(table) == ([], [1])
    assert (len(table), wanted.wanted) == (2, 1)
    table.check({wanted: 1})


def test_who_comes_back_while_a_constraint_is_idle_finds_it_compiled():
    table = Checks(most_idle=1)
    check = table.want(THREES)
    tell(table)
    table.answered("g", 1, None, 0)
    table.release(check)
    assert table.want(THREES) is check
    table.release(table.want(SEVENS))
    assert table.standing(check, "g") is Standing.READY


def test_long_texts_fill_the_table_sooner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "MOST_IDLE_BYTES", 5)
    table = Checks()
    for of in (2, 3):  # three bytes each
        table.release(table.want(multiples(of, 5)))
    assert len(table) == 1
    table.check({})


def test_a_constraint_is_forgotten_only_when_the_steps_sent_before_are_over():
    table = Checks(most_idle=0)
    check = table.want(THREES)
    tell(table)
    table.answered("g", 1, None, 0)
    table.release(check)
    assert tell(table, sent=7, settled=5) == ([], [])
    assert tell(table, sent=9, settled=6) == ([], [])
    assert tell(table, sent=9, settled=7) == ([], [1])


def test_an_ask_of_one_that_left_the_table_is_withdrawn():
    table = Checks(most_idle=0)
    tell(table)
    check = table.want(THREES)
    tell(table)
    table.release(check)
    assert table.unanswered == 0
    assert table.answered("g", 1, None, 0) is None
    table.want(THREES)
    assert tell(table) == ([2], [1])


def test_a_group_that_was_lost_knows_nothing_and_is_asked_only_for_what_is_wanted():
    table = Checks()
    wanted, idle = table.want(THREES), table.want(SEVENS)
    tell(table)
    table.answered("g", 1, None, 0)
    table.release(idle)
    table.lose("g")
    assert table.answered("g", 2, None, 0) is None
    assert table.standing(wanted, "g") is Standing.ASKED
    assert tell(table) == ([3], [])
    table.lose("unknown")


@pytest.mark.parametrize("wanted", [{}, {Check(THREES): 1}])
def test_the_table_is_compared_with_the_live_requests(wanted: dict[Check, int]):
    table = Checks()
    table.want(THREES)
    with pytest.raises(ValueError, match="wanted by others"):
        table.check(wanted)
