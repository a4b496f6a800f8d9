"""Values share memory only where their lives do not overlap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.ops.places import OUTPUT, plan_places
from services.worker.ops.recording import Instruction, Kind, Rows, Value


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Instruction], Value]:
    """Instructions that read any value made before them; the result is any value."""
    instructions = [Instruction(Kind.EMBEDDING, Value(Rows.TOKENS, draw(st.integers(1, 9))))]
    made = [instructions[0].to]
    for _ in range(draw(st.integers(0, 25))):
        source, residual = (made[draw(st.integers(0, len(made) - 1))] for _ in range(2))
        to = Value(draw(st.sampled_from(Rows)), draw(st.integers(1, 9)))
        instructions.append(Instruction(Kind.LINEAR, to, source=source, residual=residual if draw(st.booleans()) else None))
        made += instructions[-1].writes
    return instructions, made[draw(st.integers(0, len(made) - 1))]


@given(programs())
def test_every_reader_finds_what_was_written_for_it(program: tuple[list[Instruction], Value]):
    """Runs the program on places that remember which value was written last."""
    instructions, result = program
    plan = plan_places(instructions, result)
    holds: dict[int, Value] = {}
    for item in instructions:
        for value in item.reads:
            assert holds[plan.place_of[value]] is value
        assert not {plan.place_of[value] for value in item.writes} & {plan.place_of[value] for value in item.reads}
        assert len({plan.place_of[value] for value in item.writes}) == len(item.writes)
        for value in item.writes:
            place = plan.places[plan.place_of[value]]
            assert place.width >= value.width
            assert place.rows is value.rows
            holds[plan.place_of[value]] = value
    assert plan.place_of[result] == OUTPUT
    assert holds[OUTPUT] is result


def test_a_chain_needs_two_places_however_long_it_is():
    first = Instruction(Kind.EMBEDDING, Value(Rows.TOKENS, 8))
    chain = [first]
    for width in (4, 16, 8) * 10:
        chain.append(Instruction(Kind.LINEAR, Value(Rows.TOKENS, width), source=chain[-1].to))
    last = Instruction(Kind.GATHER, Value(Rows.SAMPLED, 8), source=chain[-1].to)
    plan = plan_places([*chain, last], last.to)
    assert len(plan.places) == 3
    assert sorted(place.width for place in plan.places[1:]) == [16, 16]
