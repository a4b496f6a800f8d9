"""A schema as a grammar that xgrammar compiles: the library's own, with our ranges of numbers and our white space in it."""

from __future__ import annotations

import json
import re
from typing import Any

import xgrammar

from services.worker.constraints.expressions import RuleSet
from services.worker.constraints.numbers import Span, expression_of
from services.worker.constraints.spelling import ebnf_of

# How many blanks the library is asked for, which tells its white space from other rules; what they are is written below.
_COUNT = 8
_WHITE_SPACE = re.compile(rf"\bwhitespace(?:_\d+)?\{{0, {_COUNT}\}}")
_WHITE_SPACE_RULE = re.compile(r"^whitespace(?:_\d+)? ::= .*\n", re.MULTILINE)
# As llguidance's WHITE_SPACE.
_BLANKS = r"""
white_space_blank ::= [ \t]
white_space_end ::= "" | "\r"
white_space ::= white_space_blank{0,4} | (white_space_end "\n" white_space_blank{0,16})
"""


def json_grammar(schema: dict[str, Any], *, compact: bool) -> str:
    """EBNF for what `for_xgrammar` returned. Raises RuntimeError where the library refuses the schema."""
    spans: dict[str, Span] = {}
    prefix = _unused(json.dumps(schema, default=str))

    def mark(span: Any) -> str:
        name = f"{prefix}{len(spans)}e"
        spans[name] = span
        return name

    text = json.dumps(schema, default=mark)
    spaces = {"any_whitespace": False, "separators": (",", ":")} if compact else {"max_whitespace_cnt": _COUNT}
    grammar = str(xgrammar.Grammar.from_json_schema(text, strict_mode=False, **spaces))
    if not compact:
        grammar = _WHITE_SPACE_RULE.sub("", _WHITE_SPACE.sub("white_space", grammar)) + _BLANKS
    for index, (name, span) in enumerate(spans.items()):
        grammar = grammar.replace(rf'"\"{name}\""', f"bounded_{index}")
        rule = ebnf_of(RuleSet({"root": expression_of(span)})).removeprefix("root ::= ")
        grammar += f"\nbounded_{index} ::= {rule}\n"
    if prefix in grammar:
        raise RuntimeError("the library wrote a range of numbers in another form than expected")
    return grammar


def _unused(text: str) -> str:
    """The beginning of names that a text does not hold."""
    prefix = "span"
    while prefix in text:
        prefix += "x"
    return prefix
