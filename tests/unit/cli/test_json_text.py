"""JSON of the commands: what a server could not read is refused before it is sent, in a sentence."""

from __future__ import annotations

import pytest

from cli.json_text import decode, encode


def test_what_is_sent_is_utf_8():
    assert encode({"a": "日本", "b": 0.5}) == '{"a":"日本","b":0.5}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), "\udcff", {"\ud800": 1}])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(ValueError, match="it holds"):
        encode([value])


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '"\\ud800"', "[" * 100_000, "{", b'"\xff"', "1" * 5000])
def test_what_could_not_be_sent_on_is_not_read(text):
    with pytest.raises(ValueError, match=r"."):
        decode(text)
