"""/openapi.json says what is served: its paths are the routes, and what the gateway answers is what its schemas say."""

from __future__ import annotations

import importlib.metadata
import json
import re
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from services.gateway.app import new_app
from tests.support.gateway_fakes import FakeScheduler, say, scheduler_pb2
from tests.support.gateway_process import Gateway, events_of, running_gateway, until

together = pytest.mark.asyncio(loop_scope="module")
# Routes that describe the others, and are no part of the API.
ABOUT = {"/openapi.json", "/docs", "/docs/start.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/docs/favicon-32x32.png"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SHOWN = {"return_token_ids": True}
SAID = '<think>why</think>so <tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
CONFIG = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "served_model_name": ["tiny", "small"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory):
    async with running_gateway(tmp_path_factory.mktemp("openapi"), FakeScheduler(say(SAID)), **CONFIG) as running:
        yield running


async def document_of(gateway: Gateway) -> dict[str, Any]:
    response = await gateway.client.get("/openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = response.json()
    return found


def validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """The schema with the document's components; objects of our types have no other fields than it says."""
    closed = {
        name: {**part, "additionalProperties": False} if "properties" in part else part
        for name, part in document["components"]["schemas"].items()
    }
    return jsonschema.Draft202012Validator({**schema, "components": {"schemas": closed}})


@together
async def test_the_paths_of_the_document_are_the_routes(gateway):
    document = await document_of(gateway)
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    routes = {
        (route.path.replace(":path}", "}"), method)
        for route in new_app(gateway.mesh).routes
        for method in route.methods or ()
        if method != "HEAD" and route.path not in ABOUT
    }
    assert described == routes
    assert (document["openapi"], document["info"]["version"]) == ("3.1.0", importlib.metadata.version("tokenloom"))


@together
async def test_every_schema_is_valid_and_every_reference_leads_somewhere(gateway):
    document = await document_of(gateway)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert referred <= schemas.keys()
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["tiny", "small", None]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {**MESSAGES, **SHOWN, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "n": 2}, 200),
        (CHAT, {**MESSAGES, "tools": [TOOL]}, 200),
        (CHAT, {**MESSAGES, "max_tokens": 0}, 400),
        (CHAT, {**MESSAGES, "model": "none"}, 404),
        (COMPLETIONS, {**SHOWN, "prompt": ["a", "b"], "logprobs": 2, "echo": True, "prompt_logprobs": 0}, 200),
        (COMPLETIONS, {"prompt": [1, 2], "best_of": 3, "stop": "why"}, 200),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**6}, 400),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, 200),
        ("/tokenize", {**MESSAGES, "tools": [TOOL]}, 200),
        ("/tokenize", {}, 400),
        ("/detokenize", {"tokens": [104, 105]}, 200),
        ("/detokenize", {"tokens": [10**6]}, 400),
    ],
)
@together
async def test_answers_and_errors_are_what_their_schemas_say(gateway, path, body, status):
    document = await document_of(gateway)
    response = await gateway.client.post(path, json=body)
    assert response.status_code == status, response.text
    assert ("tool_calls" in response.text) == ("tools" in body and path == CHAT)
    described = document["paths"][path]["post"]["responses"][str(status)]["content"]["application/json"]
    validator(document, described["schema"]).validate(response.json())
    request = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    for sent in (body, request["example"]) if status == 200 else (request["example"],):
        validator(document, request["schema"]).validate(sent)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/small", "/v1/models/none", "/ready", "/version"])
@together
async def test_what_is_asked_for_by_get_is_what_its_schema_says(gateway, path):
    document = await document_of(gateway)
    response = await gateway.client.get(path)
    template = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    described = document["paths"][template]["get"]["responses"][str(response.status_code)]["content"]["application/json"]
    validator(document, described["schema"]).validate(response.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**MESSAGES, **SHOWN, "logprobs": True, "top_logprobs": 1}),
        (CHAT, {**MESSAGES, "tools": [TOOL]}),
        (COMPLETIONS, {**SHOWN, "prompt": "ab", "logprobs": 1, "echo": True}),
    ],
)
@together
async def test_events_of_streams_are_what_their_schema_says(gateway, path, body):
    document = await document_of(gateway)
    response = await gateway.client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    described = document["paths"][path]["post"]["responses"]["200"]["content"][response.headers["content-type"].partition(";")[0]]
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    assert len(events) > 2
    for event in events:
        validator(document, described["x-event"]).validate(event)


@together
async def test_the_page_shows_the_document_and_loads_nothing_from_elsewhere(gateway):
    page = await gateway.client.get("/docs")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    for name in loaded:
        asset = await gateway.client.get(f"/{name}")
        assert asset.status_code == 200
        assert f"/{name}" in ABOUT
    assert "openapi.json" in (await gateway.client.get("/docs/start.js")).text
    assert (await gateway.client.get("/docs/../app.py")).status_code == 404
    assert (await gateway.client.get("/docs/swagger-ui.css.map")).status_code == 404


async def test_with_keys_the_document_says_where_one_is_needed_and_needs_none_itself(tmp_path):
    async with running_gateway(tmp_path, api_key=["secret"]) as gateway:
        document = await document_of(gateway)
        (scheme,) = document["components"]["securitySchemes"].items()
        for path, methods in document["paths"].items():
            ((method, operation),) = methods.items()
            response = await gateway.client.request(method, path.replace("{name}", "tiny"), json={})
            needed = response.status_code == 401
            assert needed == ("401" in operation["responses"]), path
            assert operation.get("security") == ([{scheme[0]: []}] if needed else None)
        assert (await gateway.client.get("/docs")).status_code == 200


async def test_without_keys_no_key_is_spoken_of_and_a_mesh_that_is_not_ready_says_why(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        document = await document_of(gateway)
        assert "security" not in json.dumps(document)
        gateway.scheduler.model = None
        gateway.scheduler.window = scheduler_pb2.Window()
        gateway.scheduler.session.close()
        await until(lambda: gateway.mesh.obstacles())
        response = await gateway.client.get("/ready")
        assert response.status_code == 503
        described = document["paths"]["/ready"]["get"]["responses"]["503"]["content"]["application/json"]
        validator(document, described["schema"]).validate(response.json())
