"""Which values of a program share memory: a value's place is free for another once its last reader has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.worker.ops.recording import Instruction, Rows, Value

# The result's place: memory of whoever runs the program. A value that is the result lives there from the start.
OUTPUT = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Memory of one row of `width` floats per token (or per sampled token)."""

    rows: Rows
    width: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All places, the first of them the result's, and each value's index among them."""

    places: tuple[Place, ...]
    place_of: Mapping[Value, int]


def plan_places(instructions: Sequence[Instruction], result: Value) -> Plan:
    """Gives every value a place. No instruction writes where it reads, and no value is overwritten before its last reader has run."""
    places, place_of = [Place(result.rows, result.width)], {result: OUTPUT}
    last_use = {value: index for index, item in enumerate(instructions) for value in (*item.writes, *item.reads)}
    free: list[int] = []
    for index, item in enumerate(instructions):
        for value in item.writes:
            if value is not result:
                place_of[value] = _take(places, free, value)
        ending = {value for value in (*item.reads, *item.writes) if last_use[value] == index}
        free += [place_of[value] for value in ending if value is not result]
    return Plan(tuple(places), place_of)


def _take(places: list[Place], free: list[int], value: Value) -> int:
    """A free place of the value's rows, the narrowest that is wide enough, else the widest made wider; else a new one."""
    fitting = [index for index in free if places[index].rows is value.rows]
    if not fitting:
        places.append(Place(value.rows, value.width))
        return len(places) - 1
    wide = [index for index in fitting if places[index].width >= value.width]
    chosen = min(wide, key=lambda index: places[index].width) if wide else max(fitting, key=lambda index: places[index].width)
    places[chosen] = Place(value.rows, max(places[chosen].width, value.width))
    free.remove(chosen)
    return chosen
