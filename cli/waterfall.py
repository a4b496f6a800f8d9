"""A trace as a waterfall for the terminal: one row per span with its place in the whole, gaps between stages, and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libs.telemetry.trace_store import StoredSpan
from libs.telemetry.trace_tree import Gap, SpanNode, build_tree, whole_ns

# A gap is shown when it is this much of the whole, or this long (ns): smaller ones are the clocks' own grain.
_GAP_SHARE, _GAP_NS = 0.01, 1_000_000
_MAX_EVENTS = 12
# Columns: the longest name shown, the shortest bar, and what service, at, took, share and all padding need ("scheduler", "359.31 ms").
_MAX_NAME, _MIN_BAR, _FIXED = 44, 8, 9 + 9 + 9 + 6 + 6 * 2
_COLOURS = {"gateway": "blue", "tokenizer": "cyan", "scheduler": "yellow", "worker": "green"}
# The narrowest bar's column in which details are read with ease.
_DETAILS = 36
_EIGHTHS = "▏▎▍▌▋▊▉█"
# Attributes of a span that say why it took so long, by its last name; shown below its bar where they say something.
_TELLING: Mapping[str, Sequence[str]] = {
    "Encode": ("attempt", "queue_us", "encode_us", "prompt_tokens"),
    "queue": ("wait_reason", "prompt_tokens"),
    "prefill": ("cached_tokens", "chunks"),
    "decode": ("output_tokens", "steps", "preemptions", "device_time_us", "finish_reason"),
    "worker.prefill": ("steps", "tokens", "device_time_us"),
    "worker.decode": ("steps", "tokens", "device_time_us"),
}
_EMPTY = (None, "", 0, "none")


def render(spans: Sequence[StoredSpan], width: int) -> RenderableType:
    """The waterfall of one trace, for a terminal `width` columns wide."""
    start_ns, end_ns = whole_ns(spans)
    whole = max(end_ns - start_ns, 1)
    rows, titles = build_tree(spans), _titles(spans)
    longest = max(2 * row.depth + _longest(row.span, titles) for row in rows if isinstance(row, SpanNode))
    name = min(longest, _MAX_NAME, width - _FIXED - _MIN_BAR)
    bar = max(width - _FIXED - name, _MIN_BAR)
    sheet = _Sheet(name=max(name, 4), bar=bar)
    for row in rows:
        if isinstance(row, SpanNode):
            _add_span(sheet, row, titles[row.span.span_id], start_ns, whole)
        else:
            _add_gap(sheet, row, start_ns, whole)
    return Group(_heading(spans, whole), *sheet.parts)


class _Sheet:
    """The rows, in one table; in a narrow terminal in several, between which details have the whole width to themselves."""

    def __init__(self, *, name: int, bar: int) -> None:
        self._name, self.bar = name, bar
        self.parts: list[RenderableType] = [self._table(header=True)]

    def _table(self, *, header: bool) -> Table:
        table = Table(box=None, padding=(0, 1), expand=False, show_header=header)
        for title, justify, width in (("span", "left", self._name), ("service", "left", 9), ("at", "right", 9), ("took", "right", 9)):
            table.add_column(title, justify=justify, no_wrap=True, width=width)  # type: ignore[arg-type]
        table.add_column("share", justify="right", no_wrap=True, width=6)
        table.add_column("", width=self.bar, overflow="fold")  # of an event's details nothing is left out
        return table

    def add(self, *cells: Text | str) -> None:
        """A row of span, service, at, took, share, and what stands in the bar's column."""
        if not isinstance(self.parts[-1], Table):
            self.parts.append(self._table(header=False))
        assert isinstance(self.parts[-1], Table), "the line above"
        self.parts[-1].add_row(*cells)

    def add_details(self, details: str, indent: int, cells: Sequence[str] = ("", "", "", "", "")) -> None:
        """Details beside `cells` in the bar's column, or below them where that is narrow."""
        beside = self.bar >= _DETAILS
        if beside or any(cells):
            self.add(*(Text(cell, style="dim") for cell in (*cells, details if beside else "")))
        if not beside and details:
            self.parts.append(Padding(Text(details, style="dim"), (0, 1, 0, indent + 1)))


def _heading(spans: Sequence[StoredSpan], whole: int) -> Text:
    names = sorted({name for span in spans for name in span.request_ids()})
    text = Text.assemble(("trace ", "dim"), (spans[0].trace_id, "bold"), f"  {duration(whole)}")
    if names:
        text.append(f"\n{'  '.join(names)}", style="dim")
    return text


def _titles(spans: Sequence[StoredSpan]) -> dict[str, str]:
    """By span id, the span's name; where the request has several choices, with the number of its own: `decode [2]`."""
    listed = (span.attributes.get("tokenloom.request_id") for span in spans)
    numbers = {name: number for ids in listed if isinstance(ids, list) for number, name in enumerate(ids)}
    titles: dict[str, str] = {}
    for span in spans:
        choice = numbers.get(_request_of(span), span.attributes.get("tokenloom.choice")) if numbers else None
        name = span.name.rpartition(".")[2] if "rpc.method" in span.attributes else span.name  # of package.Service/Method the last two
        titles[span.span_id] = name if choice is None else f"{name} [{choice}]"
    return titles


def _request_of(span: StoredSpan) -> str:
    """The internal id of the one choice that a span is about; "" where it is about none or several."""
    name = span.attributes.get("tokenloom.request_id")
    return name if isinstance(name, str) else ""


def _longest(span: StoredSpan, titles: dict[str, str]) -> int:
    return max(len(titles[span.span_id]), *(len(f"  · {event.name}") for event in span.events), 0)


def _add_span(sheet: _Sheet, node: SpanNode, title: str, start_ns: int, whole: int) -> None:
    span, indent, service = node.span, "  " * node.depth, node.span.service.removeprefix("tokenloom-")
    colour = _COLOURS.get(service, "white")
    took = span.end_ns - span.start_ns
    sheet.add(
        Text(indent + title, style="bold red" if span.error is not None else ""),
        Text(service, style=colour),
        duration(span.start_ns - start_ns),
        duration(took),
        f"{took / whole:.1%}",
        Text(_bar((span.start_ns - start_ns) / whole, took / whole, sheet.bar), style=colour),
    )
    if details := _details(span):
        sheet.add_details(details, len(indent) + 2)
    if span.error is not None:
        sheet.parts.append(Padding(Text(f"error: {span.error}", style="red"), (0, 1, 0, len(indent) + 3)))
    for event in span.events[:_MAX_EVENTS]:
        details = " ".join(f"{key.removeprefix('tokenloom.')}={value}" for key, value in event.attributes.items())
        sheet.add_details(details, len(indent) + 4, (f"{indent}  · {event.name}", "", duration(event.unix_ns - start_ns), "", ""))
    if len(span.events) > _MAX_EVENTS:
        sheet.add(Text(f"{indent}  · {len(span.events) - _MAX_EVENTS} more events (--json)", style="dim"))


def _details(span: StoredSpan) -> str:
    """The telling attributes in words; of a call its status too, where that is not OK."""
    names = _TELLING.get(span.name.rpartition("/")[2], ())
    found = {name: span.attributes.get(f"tokenloom.{name}") for name in names}
    status = span.attributes.get("rpc.response.status_code", "OK")
    return " ".join([*(f"{name}={value}" for name, value in found.items() if value not in _EMPTY), *([status] if status != "OK" else [])])


def _add_gap(sheet: _Sheet, gap: Gap, start_ns: int, whole: int) -> None:
    took = gap.end_ns - gap.start_ns
    if took >= _GAP_NS or took >= _GAP_SHARE * whole:
        cells = (f"{'  ' * gap.depth}(gap)", "", duration(gap.start_ns - start_ns), duration(took), f"{took / whole:.1%}", "")
        sheet.add(*(Text(cell, style="dim italic") for cell in cells))


def _bar(offset: float, share: float, width: int) -> str:
    """A bar over `width` columns that begins at `offset` and covers `share` of the whole (both 0..1), at least a hair wide."""
    begin = min(max(offset, 0.0), 1.0) * width
    length = max(min(share, 1.0) * width, 0.125)
    full, rest = divmod(round(min(length, width - int(begin)) * 8), 8)
    return " " * min(int(begin), width - 1) + "█" * full + (_EIGHTHS[rest - 1] if rest else "")


def duration(nanoseconds: float) -> str:
    """A duration in the unit that reads best: µs, ms or s."""
    magnitude = abs(nanoseconds)
    if magnitude < 1_000_000:
        return f"{nanoseconds / 1000:.0f} µs"
    return f"{nanoseconds / 1_000_000:.2f} ms" if magnitude < 1_000_000_000 else f"{nanoseconds / 1_000_000_000:.2f} s"
