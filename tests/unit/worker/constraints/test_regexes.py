"""What regular expressions mean and which are refused, through the masks of both backends."""

from __future__ import annotations

import re
import time

import pytest

from libs.constraints import Constraint, ConstraintKind
from libs.errors import ErrorCode, TokenloomError
from services.worker.constraints.base import Backend
from services.worker.constraints.expressions import check
from services.worker.constraints.regexes import read_regex
from tests.unit.worker.constraints.walking import matches, sentences

PATTERNS = (
    *(
        r"\d{3}-\d{2,4}",
        "^a|b$",
        r"[A-Z]\w+@[a-z]{2,}\.(?:com|org)",
        ".{3}",
        "[^x]{2}",
        r"\W\D\S",
        "a*?b+?",
        "(?P<x>ab|c)+",
        "",
        "[é-ü]😀?",
    ),
    *('"[^"]*"', "[^x]{2}", "[]a-c-]+", r"\x41\u00e9\n\.\/", "(ab?c){2,3}", "a{x}", r"\Aq{2}\Z", "((a+)+)+b", "[a-c]{0,3}(?:|x)"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_generated_matches_the_whole_pattern(backend: Backend, pattern: str):
    found = sentences(backend, Constraint(ConstraintKind.REGEX, (pattern,)), 6, longest=40)
    assert all(re.fullmatch(pattern, text) for text in found), found


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a|ab", "ab"),
        ("[a-z]*b", "abb"),
        ("(a|b)*a(a|b){3}", "abaaab"),
        (".*x.*", "ayxy"),
        ("[^a]", "é"),
        (r"\S+", "日本"),
        ("a{2,}", "aaaa"),
    ],
)
def test_no_text_of_the_language_is_lost(backend: Backend, pattern: str, text: str):
    constraint = Constraint(ConstraintKind.REGEX, (pattern,))
    assert matches(backend, constraint, text)
    assert not matches(backend, constraint, text + "\n!")


@pytest.mark.parametrize(
    ("pattern", "trouble"),
    [
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back reference"),
        (r"\bfoo", "word boundary"),
        ("a^b", "anchor inside"),
        ("(a$)b", "anchor inside"),
        ("(?i)a", "flags"),
        ("a*+", "possessive"),
        ("(?>a)", "atomic"),
        (r"\p{L}", "Unicode property"),
        ("[[:alpha:]]", "POSIX"),
        ("[a-", "class without its ]"),
        ("(a", "group without its )"),
        ("a)", "unmatched )"),
        ("*a", "repetition of nothing"),
        ("a**", "repetition of a repetition"),
        ("x{3,2}", "at least 3 and at most 2"),
        ("[z-a]", "range of characters"),
        ("a{1000000}", "asks for 1000000"),
        ("(a{1000}){1000}", "too big"),
        ("(" * 200 + "a" + ")" * 200, "nested more than"),
        (r"[^\x00-\U0010FFFF]", "no finite text"),
        ("a\\", "too early"),
        (r"\xZZ", "hexadecimal"),
    ],
)
def test_what_is_not_taken_is_refused_by_name_and_at_once(pattern: str, trouble: str):
    began = time.thread_time()
    with pytest.raises(TokenloomError, match=re.escape(trouble)) as caught:
        check(read_regex(pattern))
    assert caught.value.code is ErrorCode.INVALID_CONSTRAINT
    assert time.thread_time() - began < 1.0
