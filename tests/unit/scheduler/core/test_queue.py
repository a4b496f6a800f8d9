"""The waiting queue: order of arrival, whatever happened in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.queue import WaitingQueue
from services.scheduler.core.request import Request
from tests.support.core import make_request, make_state


def requests(count: int) -> list[Request]:
    state = make_state()
    return [make_request(state, [1]) for _ in range(count)]


def test_the_first_to_arrive_is_next():
    queue = WaitingQueue()
    first, second = requests(2)
    queue.push(second)
    queue.push(first)
    assert queue.pop() is first
    assert queue.pop() is second


def test_a_request_that_comes_back_takes_the_place_of_its_arrival():
    queue = WaitingQueue()
    first, second, third = requests(3)
    for request in (first, second, third):
        queue.push(request)
    assert queue.pop() is first
    queue.push(first)
    assert queue.peek() is first


def test_a_removed_request_is_skipped_wherever_it_stands():
    queue = WaitingQueue()
    first, second, third = requests(3)
    for request in (first, second, third):
        queue.push(request)
    queue.remove(second)
    assert second not in queue
    assert [queue.pop(), queue.pop()] == [first, third]


def test_a_request_removed_and_pushed_again_is_there_once():
    queue = WaitingQueue()
    (only,) = requests(1)
    for _ in range(3):
        queue.push(only)
        queue.remove(only)
    queue.push(only)
    assert len(queue) == 1
    assert queue.pop() is only
    assert queue.peek() is None


def test_an_empty_queue_has_no_next():
    assert WaitingQueue().peek() is None
    with pytest.raises(IndexError):
        WaitingQueue().pop()


def test_removing_a_stranger_is_a_bug():
    with pytest.raises(KeyError):
        WaitingQueue().remove(requests(1)[0])


def test_those_who_came_and_left_behind_one_who_waits_do_not_pile_up():
    queue = WaitingQueue()
    state = make_state()
    first = make_request(state, [1])
    queue.push(first)
    for _ in range(1000):
        request = make_request(state, [1])
        queue.push(request)
        queue.remove(request)
        assert len(queue._heap) < 100
    assert queue.pop() is first


def test_a_parked_request_does_not_come_up_until_it_is_pushed():
    queue = WaitingQueue()
    first, second = requests(2)
    queue.push(first)
    queue.push(second)
    queue.park(first)
    assert (queue.is_parked(first), queue.is_parked(second), queue.peek()) == (True, False, second)
    queue.push(first)
    assert queue.peek() is first


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "pop"]), st.integers(0, 7))))
def test_it_behaves_as_a_sorted_list(moves: list[tuple[str, int]]):
    everyone, queue, model = requests(8), WaitingQueue(), set[int]()
    for move, number in moves:
        if move == "push" and number not in model:
            queue.push(everyone[number])
            model.add(number)
        elif move == "remove" and number in model:
            queue.remove(everyone[number])
            model.discard(number)
        elif move == "pop" and model:
            assert queue.pop() is everyone[min(model)]
            model.discard(min(model))
        assert len(queue) == len(model)
        assert queue.peek() is (everyone[min(model)] if model else None)
        assert {request.arrival - 1 for request in queue} == model
