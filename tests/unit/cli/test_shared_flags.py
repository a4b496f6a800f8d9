"""A flag that two services have means the same to both: one type, one default."""

from __future__ import annotations

import itertools

import pytest

from cli.flags import DECIDED, SERVICES
from libs.config import ServiceConfig

SHARED = sorted(
    {
        (name, first, second)
        for (first, one), (second, other) in itertools.combinations(SERVICES.items(), 2)
        for name in one.model_fields.keys() & other.model_fields.keys()
        if name not in DECIDED and name not in ServiceConfig.model_fields
    }
)


def test_there_are_flags_that_two_services_share() -> None:
    assert {"max_num_seqs", "max_num_batched_tokens"} <= {name for name, _, _ in SHARED}


@pytest.mark.parametrize(("name", "first", "second"), SHARED)
def test_a_shared_flag_has_one_type_and_one_default(name: str, first: str, second: str) -> None:
    one, other = SERVICES[first].model_fields[name], SERVICES[second].model_fields[name]
    assert (one.annotation, one.get_default(call_default_factory=True)) == (other.annotation, other.get_default(call_default_factory=True))
