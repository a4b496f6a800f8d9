"""Prompts of every kind become ids and block hashes, or an error that names what is wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer

from libs.blocks import block_hashes
from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.packing import pack_ids, unpack_ids
from services.tokenizer.encoder import Encoder, load_tokenizer, longest_token
from services.tokenizer.encoder_process import ENCODE, ENCODED, READY, REFUSED, answer, frame, read_frame
from tests.support.tiny_llama import make_tiny_llama, tiny_tokenizer_json
from tokenloom.common.v1 import common_pb2
from tokenloom.tokenizer.v1 import tokenizer_pb2

USER = json.dumps([{"role": "user", "content": "the hall"}]).encode()


@pytest.fixture(scope="module")
def encoder(tiny_llama_dir):
    return load(tiny_llama_dir)


def load(folder) -> Encoder:
    model = ModelDirectory(folder)
    return Encoder(model, load_tokenizer(model))


def request(**fields) -> tokenizer_pb2.EncodeRequest:
    return tokenizer_pb2.EncodeRequest(**fields)


def ids_request(ids: bytes) -> tokenizer_pb2.EncodeRequest:
    return request(token_ids=tokenizer_pb2.TokenIds(ids=ids))


def chat(**fields) -> tokenizer_pb2.EncodeRequest:
    return request(chat=tokenizer_pb2.Chat(**{"messages_json": USER, **fields}))


def refusal(encoder, message) -> TokenloomError:
    with pytest.raises(TokenloomError) as caught:
        encoder.encode(message)
    return caught.value


def test_text_becomes_ids_and_hashes_of_its_full_blocks(encoder, tiny_llama_dir):
    text = "in the hall " * 5
    response = encoder.encode(request(text=text, hash_salt=b"tenant"))
    ids = unpack_ids(response.token_ids)
    assert ids == load_tokenizer(ModelDirectory(tiny_llama_dir)).encode(text).ids
    assert response.block_hashes == b"".join(block_hashes(ids, b"tenant"))
    assert response.tokenizer_fingerprint == ModelDirectory(tiny_llama_dir).tokenizer_fingerprint
    assert response.render_us == 0


def test_a_chat_is_rendered_then_encoded_with_its_special_tokens_as_one_id_each(encoder):
    response = encoder.encode(chat(add_generation_prompt=True))
    ids = unpack_ids(response.token_ids)
    assert ids[0] == 1
    assert ids.count(1) == 2
    assert ids.count(2) == 1
    assert response.render_us > 0


def test_ids_are_taken_as_they_are(encoder):
    ids = [5, 271, 0, 1] * 8
    response = encoder.encode(request(token_ids=tokenizer_pb2.TokenIds(ids=pack_ids(ids))))
    assert unpack_ids(response.token_ids) == ids
    assert response.block_hashes == b"".join(block_hashes(ids))


def test_plain_text_gets_the_tokens_that_the_tokenizer_adds_and_a_chat_does_not(tmp_path):
    folder = make_tiny_llama(tmp_path / "bos")
    special = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json() | {"post_processor": template}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    encoder = load(folder)
    assert unpack_ids(encoder.encode(request(text="a")).token_ids) == [1, 3 + ord("a")]
    assert unpack_ids(encoder.encode(request(text="")).token_ids) == [1]
    assert 1 not in unpack_ids(encoder.encode(chat()).token_ids)


def test_truncation_and_padding_left_over_from_training_are_switched_off(tmp_path):
    folder = make_tiny_llama(tmp_path / "m")
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json() | {"truncation": truncation, "padding": padding}))
    assert len(unpack_ids(load(folder).encode(request(text="x" * 20)).token_ids)) == 20


def test_half_a_surrogate_pair_becomes_a_replacement_and_a_whole_one_its_character(encoder):
    def ids(content: str) -> list[int]:
        messages = f'[{{"role": "user", "content": "{content}"}}]'.encode()
        return unpack_ids(encoder.encode(chat(messages_json=messages)).token_ids)

    assert ids(r"\ud83d\ude00") == ids("😀")
    assert ids(r"\ud83d!") == ids("\ufffd!")


@pytest.mark.parametrize(
    ("message", "code", "param", "words"),
    [
        (request(), ErrorCode.INVALID_REQUEST, None, ["no input"]),
        (request(text=""), ErrorCode.EMPTY_PROMPT, "prompt", ["empty"]),
        (request(text="x" * 9, max_tokens=8), ErrorCode.PROMPT_TOO_LONG, "prompt", ["9", "8"]),
        (ids_request(b""), ErrorCode.EMPTY_PROMPT, "prompt", ["empty"]),
        (ids_request(pack_ids([3, 272])), ErrorCode.INVALID_REQUEST, "prompt", ["272 is out of range", "272 ids"]),
        (ids_request(b"\0" * 5), ErrorCode.INVALID_REQUEST, "prompt", ["5 bytes"]),
        (chat(messages_json=b"["), ErrorCode.INVALID_REQUEST, "messages", ["JSON"]),
        (chat(messages_json=b"{}"), ErrorCode.INVALID_REQUEST, "messages", ["type"]),
        (chat(messages_json=b"[1]"), ErrorCode.INVALID_REQUEST, "messages", ["type"]),
        (chat(messages_json=b"\xff"), ErrorCode.INVALID_REQUEST, "messages", ["JSON"]),
        (chat(tools_json=b'{"a": 1}'), ErrorCode.INVALID_REQUEST, "tools", ["type"]),
        (chat(template_kwargs_json=b"[]"), ErrorCode.INVALID_REQUEST, "chat_template_kwargs", ["type"]),
        (chat(messages_json=b'[{"role": "user", "content": null}]'), ErrorCode.TEMPLATE_ERROR, "messages", ["failed"]),
        (chat(messages_json=b"[]"), ErrorCode.EMPTY_PROMPT, "messages", ["empty"]),
    ],
)  # fmt: skip
def test_each_refusal_names_the_parameter_and_what_is_wrong(encoder, message, code, param, words):
    error = refusal(encoder, message)
    assert (error.code, error.param) == (code, param)
    assert all(word in error.message for word in words)


def test_a_prompt_of_exactly_the_limit_passes(encoder):
    assert encoder.encode(request(text="x" * 8, max_tokens=8)).token_ids


def test_a_model_without_a_template_refuses_chats_only(tmp_path):
    folder = make_tiny_llama(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    encoder = load(folder)
    assert refusal(encoder, chat()).code is ErrorCode.TEMPLATE_ERROR
    assert encoder.encode(request(text="a")).token_ids


def test_a_broken_tokenizer_file_is_named(tmp_path):
    folder = make_tiny_llama(tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(TokenloomError, match=r"tokenizer\.json cannot be read"):
        load(folder)


def test_frames_survive_the_pipe():
    stream = io.BytesIO(frame(ENCODE, b"abc") + frame(READY) + frame(ENCODED, b"cut short")[:-1])
    assert [read_frame(stream), read_frame(stream), read_frame(stream)] == [(ENCODE, b"abc"), (READY, b""), None]


def test_every_answer_is_a_frame_even_a_refusal(encoder):
    kind, payload = read_frame(io.BytesIO(answer(encoder, request(text="a").SerializeToString()))) or (-1, b"")
    assert kind == ENCODED
    assert tokenizer_pb2.EncodeResponse.FromString(payload).token_ids == pack_ids([3 + ord("a")])
    kind, payload = read_frame(io.BytesIO(answer(encoder, request(text="").SerializeToString()))) or (-1, b"")
    assert kind == REFUSED
    assert common_pb2.Error.FromString(payload).code == ErrorCode.EMPTY_PROMPT.spec.code


def test_the_process_serves_frames_and_ends_with_its_input(tiny_llama_dir):
    command = [sys.executable, "-m", "services.tokenizer.encoder_process", str(tiny_llama_dir), str(1 << 28)]
    sent = frame(ENCODE, request(text="ab").SerializeToString()) + frame(ENCODE, request(text="").SerializeToString())
    done = subprocess.run(command, input=sent, capture_output=True, timeout=60, check=True)
    stream = io.BytesIO(done.stdout)
    kinds = [found[0] for found in iter(lambda: read_frame(stream), None) if found is not None]
    assert kinds == [READY, ENCODED, REFUSED]


def test_neither_service_nor_encoder_process_imports_torch():
    check = (
        "import sys, services.tokenizer.__main__, services.tokenizer.encoder_process;"
        "found = {'torch', 'transformers', 'triton', 'gguf', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_text_that_cannot_fit_is_refused_without_encoding_it(encoder, monkeypatch):
    monkeypatch.setattr(encoder, "_encode_text", lambda *_, **__: pytest.fail("it was encoded"))
    error = refusal(encoder, request(text="a" * 10_000_000, max_tokens=100))
    assert (error.code, error.param) == (ErrorCode.PROMPT_TOO_LONG, "prompt")
    assert "at most 100" in error.message


def test_a_long_text_that_may_fit_is_encoded(encoder):
    text = "hall " * 200
    assert unpack_ids(encoder.encode(request(text=text, max_tokens=1000)).token_ids)


@pytest.mark.parametrize("change", [{"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {"type": "WhitespaceSplit"}}])
def test_where_characters_may_vanish_nothing_is_said_of_the_longest_token(tiny_llama_dir, change):
    parts = {**json.loads((tiny_llama_dir / "tokenizer.json").read_text()), **change}
    assert longest_token(Tokenizer.from_str(json.dumps(parts))) == 0


def test_a_token_that_swallows_the_space_around_it_may_stand_for_any_number_of_characters(tiny_llama_dir):
    tokenizer = load_tokenizer(ModelDirectory(tiny_llama_dir))
    assert longest_token(tokenizer) == max(map(len, tokenizer.get_vocab()))
    tokenizer.add_special_tokens([AddedToken("<pad>", rstrip=True)])
    assert longest_token(tokenizer) == 0
