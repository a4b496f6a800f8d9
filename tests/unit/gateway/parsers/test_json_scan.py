import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.parsers.json_scan import MAX_DEPTH, JsonScanner
from tests.unit.gateway.parsers.texts import VALUES, cuts, dumped, mutated


def scan(pieces):
    """What a scanner took of the pieces, and whether it was done, failed or neither."""
    scanner, taken = JsonScanner(), []
    for piece in pieces:
        if scanner.feed(piece, 0, taken) < len(piece):
            break
    return "".join(taken), scanner.done, scanner.failed


def is_json(text):
    try:
        json.loads(text, strict=False, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_finds_the_end_of_what_json_holds_wherever_the_text_is_cut(data):
    written = data.draw(dumped([data.draw(VALUES)]))
    assert scan(data.draw(cuts(written + data.draw(st.sampled_from(["", " ", "]", "x"]))))) == (written, True, False)


@settings(max_examples=150, deadline=None)
@example(text="[1.]")
@example(text="[01]")
@example(text='["\\x"]')
@example(text="[-]")
@example(text="[1e5, 1E+5, -0.0e-0]")
@example(text="[,1]")
@example(text='{"a":1,}')
@example(text="{1:1}")
@example(text="[NaN]")
@given(text=VALUES.flatmap(lambda value: dumped([value])).flatmap(mutated))
def test_what_it_calls_done_is_json_and_what_it_calls_failed_begins_no_json(text):
    taken, done, failed = scan([text])
    if done:
        assert is_json(taken)
    elif is_json(text):
        assert text.strip()[0] in "-0123456789"  # a number at the top is open to the end
    if failed:
        assert not is_json(text)


def test_control_characters_within_strings_come_out_escaped():
    taken, done, _ = scan(['{"a\nb": "\t', '\x00"}'])
    assert done
    assert taken == '{"a\\u000ab": "\\u0009\\u0000"}'
    assert json.loads(taken) == {"a\nb": "\t\x00"}


@pytest.mark.parametrize("text", ['{"a\\\n": 1}', "[1\x00]", '{"a": tru e}', '["\\ud83"]', "[1 2]", '{"a" 1}', "]", "{]", "[}", "nul"])
def test_what_is_no_json_fails_at_the_character_that_breaks_it(text):
    taken, done, failed = scan([text])
    assert not done
    assert failed or text == "nul"
    assert len(taken) < len(text) or text == "nul"


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "1e5", "-0.1E+10"])
def test_a_number_at_the_top_ends_with_what_follows_it(number):
    assert scan([number]) == (number, False, False)
    assert scan([number, ","]) == (number, True, False)


def test_nesting_is_bounded():
    allowed = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert scan([allowed]) == (allowed, True, False)
    taken, _, failed = scan(["[" * 100_000])
    assert failed
    assert taken == "[" * MAX_DEPTH


@pytest.mark.parametrize(
    "fragments",
    [
        ["[", '"', r"\ud83d\ude00", '"', "]"],
        ["{", '"', r"\ud83d\ude00", '"', ":", '"', r"\\", "u", "d", "e", r"\u00e9", r"\n", '"', "}"],
        ["[", '"', r"\ud83d", r"\ud83d\ude00", r"\ud83dx", r"\ude00", '"', "]"],
        ["[", '"', r"\ud83d" + '"', ",", '"', r"\ud83d\n", '"', "]"],
    ],
)
def test_an_escape_comes_whole_and_the_two_of_a_surrogate_pair_together(fragments):
    scanner, found = JsonScanner(), []
    for character in "".join(fragments):
        taken: list[str] = []
        scanner.feed(character, 0, taken)
        found += filter(None, ["".join(taken)])
    assert found == fragments
    assert scanner.done


@pytest.mark.parametrize("text", ['["\\ud83d\\x', '["\\x', '["\\ud83g', '["\\ud83d\\ud8x'])
def test_where_an_escape_is_wrong_all_that_was_right_comes(text):
    assert scan(text) == scan([text]) == (text[:-1], False, True)
