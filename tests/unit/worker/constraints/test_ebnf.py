"""EBNF and Lark grammars through the masks of both backends, and those that no finite text satisfies."""

from __future__ import annotations

import re

import pytest

from libs.constraints import Constraint, ConstraintKind
from libs.errors import TokenloomError
from services.worker.constraints.base import Backend
from services.worker.constraints.ebnf import is_ebnf
from tests.unit.worker.constraints.walking import matches, sentences

SUMS = 'root ::= sum # a sum\nsum ::= item (("+" | "-")\n  item)*\nitem ::= [0-9]+ | "(" sum ")"'


def grammar(text: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, (text,))


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (SUMS, "(1+22)-3", "(1"),
        ('root ::= "a" "bc" | "ab" "d"', "abc", "abcd"),
        ('root ::= [a-z]* "b"', "abb", "aba"),
        ('root ::= root "a" | "b"', "baa", "ab"),
        ('root ::= "x"{2,3} [^\\n]? "\\u00e9\\x41"', "xx!éA", "xéA"),
        ('root ::= w ("," w){1}\nw ::= "é" | "日" | ""', "é,日", "é"),
        ('start: "(" start ")" | "x"', "((x))", "(x"),
    ],
)
def test_a_grammar_allows_its_sentences_and_no_others(backend: Backend, text: str, inside: str, outside: str):
    assert matches(backend, grammar(text), inside)
    assert not matches(backend, grammar(text), outside)


def test_a_recursive_grammar_is_walked_to_its_end(backend: Backend):
    assert all(
        re.fullmatch(r"[0-9()+-]+", text) and eval(re.sub(r"\b0+(\d)", r"\1", text)) is not None
        for text in sentences(backend, grammar(SUMS), 4)
    )


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ('root ::= "a" root', "rule root needs itself"),
        ("root ::= a\na ::= b\nb ::= a", "rule b needs itself"),
        ("root ::= foo", "refers to foo"),
        ('foo ::= "a"', "no rule root"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined a second time"),
        ('root ::= "a', "line 1: a literal without its closing quote"),
        ('root ::= "a"\n  | $', "line 2"),
        ("root ::= [a", "a class without its ]"),
        ('root ::= ("a"', "a group without its )"),
        ('root ::= "a"{1000000}', "asks for 1000000"),
        ('start: "a" start', "start needs itself"),
        ('start: x\nx: start "q"', "start needs itself"),
        ("root ::= ", ""),
    ],
)
def test_a_grammar_that_makes_no_sense_is_refused_with_the_place(backend: Backend, text: str, trouble: str):
    if not trouble:
        assert sentences(backend, grammar(text), 1) == [""]
        return
    with pytest.raises(TokenloomError, match=re.escape(trouble)):
        matches(backend, grammar(text), "")


def test_ebnf_is_told_from_lark_by_how_rules_are_defined():
    assert is_ebnf("root ::= x")
    assert not is_ebnf("start: x")


@pytest.mark.parametrize("texts", [("yes", "no", "yes please"), ('q"u\\o', "é😀", "\n"), ("a", "ab", "abc")])
def test_a_choice_is_exactly_one_of_its_texts(backend: Backend, texts: tuple[str, ...]):
    constraint = Constraint(ConstraintKind.CHOICE, texts)
    assert set(sentences(backend, constraint, 6)) <= set(texts)
    assert all(matches(backend, constraint, text) for text in texts)
    assert not matches(backend, constraint, texts[0] + "!")
