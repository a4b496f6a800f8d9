"""Messages as they are typed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli.source import Source


def messages(text: str) -> list[str]:
    source = Source(Console(file=io.StringIO()), io.StringIO(text))
    return list(iter(source.message, None))


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ('"""one line"""\nnext\n', ["one line", "next"]),
        ('"""begins here\nends here"""\nnext\n', ["begins here\nends here", "next"]),
        ('  """\n  indented\n\n"""  \nnext\n', ["  indented\n", "next"]),
        ('"""\na "quoted" b\n"""\n', ['a "quoted" b']),
        ('"""a """ b\n"""\n', ['a """ b']),
        ('""""""\nnext\n', ["", "next"]),
        ('"""\nnever closed\n', ["never closed"]),
        ('"""never closed', ["never closed"]),
        ("a \\\nb\\\n", ["a \nb"]),
    ],
)
def test_three_quotes_begin_and_end_a_message_wherever_they_stand(typed, read):
    assert messages(typed) == read
