"""What the compiler's process refuses, and what it tries first."""

from __future__ import annotations

import json

import pytest

from libs.constraints import Constraint, ConstraintKind
from libs.errors import ErrorCode, TokenloomError
from services.worker.constraints.base import Backend, Grammar, Matcher, MatcherBroken, Words
from services.worker.constraints.compiler_process import compile_one
from services.worker.constraints.probe import probe
from tests.unit.worker.constraints.walking import allowed, progress_of

REGEX = Constraint(ConstraintKind.REGEX, ("a",)).to_proto().SerializeToString()


class Breaking:
    """A backend whose library breaks."""

    name, vocab_size, endings = "breaking", 8, (0,)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def compile(self, constraint: Constraint) -> bytes:
        raise self._error

    def load(self, compiled: bytes) -> Grammar:
        raise AssertionError("nothing was compiled")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("std::bad_alloc"), TokenloomError(ErrorCode.INVALID_CONSTRAINT, "bad_alloc")]
)
def test_what_takes_too_much_memory_is_the_constraints_fault(error: Exception):
    with pytest.raises(TokenloomError, match="took too much memory") as caught:
        compile_one(Breaking(error), REGEX)
    assert caught.value.code is ErrorCode.INVALID_CONSTRAINT


def test_what_breaks_otherwise_is_not():
    with pytest.raises(RuntimeError, match="no idea"):
        compile_one(Breaking(RuntimeError("no idea")), REGEX)


class Branching(Grammar):
    """Ids 1 .. 4 may begin; only behind id 4 and another does the mask break. Behind id 1 the output may end at once."""

    size = 1

    def __init__(self) -> None:
        self.paths: list[list[int]] = []

    def matcher(self) -> Matcher:
        self.paths.append([])
        return BranchingMatcher(self.paths[-1])


class BranchingMatcher(Matcher):
    def __init__(self, path: list[int]) -> None:
        self._path = path

    def fill(self, words: Words) -> None:
        if len(self._path) > 1 and self._path[0] == 4:
            raise MatcherBroken("too wide")
        words[:] = 0b11110

    def accept(self, token: int) -> None:
        self._path.append(token)

    @property
    def may_end(self) -> bool:
        return self._path == [1]


def test_walks_begin_with_different_ids_and_with_those_after_which_the_output_goes_on():
    with pytest.raises(TokenloomError, match="cannot be kept to after 2 tokens: too wide"):
        probe(Branching(), 8, (0,))


def wide(properties: int) -> Constraint:
    names = {f"p{index}": {"type": "boolean"} for index in range(properties)}
    return Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps({"type": "object", "properties": names, "additionalProperties": False}),))


def test_an_object_of_a_thousand_optional_properties_can_be_begun(llguidance: Backend):
    progress = progress_of(llguidance, wide(1000))
    for byte in b'{"p1':
        assert 3 + byte in allowed(progress)
        progress.accept(3 + byte)
    assert {3 + byte for byte in b'0123456789"'} <= allowed(progress)


def test_an_object_that_is_too_wide_is_refused_before_it_is_used(llguidance: Backend):
    with pytest.raises(TokenloomError, match="too many alternatives may come next"):
        progress_of(llguidance, wide(1600))
