"""Quarantine: halves until the culprit is alone, and nobody is convicted by somebody else's crash."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.quarantine import CRASHES_ALONE, Quarantine
from services.scheduler.core.request import Request
from tests.support.core import make_request, make_state


def requests(count: int) -> list[Request]:
    state = make_state()
    return [make_request(state, [1]) for _ in range(count)]


def test_without_suspects_everybody_runs():
    quarantine = Quarantine()
    (request,) = requests(1)
    assert quarantine.may_run(request, isolated=False)
    assert not quarantine.isolates("g0", ["g0"])


def test_suspects_run_in_halves_and_only_in_isolation():
    quarantine, (a, b, c, d) = Quarantine(), requests(4)
    quarantine.accuse([a, b, c], "g0")
    assert list(quarantine.suspects) == [a, b]
    assert quarantine.may_run(a, isolated=True)
    assert not quarantine.may_run(c, isolated=True)
    assert not quarantine.may_run(d, isolated=True)
    assert not quarantine.may_run(a, isolated=False)
    assert quarantine.may_run(d, isolated=False)


def test_the_next_half_has_its_turn_when_the_first_is_cleared():
    quarantine, (a, b, c) = Quarantine(), requests(3)
    quarantine.accuse([a, b, c], "g0")
    quarantine.clear([a, b])
    assert list(quarantine.suspects) == [c]
    quarantine.clear([c])
    assert not quarantine.isolates("g0", ["g0"])


def test_a_request_alone_is_poison_only_after_it_crashed_several_times_without_progress():
    quarantine, (a,) = Quarantine(), requests(1)
    for _ in range(CRASHES_ALONE - 1):
        assert quarantine.accuse([a], "g0") is None
    assert quarantine.accuse([a], "g0") is a


def test_progress_clears_a_request_of_its_crashes():
    quarantine, (a,) = Quarantine(), requests(1)
    quarantine.accuse([a], "g0")
    quarantine.accuse([a], "g0")
    quarantine.clear([a])
    assert quarantine.accuse([a], "g0") is None


def test_a_crash_among_others_does_not_count_as_a_crash_alone():
    quarantine, (a, b) = Quarantine(), requests(2)
    for _ in range(2 * CRASHES_ALONE):
        assert quarantine.accuse([a, b], "g0") is None
    assert a.crashes == b.crashes == 0


def test_an_ended_suspect_is_forgotten_and_its_half_with_it():
    quarantine, (a, b) = Quarantine(), requests(2)
    quarantine.accuse([a, b], "g0")
    quarantine.discard(a)
    assert list(quarantine.suspects) == [b]


def test_only_the_group_that_failed_is_isolated():
    quarantine = Quarantine()
    quarantine.accuse(requests(2), "g1")
    assert quarantine.isolates("g1", ["g0", "g1"])
    assert not quarantine.isolates("g0", ["g0", "g1"])


def test_another_group_takes_over_when_the_one_that_failed_is_gone():
    quarantine = Quarantine()
    quarantine.accuse(requests(2), "g9")
    assert quarantine.isolates("g0", ["g1", "g0"])
    assert not quarantine.isolates("g1", ["g1", "g0"])


def test_an_accusation_of_nobody_changes_nothing():
    quarantine = Quarantine()
    quarantine.accuse([], "g5")
    assert not quarantine.isolates("g5", ["g5"])


@pytest.mark.parametrize("bad", [0, 6, 15])
def test_halving_finds_the_one_bad_request_of_sixteen(bad: int):
    quarantine, everyone = Quarantine(), requests(16)
    quarantine.accuse(everyone, "g0")
    for _ in range(20):
        batch = list(quarantine.suspects)
        if not batch:
            pytest.fail("the culprit was cleared")
        if everyone[bad] in batch:
            if quarantine.accuse(batch, "g0"):
                break
        else:
            quarantine.clear(batch)
    assert everyone[bad].crashes == CRASHES_ALONE
    assert all(request.crashes == 0 for request in everyone if request is not everyone[bad])


@given(st.lists(st.sets(st.integers(0, 9), min_size=1), max_size=12))
def test_nobody_is_ever_in_two_sets(accusations: list[set[int]]):
    quarantine, everyone = Quarantine(), requests(10)
    for accused in accusations:
        quarantine.accuse([everyone[number] for number in accused], "g0")
        members = [request for suspects in quarantine._sets for request in suspects]
        assert len(members) == len(set(members))
        assert all(quarantine._sets)


def test_among_thousands_of_suspects_there_are_few_sets():
    quarantine, everyone = Quarantine(), requests(2048)
    quarantine.accuse(everyone, "g")
    while len(quarantine.suspects) > 1:
        quarantine.accuse(quarantine.suspects, "g")
    assert len(quarantine._sets) == 12
    assert quarantine.may_run(everyone[0], isolated=True)
    assert not any(quarantine.may_run(request, isolated=False) for request in everyone)
    quarantine.clear(everyone)
    assert not quarantine.suspects
