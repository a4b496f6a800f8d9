"""A trace's spans as a tree: who is whose child, in order of time, and where time passed that no child accounts for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from libs.telemetry.trace_store import StoredSpan


@dataclass(frozen=True, slots=True)
class SpanNode:
    """A span in its tree; a root's depth is 0."""

    span: StoredSpan
    depth: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Time within a parent that has children, in which none of them ran; Unix nanoseconds. `depth` is the children's."""

    parent_id: str
    start_ns: int
    end_ns: int
    depth: int


def whole_ns(spans: Sequence[StoredSpan]) -> tuple[int, int]:
    """Start and end of a trace in Unix nanoseconds: its root's, or, where several spans have no parent here, the outermost instants."""
    roots = _roots(spans)
    return min(span.start_ns for span in roots), max(span.end_ns for span in roots)


def build_tree(spans: Sequence[StoredSpan]) -> list[SpanNode | Gap]:
    """All spans depth first, siblings by start, with the gaps between them in their places.

    A span whose parent is not here (a remote caller's, or late) counts as a root.
    """
    roots = _roots(spans)
    root_ids = {span.span_id for span in roots}
    children: dict[str, list[StoredSpan]] = defaultdict(list)
    for span in spans:
        if span.span_id not in root_ids:
            children[span.parent_id].append(span)
    rows: list[SpanNode | Gap] = []
    for span in sorted(roots, key=_order):
        rows.extend(_walk(span, children))
    while children:  # circles of parents: no well-behaved exporter makes one, a client might; each is entered at its first span
        first = min((span for group in children.values() for span in group), key=_order)
        children[first.parent_id].remove(first)
        rows.extend(_walk(first, children))
    return rows


def _walk(root: StoredSpan, children: dict[str, list[StoredSpan]]) -> Iterator[SpanNode | Gap]:
    """The rows of `root` and all below it, taking them out of `children`."""
    stack: list[SpanNode | Gap] = [SpanNode(root, 0)]
    while stack:
        row = stack.pop()
        yield row
        if isinstance(row, SpanNode):
            below = sorted(children.pop(row.span.span_id, ()), key=_order)
            stack.extend(reversed(list(_with_gaps(row, below))))


def _with_gaps(parent: SpanNode, children: Sequence[StoredSpan]) -> Iterator[SpanNode | Gap]:
    depth, reached, end_ns = parent.depth + 1, parent.span.start_ns, parent.span.end_ns
    for span in children:
        if span.start_ns > reached:
            yield Gap(parent.span.span_id, reached, span.start_ns, depth)
        yield SpanNode(span, depth)
        reached = max(reached, span.end_ns)
    if children and end_ns > reached:
        yield Gap(parent.span.span_id, reached, end_ns, depth)


def _roots(spans: Sequence[StoredSpan]) -> list[StoredSpan]:
    present = {span.span_id for span in spans}
    return [span for span in spans if span.parent_id not in present or span.parent_id == span.span_id] or [min(spans, key=_order)]


def _order(span: StoredSpan) -> tuple[int, int, str]:
    return span.start_ns, -span.end_ns, span.span_id
