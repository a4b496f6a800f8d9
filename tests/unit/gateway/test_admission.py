"""The window: what fits, what does not, and that places come back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import ErrorCode, TokenloomError
from services.gateway.admission import Admission
from services.gateway.session import Window


def test_sequences_are_admitted_up_to_the_window():
    admission, window = Admission(), Window(2, 1000, True, "")
    leases = admission.admit(window, [1, 1])
    with pytest.raises(TokenloomError) as caught:
        admission.admit(window, [1])
    assert caught.value.code is ErrorCode.OVER_WINDOW
    assert caught.value.retry_after_ms
    leases[0].release()
    assert admission.admit(window, [1])


def test_tokens_are_admitted_up_to_the_window():
    admission, window = Admission(), Window(10, 100, True, "")
    admission.admit(window, [60])
    with pytest.raises(TokenloomError, match="60 tokens are running or waiting; 41 more exceed 100"):
        admission.admit(window, [41])
    admission.admit(window, [40])


def test_a_sequence_longer_than_the_window_runs_when_it_is_alone():
    admission, window = Admission(), Window(10, 100, True, "")
    lease = admission.admit(window, [5000])[0]
    with pytest.raises(TokenloomError):
        admission.admit(window, [1])
    lease.release()
    assert (admission.sequences, admission.tokens) == (0, 0)


def test_several_sequences_are_admitted_together_or_not_at_all():
    admission, window = Admission(), Window(2, 100, True, "")
    admission.admit(window, [1])
    with pytest.raises(TokenloomError):
        admission.admit(window, [1, 1])
    assert (admission.sequences, admission.tokens) == (1, 1)


def test_one_request_of_more_sequences_than_the_window_runs_when_it_is_alone():
    admission, window = Admission(), Window(2, 10, True, "")
    leases = admission.admit(window, [9, 9, 9])
    with pytest.raises(TokenloomError):
        admission.admit(window, [1])
    for lease in leases:
        lease.release()
    assert admission.admit(window, [1, 1])


def test_a_closed_window_admits_nothing():
    with pytest.raises(TokenloomError):
        Admission().admit(Window(0, 100, True, ""), [1])


def test_settling_replaces_the_estimate():
    admission = Admission()
    lease = admission.admit(Window(5, 1000, True, ""), [100])[0]
    lease.settle(30)
    assert admission.tokens == 30
    lease.release()
    lease.release()
    lease.settle(99)
    assert (admission.sequences, admission.tokens) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["admit", "settle", "release"]), st.integers(0, 9)), max_size=60))
def test_what_is_outstanding_is_always_the_sum_of_the_leases(steps):
    admission, window, held = Admission(), Window(8, 200, True, ""), []
    for tokens, action, which in steps:
        if action == "admit":
            try:
                held += [[lease, tokens] for lease in admission.admit(window, [tokens])]
            except TokenloomError:
                assert len(held) == 8 or sum(entry[1] for entry in held) + tokens > 200
        elif held and action == "settle":
            held[which % len(held)][0].settle(tokens)
            held[which % len(held)][1] = tokens
        elif held:
            held.pop(which % len(held))[0].release()
        assert (admission.sequences, admission.tokens) == (len(held), sum(entry[1] for entry in held))
