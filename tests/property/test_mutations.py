"""Rules broken on purpose are noticed by the property drive alone; `python -m tests.property.mutations` shows it for every rule."""

from __future__ import annotations

import ast

import pytest

from tests.property.mutation import Mutation
from tests.property.mutations import MUTATIONS, REPOSITORY, verdict


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_still_applies_and_is_valid_code(mutation: Mutation):
    text = (REPOSITORY / mutation.path).read_text()
    assert text.count(mutation.before) == 1
    ast.parse(text.replace(mutation.before, mutation.after))


@pytest.mark.parametrize("mutation", [mutation for mutation in MUTATIONS if mutation.quick], ids=lambda mutation: mutation.name)
def test_the_drive_notices_when_a_rule_is_broken(mutation: Mutation):
    assert verdict(mutation)
