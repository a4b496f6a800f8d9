"""schemathesis makes requests of /openapi.json, such as keep to it and such as do not, for a gateway before a real scheduler."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.fuzz import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, fuzz_stack
from tests.support.gateway_core import Stack

# Requests of each kind to each endpoint; more by `make test-fuzz`.
CASES = max(int(os.environ.get("FUZZ_CASES", "0")) // 100, 12)
CHECKS = [status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance]
together = pytest.mark.asyncio(loop_scope="module")
drawn = settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    async with fuzz_stack(tmp_path_factory.mktemp("schemathesis")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def described(stack: Stack) -> Any:
    return schemathesis.openapi.from_dict((await stack.gateway.client.get("/openapi.json")).json())


async def send(stack: Stack, case: schemathesis.Case) -> httpx.Response:
    """Sends the case as schemathesis would, from this loop."""
    sent = case.as_transport_kwargs(base_url=stack.gateway.url)
    content = {"content": sent["data"]} if "data" in sent else {"json": sent["json"]} if "json" in sent else {}
    request = httpx.Request(sent["method"], sent["url"], headers=dict(sent["headers"]), params=sent["params"], **content)
    return await stack.gateway.client.send(request)


def check(case: schemathesis.Case, response: httpx.Response, *checks: Any) -> None:
    case.validate_response(response, checks=[*CHECKS, *checks])
    own_timeout = response.status_code == 504 and isinstance(case.body, dict) and case.body.get("timeout")
    assert response.status_code < 500 or own_timeout, response.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE])
@given(data=st.data())
@drawn
@together
async def test_requests_that_keep_to_the_document_get_what_it_says(stack, described, path, data):
    case = data.draw(described[path]["POST"].as_strategy())
    check(case, await send(stack, case))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE])
@given(data=st.data())
@drawn
@together
async def test_requests_that_do_not_keep_to_it_are_refused(stack, described, path, data):
    case = data.draw(described[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    response = await send(stack, case)
    # 413: the bodies are large, whatever else is wrong with them.
    check(case, response, *([negative_data_rejection] if response.status_code != 413 else []))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/health", "/ready", "/version", "/metrics"])
@given(data=st.data())
@settings(drawn, max_examples=5)
@together
async def test_what_is_asked_for_by_get_is_what_the_document_says(stack, described, path, data):
    case = data.draw(described[path]["GET"].as_strategy())
    check(case, await send(stack, case))
