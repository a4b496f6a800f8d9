"""Constraints travel whole, and their key says what compiles to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.constraints import Constraint, ConstraintKind
from tokenloom.common.v1 import common_pb2

_WITH_A_TEXT = [kind for kind in ConstraintKind if kind not in (ConstraintKind.CHOICE, ConstraintKind.JSON_OBJECT)]
_TEXT = st.text(min_size=1, max_size=20)
_CONSTRAINTS = st.builds(
    lambda shape, begin_after, compact, param: Constraint(*shape, tuple(begin_after), compact, param),
    st.one_of(
        st.just((ConstraintKind.JSON_OBJECT, ())),
        st.tuples(st.just(ConstraintKind.CHOICE), st.lists(_TEXT, min_size=1, max_size=4).map(tuple)),
        st.tuples(st.sampled_from(_WITH_A_TEXT), _TEXT.map(lambda text: (text,))),
    ),
    st.lists(st.integers(0, 2**32 - 1), max_size=3),
    st.booleans(),
    _TEXT,
)


@given(_CONSTRAINTS)
def test_a_constraint_arrives_as_it_was_sent(constraint):
    message = common_pb2.Constraint.FromString(constraint.to_proto().SerializeToString())
    arrived = Constraint.from_proto(message)
    assert (arrived, arrived.param) == (constraint, constraint.param)


@given(_CONSTRAINTS, _CONSTRAINTS)
def test_keys_are_equal_exactly_for_what_compiles_to_the_same(one, other):
    same = (one.kind, one.texts, one.compact) == (other.kind, other.texts, other.compact)
    assert (one.key == other.key) == same
    assert replace(one, begin_after=(1, 2), param="elsewhere").key == one.key


def test_texts_of_a_choice_do_not_run_together_in_the_key():
    assert Constraint(ConstraintKind.CHOICE, ("ab", "c")).key != Constraint(ConstraintKind.CHOICE, ("a", "bc")).key


def test_a_message_of_no_known_kind_is_refused():
    with pytest.raises(ValueError):
        Constraint.from_proto(common_pb2.Constraint(param="response_format"))
