"""From typed requests to what is wanted: salts that cannot meet, and how many choices there may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.blocks import root_hash
from libs.errors import TokenloomError
from services.gateway.api.policy import Policy
from services.gateway.api.requests import ChatRequest, CompletionRequest, Message
from services.gateway.api.validate import MAX_CACHE_SALT_BYTES, want_chat, want_completion
from services.gateway.wanted import Wanted

# Text that JSON can carry: lone surrogates are refused as malformed before they come here.
SALTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def wants(prompt: str | list[str] = "a", *, max_sequences: int = 16, **fields) -> Wanted:
    return want_completion(CompletionRequest(prompt=prompt, **fields), "m", "label", Policy(max_sequences))


def salt_of(wanted: Wanted) -> bytes:
    (salt,) = {prompt.request.hash_salt for prompt in wanted.prompts}
    return salt


def refusal(**fields) -> TokenloomError:
    with pytest.raises(TokenloomError) as caught:
        wants(**fields)
    return caught.value


@given(SALTS, SALTS)
def test_salts_are_apart_from_each_other_and_from_none(one, other):
    first, second = salt_of(wants(cache_salt=one)), salt_of(wants(cache_salt=other))
    assert (root_hash(first) == root_hash(second)) == (one == other)
    assert root_hash(first) != root_hash() == root_hash(salt_of(wants()))


@given(SALTS)
def test_a_salt_never_looks_like_one_of_another_kind(text):
    assert salt_of(wants(cache_salt=text)).startswith(b"cache_salt:")


def test_a_chat_is_salted_as_a_completion_is():
    request = ChatRequest(messages=[Message(role="user", content="hi")], cache_salt="s")
    assert salt_of(want_chat(request, "m", "label", Policy(4))) == salt_of(wants(["a", "b"], cache_salt="s"))


def test_a_salt_has_a_length_in_bytes():
    assert salt_of(wants(cache_salt="s" * MAX_CACHE_SALT_BYTES))
    assert refusal(cache_salt="s" * (MAX_CACHE_SALT_BYTES - 1) + "é").param == "cache_salt"
    assert refusal(cache_salt="").param == "cache_salt"


@given(st.integers(1, 6), st.integers(1, 40))
def test_choices_times_prompts_are_bounded(prompts, n):
    texts = ["a"] * prompts
    if n * prompts <= 16:
        assert wants(texts, n=n).n == n
    else:
        assert refusal(prompt=texts, n=n).param == "n"


def test_too_many_prompts_are_the_prompts_fault_and_too_many_choices_those_of_n():
    assert refusal(prompt=["a"] * 17, n=2).param == "prompt"
    assert refusal(prompt=["a"] * 16, n=2).param == "n"


@pytest.mark.parametrize(("n", "best_of", "generated"), [(None, 1, 1), (3, 3, 3), (3, None, 3), (None, 2, 2), (3, 5, 5)])
def test_best_of_generates_more_choices_than_are_shown(n, best_of, generated):
    wanted = wants(n=n, best_of=best_of)
    assert (wanted.n, wanted.generated) == (n or 1, generated)
    assert wanted.sampling.logprobs == (0 if generated > wanted.n else None), "they are compared by their tokens' log-probabilities"


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 17}, {"best_of": 2, "stream": True}, {"best_of": 0}])
def test_best_of_that_cannot_be_is_refused(fields):
    assert refusal(**fields).param == "best_of"


@pytest.mark.parametrize("priority", [-(2**31) - 1, 2**31])
def test_a_priority_that_the_contract_cannot_carry_is_refused(priority):
    assert refusal(priority=priority).param == "priority"
