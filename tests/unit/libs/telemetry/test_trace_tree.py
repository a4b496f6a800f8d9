from hypothesis import given
from hypothesis import strategies as st

from libs.telemetry.trace_store import StoredSpan
from libs.telemetry.trace_tree import Gap, SpanNode, build_tree, whole_ns


def span(number, parent, start, end, name="stage"):
    parent_id = f"{parent:016x}" if parent else ""
    return StoredSpan("1" * 32, f"{number:016x}", parent_id, name, "tokenloom-gateway", start, end)


SPANS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=8).map(
    lambda rows: [span(number, parent, start, start + took) for number, (parent, start, took) in enumerate(rows, 1)]
)


def names(rows):
    return [(row.span.name, row.depth) if isinstance(row, SpanNode) else ("gap", row.start_ns, row.end_ns) for row in rows]


def test_children_follow_their_parent_by_start_and_gaps_stand_between_them():
    spans = [span(1, 0, 0, 100, "root"), span(3, 1, 60, 90, "decode"), span(2, 1, 0, 50, "queue"), span(4, 3, 60, 90, "worker")]
    assert names(build_tree(spans)) == [("root", 0), ("queue", 1), ("gap", 50, 60), ("decode", 1), ("worker", 2), ("gap", 90, 100)]


def test_overlapping_children_leave_no_gap():
    spans = [span(1, 0, 0, 100), span(2, 1, 0, 80), span(3, 1, 10, 30), span(4, 1, 80, 100)]
    assert not [row for row in build_tree(spans) if isinstance(row, Gap)]


def test_a_span_without_children_has_no_gaps_of_its_own():
    assert names(build_tree([span(1, 0, 0, 100, "root")])) == [("root", 0)]


def test_a_span_whose_parent_is_elsewhere_is_a_root():
    spans = [span(1, 77, 10, 20, "remote child"), span(2, 1, 10, 20, "inner")]
    assert names(build_tree(spans)) == [("remote child", 0), ("inner", 1)]
    assert whole_ns(spans) == (10, 20)


@given(SPANS)
def test_no_span_is_lost_or_shown_twice_even_when_parents_form_a_circle(spans):
    shown = [row.span.span_id for row in build_tree(spans) if isinstance(row, SpanNode)]
    assert sorted(shown) == sorted(one.span_id for one in spans)


@given(SPANS)
def test_gaps_lie_within_their_parent_and_take_time(spans):
    known = {one.span_id: one for one in spans}
    for row in build_tree(spans):
        if isinstance(row, Gap):
            parent = known[row.parent_id]
            assert parent.start_ns <= row.start_ns < row.end_ns
            assert row.start_ns >= parent.start_ns
