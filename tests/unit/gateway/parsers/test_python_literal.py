import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.parsers.python_literal import PythonLiteral
from tests.unit.gateway.parsers.texts import VALUES, cuts, mutated


def convert(pieces):
    """The JSON of a literal that a `)` follows; None when it is none."""
    literal, taken, rest = PythonLiteral(), [], ""
    for piece in [*pieces, ")"]:
        at = 0 if rest else literal.feed(piece, 0, taken)
        rest += piece[at:]
    return "".join(taken) if literal.done and rest.lstrip() == ")" else None


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_python_writes_becomes_the_same_in_json(data):
    value = data.draw(VALUES)
    assert json.loads(convert(data.draw(cuts(repr(value))))) == value


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_taken_means_what_it_means_to_python(data):
    text = data.draw(mutated(repr(data.draw(VALUES))))
    made = convert([text])
    assert convert(text) == made
    if made is None:
        return
    try:
        meant = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return  # what only JSON knows (null), newlines in strings, what stands behind the literal
    assert json.loads(made) == json.loads(json.dumps(meant))


@pytest.mark.parametrize(
    ("literal", "meant"),
    [
        ("'it\\'s'", "it's"),
        ('"say \\"hi\\""', 'say "hi"'),
        ("'''a 'b' \"c\" '''", "a 'b' \"c\" "),
        ('""', ""),
        ('"""a""b"""', 'a""b'),
        (r"'\x41\u00e9\U0001f600\N{BULLET}\7\101\1234\d\\'", "Aé😀•\x07AS4\\d\\"),
        ("'a\\\nb'", "ab"),
        ("'a\nb'", "a\nb"),
        (r"'\ud83d\ude00'", "😀"),
        ("+1", 1),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0b101", 5),
        ("0o17", 15),
        (".5", 0.5),
        ("1.", 1.0),
        ("1e5", 1e5),
        ("12345678901234567890123", 12345678901234567890123),
        ("[1, 2,]", [1, 2]),
        ("{'a': {}, }", {"a": {}}),
        ("[ ]", []),
        ("[None, True, False, null, true, false]", [None, True, False, None, True, False]),
    ],
)
def test_literals(literal, meant):
    assert json.loads(convert([literal])) == meant
    assert convert(literal) == convert([literal])


@pytest.mark.parametrize(
    "text",
    ["1+1", "--1", "f(1)", "(1, 2)", "[,]", "[1,,2]", "{1: 2}", "{'a'}", "{'a': 1, 'b'}", "x", "b'a'", "r'a'", "'a' 'b'x",
     "1_0e999", "007", "1__0", "'\\xg0'", "'\\U00110000'", "'\\N{no such character}'", "'\\Nx'", "[1}", "]", ":", "1j", "٣",
     "-" * 100_000, "1" * 100_000, "[" * 100_000],
)  # fmt: skip
def test_what_is_no_literal_or_none_of_jsons_values_is_refused(text):
    assert convert([text]) is None
    assert convert(text) is None


def test_what_is_complete_is_given_at_once_and_what_is_not_is_held():
    literal, taken = PythonLiteral(), []
    literal.feed("{'a': [\"ein Text", 0, taken)
    assert "".join(taken) == '{"a": ["ein Text'
    literal.feed(" \\u00", 0, taken)
    assert "".join(taken) == '{"a": ["ein Text '
    assert literal.held == "\\u00"
    literal.feed('e9", 12', 0, taken)
    assert "".join(taken) == '{"a": ["ein Text é"'
    literal.finish(taken)
    assert "".join(taken) == '{"a": ["ein Text é", 12'
