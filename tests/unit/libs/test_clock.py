import time

from libs.clock import ManualClock, SystemClock


def test_the_system_clock_never_runs_backwards_and_agrees_with_the_wall():
    clock = SystemClock()
    before = time.time_ns()
    readings = [clock.unix_ns() for _ in range(1000)]
    assert readings == sorted(readings)
    assert abs(readings[0] - before) < 1_000_000_000


def test_both_faces_of_the_system_clock_advance_together():
    clock = SystemClock()
    monotonic, unix = clock.monotonic_ns(), clock.unix_ns()
    assert 0 <= (clock.unix_ns() - unix) - (clock.monotonic_ns() - monotonic) + 50_000_000 < 100_000_000


def test_a_manual_clock_moves_only_when_told():
    clock = ManualClock()
    first = clock.monotonic_ns(), clock.unix_ns()
    assert (clock.monotonic_ns(), clock.unix_ns()) == first
