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
    children: dict[str, list[StoredSpan]] = defaultdict(list)
    roots = _roots(spans)
    root_ids = {span.span_id for span in roots}
    for span in spans:
        if span.span_id not in root_ids:
            children[span.parent_id].append(span)
    rows: list[SpanNode | Gap] = []
    stack: list[SpanNode | Gap] = [SpanNode(span, 0) for span in sorted(roots, key=_order, reverse=True)]
    while stack:
        row = stack.pop()
        rows.append(row)
        if isinstance(row, SpanNode):
            below = list(_with_gaps(row, sorted(children.pop(row.span.span_id, ()), key=_order)))
            stack.extend(reversed(below))
    return rows


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
    roots = [span for span in spans if span.parent_id not in present or span.parent_id == span.span_id]
    return roots or [min(spans, key=_order)]  # a circle of parents: no well-behaved exporter makes one, a client might


def _order(span: StoredSpan) -> tuple[int, int, str]:
    return span.start_ns, -span.end_ns, span.span_id
