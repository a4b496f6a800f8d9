"""A row's way through its constraint."""

from __future__ import annotations

import numpy as np
import pytest

from libs.constraints import Constraint, ConstraintKind
from services.worker.constraints.base import Backend, MatcherBroken, Words
from services.worker.constraints.progress import Progress
from tests.support.constrained import grammar_of
from tests.unit.worker.constraints.walking import ENDINGS, allowed, progress_of

A, B = 3 + ord("a"), 3 + ord("b")
ABS = Constraint(ConstraintKind.REGEX, ("a|ab|abb",))


def test_the_end_is_allowed_where_the_grammar_may_end_and_it_is_complete_where_nothing_else_is(backend: Backend):
    progress = progress_of(backend, ABS)
    assert allowed(progress) == {A}
    progress.accept(A)
    assert allowed(progress) == {B, *ENDINGS}
    progress.accept(B)
    assert not progress.complete
    progress.accept(B)
    assert progress.complete
    assert allowed(progress) == set(ENDINGS)


def test_the_end_of_sequence_completes_it(backend: Backend):
    progress = progress_of(backend, ABS)
    progress.accept(A)
    progress.accept(ENDINGS[1])
    assert progress.complete


def test_with_ignore_eos_the_end_is_allowed_only_where_nothing_else_is(backend: Backend):
    progress = progress_of(backend, ABS, ignore_eos=True)
    progress.accept(A)
    assert allowed(progress) == {B}
    empty = progress_of(backend, Constraint(ConstraintKind.REGEX, ("",)), ignore_eos=True)
    assert allowed(empty) == set(ENDINGS)


def test_filling_a_mask_twice_changes_nothing(backend: Backend):
    progress = progress_of(backend, ABS)
    assert allowed(progress) == allowed(progress)
    progress.accept(A)
    assert allowed(progress) == allowed(progress)


@pytest.mark.parametrize("split", range(4))
def test_a_replay_gives_what_the_steps_gave(backend: Backend, split: int):
    output = [A, B, B][:split]
    stepped = progress_of(backend, ABS)
    for token in output:
        stepped.accept(token)
    replayed = Progress(grammar_of(backend, ABS).grammar, width=9, endings=ENDINGS)
    replayed.replay(output)
    assert (allowed(replayed), replayed.complete) == (allowed(stepped), stepped.complete)


def test_it_begins_only_after_the_ids_that_it_waits_for(backend: Backend):
    progress = Progress(grammar_of(backend, ABS).grammar, width=9, endings=ENDINGS, begin_after=(A, B))
    progress.replay((A, A))
    assert len(allowed(progress)) == 9 * 32, "all ids, and the bits behind them"
    assert not progress.complete
    progress.accept(B)
    assert allowed(progress) == {A}


class Breaking:
    """A matcher that can do nothing."""

    may_end = False
    size = 0

    def fill(self, words: Words) -> None:
        raise MatcherBroken("a bound of its own")

    def accept(self, token: int) -> None:
        raise MatcherBroken("a bound of its own")

    def matcher(self) -> Breaking:
        return self


def test_a_matcher_that_breaks_allows_nothing_more():
    progress = Progress(Breaking(), width=9, endings=ENDINGS)
    progress.replay(())
    assert not progress.broken
    assert allowed(progress) == set()
    assert (progress.complete, progress.broken) == (False, "a bound of its own")
    taken = Progress(Breaking(), width=9, endings=ENDINGS)
    taken.accept(A)
    words = np.full(9, -1, np.int32)
    taken.fill(words)
    assert not words.any()
