"""The real model at temperature 1 under random constraints, beside sequences that have none: what ended by its grammar keeps to it.

`make test-constraints` runs the long form: 200 schemas.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from libs.constraints import Constraint, ConstraintKind
from libs.models.directory import ModelDirectory
from libs.sampling import SamplingParams
from services.worker.constraints.registry import load_backend
from services.worker.engine import Engine
from tests.support.constrained import ConstrainedRun, Outcome, Task
from tests.support.schemas import random_schema
from tests.unit.worker.helpers import load_engine

pytestmark = pytest.mark.model

# Schemas for each backend in the long form; None: a few.
SCHEMAS = os.environ.get("CONSTRAINT_SCHEMAS")
REGEXES = (
    r"\d{3}-\d{4}",
    "(yes|no), (because|although) [a-z]{3,8}[.!]",
    r"[A-Z]\w{1,5}@[a-z]{2,6}\.(org|net)",
    '[^\n"]{5,9}😀',
    "a*?b{2}|é+",
)
CHOICES = ("yes", "no", "yes please", 'a "quoted" one', "日本", "\n")
EXPRESSION = 'root ::= sum\nsum ::= item ("+" item){0,2}\nitem ::= [1-9][0-9]? | "(" sum ")"'
PROMPT = "<|im_start|>user\nGive me a short JSON document.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return load_engine(model_dir, kv_cache_memory_bytes=512 << 20, max_num_seqs=32, max_model_len=256, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def constraints(schemas: int) -> list[Constraint]:
    """Random schemas, and each other kind a few times."""
    found = [Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(random_schema(seed)),), compact=seed % 5 == 0) for seed in range(schemas)]
    found += [Constraint(ConstraintKind.REGEX, (pattern,)) for pattern in REGEXES]
    found += [Constraint(ConstraintKind.CHOICE, CHOICES)] * 3
    found += [Constraint(ConstraintKind.GRAMMAR, (EXPRESSION,))] * 2
    return found


def keeps_to(constraint: Constraint, text: str) -> bool:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            schema: dict[str, Any] = json.loads(constraint.text)
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
            return not constraint.compact or json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False).count(
                " "
            ) == text.count(" ")
        case ConstraintKind.REGEX:
            return re.fullmatch(constraint.text, text) is not None
        case ConstraintKind.CHOICE:
            return text in constraint.texts
        case _:
            return re.fullmatch(r"[0-9+()]+", text) is not None and eval(text) > 0


def generate(engine: Engine, backend: str, model_dir: Path, tokenizer: Tokenizer, wanted: list[Constraint]) -> list[Outcome]:
    """The outcomes of all constraints, run with an unconstrained sequence after every third."""
    prompt = tokenizer.encode(PROMPT).ids
    tasks: list[Task] = []
    for seed, constraint in enumerate(wanted):
        tasks.append(Task(prompt, SamplingParams(max_tokens=200, temperature=1.0, seed=seed), constraint))
        if seed % 3 == 0:
            tasks.append(Task(prompt, SamplingParams(max_tokens=24, temperature=1.0, seed=seed)))
    run = ConstrainedRun(engine, load_backend(backend, ModelDirectory(model_dir)))
    outcomes = run.run(tasks, at_once=24)
    free = [outcome for outcome, task in zip(outcomes, tasks, strict=True) if task.constraint is None]
    alone = run.run([task for task in tasks if task.constraint is None][:1], at_once=1)
    assert free[0].ids == alone[0].ids, "neighbours' grammars change nothing for a sequence without one"
    return [outcome for outcome, task in zip(outcomes, tasks, strict=True) if task.constraint is not None]


@pytest.mark.parametrize(("backend", "few"), [("llguidance", 16), ("xgrammar", 8)])
def test_what_ends_by_its_grammar_keeps_to_it_and_nearly_all_do_end(
    engine: Engine, model_dir: Path, tokenizer: Tokenizer, backend: str, few: int
):
    wanted = constraints(int(SCHEMAS or few))
    outcomes = generate(engine, backend, model_dir, tokenizer, wanted)
    ended = [outcome.how in ("complete", "ended") for outcome in outcomes]
    for constraint, outcome, over in zip(wanted, outcomes, ended, strict=True):
        ids = outcome.ids[:-1] if outcome.how == "ended" else outcome.ids
        assert not over or keeps_to(constraint, tokenizer.decode(ids, skip_special_tokens=False)), (constraint, tokenizer.decode(ids))
    print(backend, Counter(outcome.how for outcome in outcomes))
    assert sum(ended) >= 0.9 * len(ended)
    assert "dead" not in {outcome.how for outcome in outcomes}
