"""When a request stops: at which token, for which reason, and how much of its text is kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.sampling import SamplingParams
from libs.text.table import TextRule, TextTable, TokenClass
from services.scheduler.core.stopping import FinishReason, Stop, StopRules, StopTracker

EOS, EOT, A, B, AB, C = 0, 1, 2, 3, 4, 5
TABLE = TextTable(
    "t",
    (b"<eos>", b"<eot>", b"a", b"b", b"ab", b"ccc"),
    bytes([TokenClass.SPECIAL, TokenClass.SPECIAL, *[TokenClass.TEXT] * 4]),
    TextRule.BYTE_LEVEL,
    verified=True,
)
RULES = StopRules((EOS, EOT), max_model_len=100, table=TABLE)


def run(tokens: Sequence[int], *, prompt: int = 4, **params: object) -> tuple[int, Stop | None]:
    """Pushes tokens until one stops; (tokens taken, the stop)."""
    tracker = StopTracker(RULES, SamplingParams(**{"max_tokens": 50, **params}), prompt)  # type: ignore[arg-type]
    outputs: list[int] = []
    for token in tokens:
        outputs.append(token)
        stop = tracker.push(token, outputs)
        if stop:
            return len(outputs), stop
    return len(outputs), None


def test_ordinary_tokens_do_not_stop():
    assert run([A, B, C]) == (3, None)


def test_the_end_of_sequence_stops_without_a_name_and_is_no_part_of_the_text():
    assert run([A, C, EOS, A]) == (3, Stop(FinishReason.STOP, keep_bytes=4))


def test_a_secondary_end_of_sequence_is_named_as_vllm_does():
    assert run([A, EOT]) == (2, Stop(FinishReason.STOP, stop_token=EOT, keep_bytes=1))


def test_a_stop_token_is_named_and_is_no_part_of_the_text():
    assert run([A, B], stop_token_ids=(B,)) == (2, Stop(FinishReason.STOP, stop_token=B, keep_bytes=1))


def test_the_end_of_sequence_comes_before_a_stop_token_of_the_same_id():
    assert run([EOS], stop_token_ids=(EOS,)) == (1, Stop(FinishReason.STOP, keep_bytes=0))


def test_ignore_eos_makes_both_kinds_ordinary_tokens():
    assert run([EOS, EOT, A], ignore_eos=True) == (3, None)


def test_ignore_eos_leaves_a_stop_token_of_that_id_alone():
    assert run([EOS], ignore_eos=True, stop_token_ids=(EOS,)) == (1, Stop(FinishReason.STOP, stop_token=EOS, keep_bytes=0))


@pytest.mark.parametrize(("tokens", "keep"), [([C, A, B], 3), ([C, AB], 3), ([AB], 0), ([A, A, B], 1)])
def test_a_stop_string_keeps_what_stands_before_it(tokens: list[int], keep: int):
    assert run(tokens, stop=("ab",)) == (len(tokens), Stop(FinishReason.STOP, stop_string="ab", keep_bytes=keep))


def test_a_stop_string_may_end_within_a_token():
    assert run([A, C], stop=("ac",)) == (2, Stop(FinishReason.STOP, stop_string="ac", keep_bytes=0))


def test_a_stop_token_comes_before_a_stop_string_that_it_completes():
    count, stop = run([A, B], stop=("ab",), stop_token_ids=(B,))
    assert (count, stop) == (2, Stop(FinishReason.STOP, stop_token=B, keep_bytes=1))


def test_a_stop_string_comes_before_the_length():
    count, stop = run([A, B], stop=("ab",), max_tokens=2)
    assert (count, stop) == (2, Stop(FinishReason.STOP, stop_string="ab", keep_bytes=0))


def test_max_tokens_stops_and_keeps_everything():
    assert run([A] * 9, max_tokens=3) == (3, Stop(FinishReason.LENGTH))


def test_the_context_stops_where_max_tokens_reaches_beyond_it():
    assert run([A] * 9, prompt=95) == (5, Stop(FinishReason.LENGTH))


def test_a_prompt_that_fills_the_context_leaves_no_output():
    assert StopTracker(RULES, SamplingParams(max_tokens=1), 100).max_output == 0


@pytest.mark.parametrize("token", [EOS, EOT, B])
def test_before_min_tokens_no_token_stops(token: int):
    assert run([token, A, token], min_tokens=3, stop_token_ids=(B,))[0] == 3


def test_before_min_tokens_a_stop_string_is_void_but_one_may_begin_there():
    assert run([A, B, C], min_tokens=3, stop=("ab",)) == (3, None)
    assert run([C, A, B], min_tokens=3, stop=("ab",)) == (3, Stop(FinishReason.STOP, stop_string="ab", keep_bytes=3))


def test_the_length_stops_before_min_tokens():
    assert run([A] * 5, min_tokens=5, max_tokens=2) == (2, Stop(FinishReason.LENGTH))


def test_a_tracker_replayed_over_the_same_tokens_goes_on_alike():
    params = SamplingParams(max_tokens=50, stop=("aab",))
    first, replayed = StopTracker(RULES, params, 4), StopTracker(RULES, params, 4)
    outputs = [C, A, A]
    for index in range(3):
        first.push(outputs[index], outputs[: index + 1])
        replayed.push(outputs[index], outputs[: index + 1])
    outputs.append(B)
    want = Stop(FinishReason.STOP, stop_string="aab", keep_bytes=3)
    assert first.push(B, outputs) == replayed.push(B, outputs) == want


@given(max_tokens=st.integers(1, 50), prompt=st.integers(1, 40), context=st.integers(1, 60))
def test_a_context_cuts_short_who_is_new_and_never_who_is_resumed(max_tokens: int, prompt: int, context: int):
    rules, params = StopRules((EOS,), context, TABLE), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    assert StopTracker(rules, params, prompt).max_output == min(max_tokens, context - prompt)
    resumed, outputs = StopTracker(rules, params, prompt, resumed=True), list[int]()
    stop = None
    while stop is None:
        outputs.append(1)
        stop = resumed.push(1, outputs)
    assert (stop.reason, len(outputs)) == (FinishReason.LENGTH, max_tokens)


@pytest.mark.parametrize(("token", "stop_token"), [(EOS, None), (EOT, EOT), (B, B)])
def test_an_included_stop_token_stays_in_the_text(token: int, stop_token: int | None):
    count, stop = run([A, token], stop_token_ids=(B,), include_stop_in_output=True)
    assert (count, stop) == (2, Stop(FinishReason.STOP, stop_token=stop_token))


@pytest.mark.parametrize(("tokens", "keep"), [([C, A, B], 5), ([A, AB], 3), ([A, B, C], 2)])
def test_an_included_stop_string_is_the_end_of_the_text(tokens: list[int], keep: int):
    count, stop = run(tokens, stop=("ab",), include_stop_in_output=True)
    assert stop == Stop(FinishReason.STOP, stop_string="ab", keep_bytes=keep)
    assert count <= len(tokens)


def test_kept_special_tokens_are_text_that_counts_and_that_stop_strings_match():
    assert run([EOT, A, EOS], keep_special_tokens=True, stop_token_ids=(), ignore_eos=True)[1] is None
    count, stop = run([A, EOT, C], keep_special_tokens=True, ignore_eos=True, stop=("<eot>c",))
    assert (count, stop) == (3, Stop(FinishReason.STOP, stop_string="<eot>c", keep_bytes=1))
    assert run([A, EOT, C], ignore_eos=True, stop=("<eot>c",))[1] is None


def test_the_end_that_stopped_a_text_with_special_tokens_is_no_part_of_it():
    count, stop = run([A, EOT, C, EOS], keep_special_tokens=True, min_tokens=3)
    assert (count, stop) == (4, Stop(FinishReason.STOP, keep_bytes=9))


@pytest.mark.parametrize(("last", "include", "keep"), [(A, False, None), (EOS, False, 3), (EOT, False, 3), (EOS, True, None)])
def test_a_completed_constraint_keeps_all_but_an_end_of_sequence(last: int, include: bool, keep: int | None):
    params = SamplingParams(max_tokens=50, min_tokens=40, include_stop_in_output=include)
    assert StopTracker(RULES, params, 4).complete([C, last]) == Stop(FinishReason.CONSTRAINT_COMPLETE, keep_bytes=keep)
