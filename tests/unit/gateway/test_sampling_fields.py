"""Sampling parameters of a body: what is taken, what is refused and under which name, before the model is known."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.constraint_fields import MAX_CONSTRAINT_BYTES, MAX_DEPTH
from services.gateway.api.decode import decode_chat
from services.gateway.api.policy import Policy
from services.gateway.api.requests import CompletionRequest
from services.gateway.api.sampling_fields import MAX_BIASES
from services.gateway.api.validate import MAX_PARAMETER_BYTES, want_chat, want_completion
from services.gateway.wanted import ClientSampling, Wanted
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2

FACTS = scheduler_pb2.ModelFacts(vocab_size=1000, max_model_len=100)


def wants(**fields) -> Wanted:
    return want_completion(CompletionRequest(prompt="a", **fields), "m", "label", Policy(max_sequences=256))


def sampling(**fields) -> ClientSampling:
    return wants(**fields).sampling


def refusal(**fields) -> TokenloomError:
    with pytest.raises(TokenloomError) as caught:
        wants(**fields)
    return caught.value


@given(st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100, width=32), max_size=20))
def test_biases_keep_their_ids_and_values_and_those_of_nothing_are_left_out(bias):
    kept = dict(sampling(logit_bias={str(key): value for key, value in bias.items()}).logit_bias)
    assert kept == {key: value for key, value in bias.items() if value}


@given(st.text(max_size=12).filter(lambda text: not (text.isascii() and text.isdecimal())))
def test_a_bias_of_what_is_no_id_is_refused(key):
    assert refusal(logit_bias={key: 1.0}).param == "logit_bias"


@pytest.mark.parametrize("key", ["007", "1_0", "+1", " 1", "4294967296", "9" * 5000, "٣"])
def test_an_id_has_one_spelling(key):
    assert refusal(logit_bias={"7": 1.0, key: 1.0}).param == "logit_bias"


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=8))
def test_ids_are_taken_once_each_in_order_or_the_first_bad_one_is_named(ids):
    bad = [index for index, token_id in enumerate(ids) if not 0 <= token_id < 2**32]
    for name in ("stop_token_ids", "allowed_token_ids"):
        if bad:
            assert refusal(**{name: ids}).param == f"{name}[{bad[0]}]"
        else:
            assert getattr(sampling(**{name: ids}), name) == tuple(dict.fromkeys(ids))


@pytest.mark.parametrize("fields", [{"stop_token_ids": [5, 1000]}, {"allowed_token_ids": [1000, 1]}, {"logit_bias": {"1000": 1.0}}])
def test_ids_beyond_the_vocabulary_are_refused_once_it_is_known(fields):
    with pytest.raises(TokenloomError) as caught:
        sampling(**fields).check_ids(FACTS)
    assert caught.value.param == next(iter(fields))
    assert "1000" in caught.value.message


def test_what_a_request_sets_for_all_its_choices_is_bounded():
    text = "x" * MAX_CONSTRAINT_BYTES
    fitting = MAX_PARAMETER_BYTES // MAX_CONSTRAINT_BYTES
    assert wants(guided_regex=text, n=fitting).constraint is not None
    assert refusal(guided_regex=text, n=fitting + 1).param == "guided_regex"
    assert refusal(guided_regex=text, n=1, best_of=fitting + 1).param == "guided_regex"
    biases = {str(key): 1.0 for key in range(MAX_BIASES)}
    assert len(sampling(logit_bias=biases, n=16).logit_bias) == MAX_BIASES
    assert refusal(logit_bias=biases, n=17).param == "logit_bias"
    assert refusal(logit_bias={**biases, str(MAX_BIASES): 1.0}).param == "logit_bias"


def nested(levels: int) -> dict:
    schema: dict = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


def test_a_schema_is_as_deep_and_as_long_as_it_may_be():
    assert wants(guided_json=nested(MAX_DEPTH)).constraint is not None
    for schema in (nested(MAX_DEPTH + 1), {"title": "x" * MAX_CONSTRAINT_BYTES}, f'{{"title": "{"x" * MAX_CONSTRAINT_BYTES}"}}'):
        error = refusal(guided_json=schema)
        assert (error.code, error.param) == (ErrorCode.INVALID_CONSTRAINT, "guided_json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=6
    )
)
def test_a_schema_keeps_its_order_and_its_values(value):
    schema = {"b": value, "a": {"z": 1, "y": value}}
    written = wants(guided_json=schema).constraint
    assert written is not None
    assert msgspec.json.decode(written.text) == schema
    assert written.text.index('"b"') < written.text.index('"z"') < written.text.index('"y"')


def test_the_models_repetition_penalty_counts_where_the_client_is_silent():
    facts = scheduler_pb2.ModelFacts(vocab_size=9, max_model_len=100, defaults=common_pb2.GenerationDefaults(repetition_penalty=1.5))
    assert sampling().resolve(facts, 1, 0, prompt_param="prompt").repetition_penalty == 1.5
    assert sampling(repetition_penalty=1.0).resolve(facts, 1, 0, prompt_param="prompt").repetition_penalty == 1.0


def test_a_format_and_a_choice_of_tools_that_leaves_the_model_free_are_no_contradiction():
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "response_format": {"type": "json_object"}}
    wanted = want_chat(decode_chat(msgspec.json.encode(body)), "m", "label", Policy(4))
    assert wanted.shown.tools is None, "an output that is all JSON is content"
    tagged = {**body, "response_format": {"type": "structural_tag", "structures": [], "triggers": []}}
    assert want_chat(decode_chat(msgspec.json.encode(tagged)), "m", "label", Policy(4)).shown.tools is not None
