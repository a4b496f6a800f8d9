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
from libs.helper_frames import ANSWER, ASK, READY, REFUSED, answered, frame, read_frame
from libs.models.directory import ModelDirectory
from libs.packing import pack_ids, unpack_ids
from services.tokenizer.encoder import MAX_CLIENT_TEMPLATES, MAX_TEMPLATE_CHARS, Encoder, load_tokenizer, longest_token
from services.tokenizer.encoder_process import answerer
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


ADD, NONE = tokenizer_pb2.SPECIAL_TOKENS_ADD, tokenizer_pb2.SPECIAL_TOKENS_NONE


@pytest.fixture(scope="module")
def bos_encoder(tmp_path_factory):
    """Its tokenizer begins every text with id 1, if special tokens are added."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("special") / "bos")
    special = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json() | {"post_processor": template}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return load(folder)


@pytest.mark.parametrize(
    ("message", "begins"),
    [
        (request(text="a"), True),
        (request(text="a", special_tokens=ADD), True),
        (request(text="a", special_tokens=NONE), False),
        (request(text="", special_tokens=ADD), True),
        (chat(), False),
    ],
)
def test_special_tokens_are_added_to_text_unless_the_caller_says_otherwise(bos_encoder, message, begins):
    assert (unpack_ids(bos_encoder.encode(message).token_ids)[0] == 1) is begins


def test_special_tokens_can_be_added_to_a_chat(bos_encoder):
    message = chat()
    message.special_tokens = ADD
    assert unpack_ids(bos_encoder.encode(message).token_ids)[0] == 1


@pytest.mark.parametrize("keep", [1, 5, 16, 17, 100])
def test_the_end_of_a_prompt_is_kept_and_hashed(encoder, keep):
    text = "x" * 40
    whole = unpack_ids(encoder.encode(request(text=text)).token_ids)
    cut = encoder.encode(request(text=text, keep_last=keep, max_tokens=40, hash_salt=b"s"))
    assert unpack_ids(cut.token_ids) == whole[-keep:]
    assert cut.block_hashes == b"".join(block_hashes(whole[-keep:], b"s"))


def test_a_prompt_is_cut_before_its_length_is_checked(encoder):
    assert len(unpack_ids(encoder.encode(request(text="x" * 1000, keep_last=8, max_tokens=8)).token_ids)) == 8
    ids = ids_request(pack_ids([5, 6, 7]))
    ids.keep_last, ids.max_tokens = 2, 2
    assert unpack_ids(encoder.encode(ids).token_ids) == [6, 7]
    assert refusal(encoder, request(text="x" * 1000, keep_last=9, max_tokens=8)).code is ErrorCode.PROMPT_TOO_LONG


def test_a_bad_word_is_spelled_as_a_text_begins_with_it_and_as_it_follows_a_blank(encoder, tiny_llama_dir):
    tokenizer = load_tokenizer(ModelDirectory(tiny_llama_dir))
    response = encoder.encode(request(text="a", bad_words=["the", "  the", "zz"]))
    the, blank_the, zz = (tokenizer.encode(text).ids for text in ("the", " the", "zz"))
    assert len(blank_the) == 1
    # After a blank "zz" is spelled as at the start of a text, and a ban of that holds there too.
    assert tokenizer.encode(" zz").ids[1:] == zz
    assert [unpack_ids(ids) for ids in response.bad_words] == [the, blank_the, the, blank_the, zz]


def test_bad_words_are_never_spelled_with_special_tokens(bos_encoder):
    assert [unpack_ids(ids) for ids in bos_encoder.encode(request(text="a", bad_words=["zz"])).bad_words] == [[3 + ord("z")] * 2]


@pytest.mark.parametrize("word", ["", " "])
def test_an_empty_bad_word_is_refused(encoder, word):
    error = refusal(encoder, request(text="a", bad_words=["x", word]))
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "bad_words")
    assert "bad_words[1]" in error.message


def test_the_text_of_a_prompt_is_what_its_ids_spell(encoder):
    assert encoder.encode(request(text="the hall é", want_text=True)).text == "the hall é"
    assert encoder.encode(request(text="the hall")).text == ""
    ids = ids_request(pack_ids([1, 3 + ord("a"), 2]))
    ids.want_text = True
    assert encoder.encode(ids).text == "<|im_start|>a<|im_end|>"
    assert encoder.encode(request(text="abcdef", keep_last=2, want_text=True)).text == "ef"


def test_a_model_s_own_template_for_tools_is_used_where_there_are_tools(tmp_path):
    folder = make_tiny_llama(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].type }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    encoder = load(folder)
    assert [spelled(encoder, chat(tools_json=tools)) for tools in (b"", b"[]", b'[{"type": "function"}]')] == ["plain", "plain", "function"]


def spelled(encoder, message) -> str:
    message.want_text = True
    return encoder.encode(message).text


def test_a_client_s_template_takes_the_place_of_the_model_s(encoder):
    response = encoder.encode(
        request(chat=tokenizer_pb2.Chat(messages_json=USER, template="{{ bos_token }}<{{ messages[0].content }}>"), want_text=True)
    )
    assert response.text == "<|im_start|><the hall>"


def test_client_templates_stay_compiled_and_their_number_is_bounded(tiny_llama_dir):
    encoder = load(tiny_llama_dir)
    for number in [*range(40), 39, 38]:
        assert unpack_ids(encoder.encode(chat(template=f"T{number:02}")).token_ids) == [3 + byte for byte in f"T{number:02}".encode()]
    assert len(encoder._clients_templates) == MAX_CLIENT_TEMPLATES
    assert list(encoder._clients_templates)[-2:] == ["T39", "T38"]


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{" + "(" * 30_000, "{% if x %}" * 2000 + "{% endif %}" * 2000, "x" * (MAX_TEMPLATE_CHARS + 1)]
)
def test_a_client_s_broken_template_is_refused_by_name(encoder, source):
    error = refusal(encoder, chat(template=source))
    assert error.param == "chat_template"
    assert error.code in (ErrorCode.TEMPLATE_ERROR, ErrorCode.INVALID_REQUEST)


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


def test_every_answer_is_a_frame_even_a_refusal(encoder):
    kind, payload = read_frame(io.BytesIO(answered(answerer(encoder), request(text="a").SerializeToString()))) or (-1, b"")
    assert kind == ANSWER
    assert tokenizer_pb2.EncodeResponse.FromString(payload).token_ids == pack_ids([3 + ord("a")])
    kind, payload = read_frame(io.BytesIO(answered(answerer(encoder), request(text="").SerializeToString()))) or (-1, b"")
    assert kind == REFUSED
    assert common_pb2.Error.FromString(payload).code == ErrorCode.EMPTY_PROMPT.spec.code


def test_the_process_serves_frames_and_ends_with_its_input(tiny_llama_dir):
    command = [sys.executable, "-m", "services.tokenizer.encoder_process", str(tiny_llama_dir), str(1 << 28)]
    sent = frame(ASK, request(text="ab").SerializeToString()) + frame(ASK, request(text="").SerializeToString())
    done = subprocess.run(command, input=sent, capture_output=True, timeout=60, check=True)
    stream = io.BytesIO(done.stdout)
    kinds = [found[0] for found in iter(lambda: read_frame(stream), None) if found is not None]
    assert kinds == [READY, ANSWER, REFUSED]


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
