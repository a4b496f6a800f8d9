"""The list of mutations stays true to the code; `python -m tests.property.mutations` shows that each is caught."""

from __future__ import annotations

import ast

import pytest

from tests.property.mutations import MUTATIONS, REPOSITORY, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_still_applies_and_is_valid_code(mutation: Mutation):
    text = (REPOSITORY / mutation.file).read_text()
    assert text.count(mutation.before) == 1
    ast.parse(text.replace(mutation.before, mutation.after))
