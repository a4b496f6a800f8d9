"""Texts of added tokens in a constraint: written with ordinary tokens, and with the token itself where it is a text of the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from libs.constraints import Constraint, ConstraintKind
from libs.models.directory import ModelDirectory
from services.worker.constraints.base import Backend
from services.worker.constraints.progress import Progress
from services.worker.constraints.registry import load_backend
from tests.support.constrained import grammar_of
from tests.support.tiny_llama import make_tiny_llama

# SmolLM2's, then what models with tools and reasoning add.
SPECIAL = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<repo_name>",
        "<reponame>",
        "<file_sep>",
        "<filename>",
        "<gh_stars>",
        "<issue_start>",
    ),
    *("<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>", "<jupyter_script>"),
    *("<empty_output>", "[TOOL_CALLS]", "<|python_tag|>"),
)
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FIRST_ADDED, FIRST_BYTE, ENDINGS, WIDTH = 266, 3, (2, 0), 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """The tiny model with those tokens behind its own; the first three are its own."""
    path: Path = make_tiny_llama(tmp_path_factory.mktemp("added") / "tiny", vocab_size=320)
    content = json.loads((path / "tokenizer.json").read_text())
    shape = content["added_tokens"][0]
    for index, token in enumerate((*SPECIAL[3:], *PLAIN)):
        content["added_tokens"].append({**shape, "id": FIRST_ADDED + index, "content": token, "special": token not in PLAIN})
    (path / "tokenizer.json").write_text(json.dumps(content))
    return ModelDirectory(path)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def added(request: pytest.FixtureRequest, model: ModelDirectory) -> Backend:
    return load_backend(request.param, model)


def id_of(token: str) -> int:
    return FIRST_ADDED + (*SPECIAL[3:], *PLAIN).index(token)


def begun(backend: Backend, constraint: Constraint) -> Progress:
    prepared = grammar_of(backend, constraint)
    progress = Progress(prepared.grammar, width=WIDTH, endings=ENDINGS)
    progress.replay(())
    return progress


def allowed(progress: Progress) -> set[int]:
    words = np.zeros(WIDTH, np.int32)
    progress.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def write(progress: Progress, text: str) -> None:
    for byte in text.encode():
        assert FIRST_BYTE + byte in allowed(progress), f"{chr(byte)!r} of {text!r} cannot be written"
        progress.accept(FIRST_BYTE + byte)


def constraints_of(text: str) -> dict[str, Constraint]:
    """Constraints that a text forces, by what is to be written."""
    named = {"type": "object", "properties": {text: {"const": text}}, "required": [text], "additionalProperties": False}
    tag = {"format": {"type": "tag", "begin": text, "content": {"type": "regex", "pattern": "[a-z]"}, "end": text}}
    escaped = "".join(f"\\x{byte:02x}" for byte in text.encode())
    return {
        text: Constraint(ConstraintKind.CHOICE, (text,)),
        f"{text}ab{text}": Constraint(ConstraintKind.REGEX, (f"{escaped}[a-z]{{1,5}}{escaped}",)),
        f'"{text}"': Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps({"const": text}),)),
        json.dumps({text: text}, separators=(",", ":")): Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(named),), compact=True),
        f"{text}({text})": Constraint(ConstraintKind.GRAMMAR, (f'root ::= "{text}" sum\nsum ::= "(" sum ")" | "{text}"',)),
        f"{text}x{text}": Constraint(ConstraintKind.STRUCTURAL_TAG, (json.dumps(tag),)),
    }


@pytest.mark.parametrize("token", [*SPECIAL, *PLAIN])
def test_the_text_of_an_added_token_is_written_with_ordinary_tokens(added: Backend, token: str):
    for text, constraint in constraints_of(token).items():
        progress = begun(added, constraint)
        write(progress, text)
        assert progress.complete or allowed(progress) & set(ENDINGS), f"{text!r} is not whole"


@pytest.mark.parametrize("token", PLAIN)
def test_an_added_token_that_is_text_stands_for_it(added: Backend, token: str):
    progress = begun(added, Constraint(ConstraintKind.CHOICE, (token,)))
    assert id_of(token) in allowed(progress)
    progress.accept(id_of(token))
    assert progress.complete


@pytest.mark.parametrize("token", SPECIAL[3:])
def test_a_special_token_stands_for_no_text(added: Backend, token: str):
    assert id_of(token) not in allowed(begun(added, Constraint(ConstraintKind.CHOICE, (token,))))


def accept(progress: Progress, token: int) -> None:
    assert token in allowed(progress)
    progress.accept(token)


@pytest.mark.parametrize("token", PLAIN)
def test_a_structural_tag_begins_and_ends_with_the_token_that_the_model_learned(added: Backend, token: str):
    tag = {"type": "tag", "begin": f"{token}:", "content": {"type": "regex", "pattern": "[a-z]"}, "end": token}
    whole = {"format": {"type": "triggered_tags", "triggers": [token], "tags": [tag]}}
    progress = begun(added, Constraint(ConstraintKind.STRUCTURAL_TAG, (json.dumps(whole),)))
    for free in ("", "some text ", ""):
        write(progress, free)
        accept(progress, id_of(token))
        assert allowed(progress) == {FIRST_BYTE + ord(":")}, "free text goes on behind the token"
        write(progress, ":a")
        accept(progress, id_of(token))
    write(progress, f"as text: {token}:a{token} and the end")
    assert allowed(progress) & set(ENDINGS)


def test_a_clients_own_directive_does_not_bring_the_trouble_back(model: ModelDirectory):
    progress = begun(
        load_backend("llguidance", model),
        Constraint(ConstraintKind.GRAMMAR, ('%llguidance {"no_forcing": false}\nstart: "<filename>" /[a-z]/',)),
    )
    write(progress, "<filename>a")
    assert progress.complete
