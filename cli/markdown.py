"""Markdown of a model for the screen: what only looks like markup is text, and what a terminal cannot draw is shown as it was written.

A browser hides HTML that it does not know, the addresses of links and definitions of references, and it joins lines. On a terminal nothing
would tell that they were there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.table import Table
from rich.text import Text

# Columns of a table that each column needs: a letter and what is between it and the next.
_LEAST_COLUMN = 4


class _Parser(MarkdownIt):
    """Addresses stay as they were written."""

    def normalizeLink(self, url: str) -> str:
        """See MarkdownIt."""
        return url


# Not `reference`: its lines vanish; and answers are drawn block by block, where no reference would find its definition anyway.
# Not `autolink`: to it vector<std::string> is an address.
_PARSER = _Parser("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(["reference", "autolink"])


class _Table(TableElement):
    """A table whose cells break anywhere rather than lose their ends; rows of text where it has more columns than find room."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            if not isinstance(table, Table) or len(table.columns) * _LEAST_COLUMN <= options.max_width:
                for column in table.columns if isinstance(table, Table) else ():
                    column.overflow = "fold"
                yield table
                continue
            rows = [self.header.row] if self.header is not None and self.header.row is not None else []
            for row in [*rows, *(self.body.rows if self.body is not None else [])]:
                yield Text(" | ").join(cell.content for cell in row.cells)


class ShownMarkdown(Markdown):
    """Draws text with all its characters but those that are markup, its lines as lines."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _Table}

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.markup = text
        self.parsed = list(_shown(_PARSER.parse(text), text.split("\n")))


def _shown(tokens: Iterable[Token], lines: list[str]) -> Iterator[Token]:
    """The tokens of all blocks; a table of which the parser would drop cells as code."""
    dropped = False
    for token in tokens:
        if token.type == "table_open" and token.map is not None:
            rows = lines[slice(*token.map)]
            dropped = any(_count_cells(row) > _count_cells(rows[0]) for row in rows[2:])
            if dropped:
                yield Token("code_block", "code", 0, content="\n".join(rows) + "\n", block=True)
        if not dropped:
            token.children = list(_shown_inline(token.children)) if token.children else token.children
            yield token
        dropped = dropped and token.type != "table_close"


def _count_cells(row: str) -> int:
    return row.strip().replace("\\|", "").removeprefix("|").removesuffix("|").count("|")


def _shown_inline(tokens: Iterable[Token]) -> Iterator[Token]:
    """The tokens of a text: its lines end where they were ended, addresses stand behind what they are of."""
    for token in tokens:
        if token.type == "softbreak":
            yield Token("hardbreak", "br", 0)
        elif token.type == "image":
            yield _text(f"![{token.content}]({_address(token, 'src')})")
        elif token.type == "link_open":
            yield _text("[")
            addresses = _address(token, "href")
        elif token.type == "link_close":
            yield _text(f"]({addresses})")
        else:
            yield token


def _address(token: Token, name: str) -> str:
    title = token.attrs.get("title")
    return f'{token.attrs.get(name, "")} "{title}"' if title else str(token.attrs.get(name, ""))


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)
