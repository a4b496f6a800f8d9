"""Bodies with something wrong in them, sent to a gateway before a real scheduler: whatever it is, it is the client's fault, and said so."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter

import httpx
import pytest

from libs.errors import ErrorCode
from services.gateway.generate import Generation
from tests.support.fuzz import CHAT, COMPLETIONS, VALID, fuzz_stack, fuzzed, written
from tests.support.gateway_core import Stack

# More by `make test-fuzz`, with another seed each time.
CASES, SEED = int(os.environ.get("FUZZ_CASES", "600")), int(os.environ.get("FUZZ_SEED", "5"))
TOGETHER = 16
LABELS = {code.spec.label: code.spec.http_status for code in ErrorCode}
# Errors about the body as a whole have no parameter; nor has a body that is no object.
WHOLE = {"malformed_json", "body_too_large"}


@pytest.fixture
async def stack(tmp_path):
    async with fuzz_stack(tmp_path) as running:
        yield running


async def send(stack: Stack, path: str, body: bytes) -> httpx.Response:
    response = await stack.gateway.client.post(path, content=body, headers={"content-type": "application/json"})
    try:
        check(response, body)
    except AssertionError as error:
        raise AssertionError(f"seed {SEED}: {path} {body[:2000]!r} -> {response.status_code} {response.text[:1000]}") from error
    return response


def check(response: httpx.Response, body: bytes) -> None:
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.status_code == 200
        assert response.text.endswith("data: [DONE]\n\n")
        events = [json.loads(block.removeprefix("data: ")) for block in response.text.split("\n\n")[:-2]]
        for event in events:
            if "error" in event:
                check_error(event["error"], None, body)
    elif response.status_code == 200:
        assert "error" not in response.json()
    else:
        assert response.json().keys() == {"error"}
        check_error(response.json()["error"], response.status_code, body)


def check_error(error: dict[str, str | None], status: int | None, body: bytes) -> None:
    assert error.keys() == {"message", "type", "param", "code"}
    label = error["code"]
    assert label in LABELS
    assert status in (None, LABELS[label])
    # 504: a timeout of the client's own that is shorter than any answer takes.
    assert LABELS[label] < 500 or (label == "deadline_exceeded" and b'"timeout"' in body)
    assert error["type"] in ("invalid_request_error", "timeout_error")
    assert error["message"]
    assert len(error["message"]) < 2000
    whole = label in WHOLE or not body.startswith(b"{")
    assert whole or LABELS[label] in (422, 504) or error["param"] is not None


async def test_what_is_not_spoiled_is_served(stack):
    for path, body in VALID:
        response = await send(stack, path, written(body))
        assert response.status_code == 200, (body, response.text)


@pytest.mark.timeout(3600 if "FUZZ_CASES" in os.environ else 120)
async def test_no_body_is_the_servers_fault_and_many_that_are_odd_reach_the_scheduler(stack, monkeypatch):
    reached = Counter[str]()
    submit = Generation.submit

    def counted(generation: Generation) -> None:
        submit(generation)
        reached["scheduler"] += 1

    monkeypatch.setattr(Generation, "submit", counted)
    cases, answers = iter(fuzzed(CASES, SEED)), Counter[str]()

    async def client() -> None:
        for path, body in cases:
            response = await send(stack, path, body)
            found = response.json()["error"]["code"] if response.status_code != 200 else "ok"
            answers[found] += 1
            reached[path] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(TOGETHER):
            group.create_task(client())
    generating = reached[CHAT] + reached[COMPLETIONS]
    assert sum(answers.values()) == CASES
    assert reached["scheduler"] >= 0.3 * CASES, (SEED, reached, answers)
    assert reached["scheduler"] <= 0.9 * generating, "the cases are hardly wrong"
    assert {"ok", "invalid_request", "unsupported", "malformed_json", "invalid_constraint"} <= answers.keys()
