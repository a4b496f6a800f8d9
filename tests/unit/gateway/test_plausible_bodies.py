"""Bodies mostly as clients send them: what is taken fits into what travels, what is refused has its parameter's name."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.constraints import Constraint
from libs.errors import TokenloomError
from libs.sampling import SamplingParams
from services.gateway.api.decode import decode_chat, decode_completion
from services.gateway.api.fields import NO_EFFECT, REFUSED, REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS
from services.gateway.api.policy import Policy
from services.gateway.api.requests import ChatRequest, CompletionRequest
from services.gateway.api.validate import want_chat, want_completion
from services.gateway.terms import check_served, keep_last
from services.gateway.wanted import Wanted
from tokenloom.scheduler.v1 import scheduler_pb2

FACTS = scheduler_pb2.ModelFacts(
    vocab_size=1000, max_model_len=64, max_logprobs=20, constraint_backend="llguidance", priority_scheduling=True, logits_processors=["own"]
)
POLICY = Policy(max_sequences=8, trust_chat_template=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
BOOL = st.booleans()
IDS = st.lists(st.integers(0, 999), min_size=1, max_size=4)
NUMBER = st.floats(-200, 200) | st.integers(-(2**70), 2**70) | st.sampled_from([0.0, 1.0, 1e-320, -0.0])
SCHEMA = st.sampled_from([{}, {"type": "object"}, True, {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1, None]}}}])
TOOL = st.builds(lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}}, TEXT, SCHEMA)
KINDS = {"json": SCHEMA, "regex": TEXT, "choice": st.lists(TEXT, min_size=1, max_size=3), "grammar": TEXT, "json_object": st.just(True)}

COMMON = {
    "n": st.integers(1, 3),
    "best_of": st.integers(1, 4),
    "max_tokens": st.integers(-1, 90),
    "min_tokens": st.integers(-1, 9),
    "temperature": st.floats(0, 2) | NUMBER,
    "top_p": st.floats(0.1, 1) | NUMBER,
    "top_k": st.integers(-1, 50) | NUMBER,
    "min_p": st.floats(0, 1) | NUMBER,
    "seed": st.integers(-(2**64), 2**64),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": IDS,
    "repetition_penalty": st.floats(0.5, 2) | NUMBER,
    "presence_penalty": st.floats(-2, 2) | NUMBER,
    "frequency_penalty": st.floats(-2, 2) | NUMBER,
    "logit_bias": st.dictionaries(st.integers(0, 999).map(str), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": IDS,
    "bad_words": st.lists(TEXT, max_size=3),
    "prompt_logprobs": st.integers(0, 20),
    "truncate_prompt_tokens": st.integers(-1, 64),
    "vllm_xargs": st.dictionaries(TEXT, TEXT | st.integers(-5, 5), max_size=2),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "structured_outputs": st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.fixed_dictionaries({kind: KINDS[kind]})),
    "priority": st.integers(-(2**31), 2**31),
    **dict.fromkeys(("stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "add_special_tokens"), BOOL),
}
CHAT = {
    **COMMON,
    "logprobs": BOOL,
    "top_logprobs": st.integers(0, 21),
    "tools": st.lists(TOOL, max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "chat_template": TEXT,
}
COMPLETION = {**COMMON, "logprobs": st.integers(0, 21), "echo": BOOL}


def body_of(required: dict, optional: dict[str, st.SearchStrategy]) -> st.SearchStrategy[dict]:
    """A body with a few of the optional fields: with all of them one that contradicts another is nearly sure."""
    names = st.lists(st.sampled_from(sorted(optional)), max_size=5, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({**required, **{name: optional[name] for name in chosen}}))


def check_travels(wanted: Wanted) -> None:
    """That the parameters that run come out of the wire as they went in, but for float32."""
    check_served(wanted, FACTS)
    resolved = wanted.sampling.resolve(FACTS, 5, 1, prompt_param="prompt", bad_words=((3, 4),))
    found = SamplingParams.from_proto(resolved.to_proto())
    assert found.to_proto() == resolved.to_proto()
    assert 1 <= resolved.max_tokens <= 64 - 5
    assert 0 <= keep_last(wanted, FACTS) <= 64
    assert wanted.n <= wanted.generated <= POLICY.max_sequences
    if wanted.constraint is not None:
        assert Constraint.from_proto(wanted.constraint.to_proto()) == wanted.constraint


def check_named(error: TokenloomError, body: dict) -> None:
    assert (error.code.spec.http_status, bool(error.message)) == (400, True)
    assert error.param is not None
    assert error.param.replace("[", ".").split(".")[0] in body, f"{error.param} is none of the client's: {error.message}"


@settings(max_examples=150)
@given(body_of({"messages": st.just([{"role": "user", "content": "a"}])}, CHAT))
def test_a_chat_travels_or_is_refused_by_name(body):
    try:
        check_travels(want_chat(decode_chat(msgspec.json.encode(body)), "m", "label", POLICY))
    except TokenloomError as error:
        check_named(error, body)


@settings(max_examples=150)
@given(body_of({"prompt": TEXT | IDS}, COMPLETION))
def test_a_completion_travels_or_is_refused_by_name(body):
    try:
        check_travels(want_completion(decode_completion(msgspec.json.encode(body)), "m", "label", POLICY))
    except TokenloomError as error:
        check_named(error, body)


def test_a_field_has_one_meaning_in_each_api():
    for kind, refused in ((ChatRequest, REFUSED_IN_CHATS), (CompletionRequest, REFUSED_IN_COMPLETIONS)):
        served = set(kind.__struct_fields__)
        assert not served & (set(REFUSED) | set(refused))
        assert served & NO_EFFECT <= {"user"}, "it is decoded for its type alone"
