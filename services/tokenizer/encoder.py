"""One prompt from text, chat or ids to token ids and block hashes. Runs inside an encoder process, one prompt at a time."""

from __future__ import annotations

import json
import time
from typing import Any

from tokenizers import Tokenizer

from libs.blocks import block_hashes
from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.packing import count_ids, pack_ids, unpack_ids
from services.tokenizer.templates import ChatTemplate
from tokenloom.tokenizer.v1 import tokenizer_pb2


class Encoder:
    """A model's tokenizer (as load_tokenizer gives it) and its template."""

    def __init__(self, model: ModelDirectory, tokenizer: Tokenizer) -> None:
        """Raises TokenloomError(TEMPLATE_ERROR) when the template is broken."""
        self._tokenizer = tokenizer
        self._fingerprint = model.tokenizer_fingerprint
        self._vocab_size = model.vocab_size
        self._longest_token = longest_token(tokenizer)
        source = model.chat_template
        self._template = ChatTemplate(source, model.special_tokens) if source is not None else None

    def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """The response, with queue_us left 0. Raises TokenloomError as TokenizerService.Encode says."""
        began = time.monotonic_ns()
        kind = request.WhichOneof("input")
        text = self._render(request.chat) if kind == "chat" else request.text
        rendered = time.monotonic_ns()
        self._refuse_far_too_long(text, kind, request.max_tokens)
        ids = _checked_ids(request.token_ids.ids) if kind == "token_ids" else self._encode_text(text, add_special_tokens=kind == "text")
        self._check(ids, kind, request.max_tokens)
        hashes = b"".join(block_hashes(ids, request.hash_salt))
        return tokenizer_pb2.EncodeResponse(
            token_ids=pack_ids(ids),
            block_hashes=hashes,
            # 0 would say that nothing was rendered.
            render_us=max(1, (rendered - began) // 1000) if kind == "chat" else 0,
            encode_us=(time.monotonic_ns() - rendered) // 1000,
            tokenizer_fingerprint=self._fingerprint,
        )

    def _render(self, chat: tokenizer_pb2.Chat) -> str:
        if self._template is None:
            raise TokenloomError(ErrorCode.TEMPLATE_ERROR, "the model has no chat template; use /v1/completions", param="messages")
        return self._template.render(
            _json(chat.messages_json, list, "messages"),
            tools=_json(chat.tools_json, list, "tools"),
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=_json(chat.template_kwargs_json, dict, "chat_template_kwargs"),
        )

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_scalar_values(text), add_special_tokens=add_special_tokens).ids
        return ids

    def _refuse_far_too_long(self, text: str, kind: str | None, max_tokens: int) -> None:
        """Raises TokenloomError(PROMPT_TOO_LONG) for a text that cannot fit, before megabytes cost an encoder's time and memory."""
        if not max_tokens or not self._longest_token:
            return
        least = -(-len(text) // self._longest_token)
        if least > max_tokens:
            raise TokenloomError(
                ErrorCode.PROMPT_TOO_LONG,
                f"the prompt has at least {least} tokens, and at most {max_tokens} are allowed",
                param="messages" if kind == "chat" else "prompt",
            )

    def _check(self, ids: list[int], kind: str | None, max_tokens: int) -> None:
        if kind is None:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, "the request has no input")
        if not ids:
            raise TokenloomError(ErrorCode.EMPTY_PROMPT, "the prompt is empty", param="messages" if kind == "chat" else "prompt")
        if max_tokens and len(ids) > max_tokens:
            raise TokenloomError(
                ErrorCode.PROMPT_TOO_LONG,
                f"the prompt has {len(ids)} tokens, and at most {max_tokens} are allowed",
                param="messages" if kind == "chat" else "prompt",
            )
        check_range(ids, self._vocab_size)


def load_tokenizer(model: ModelDirectory) -> Tokenizer:
    """The model's tokenizer, without the truncation and padding that its file may carry from training.

    Raises TokenloomError(INVALID_REQUEST) when the file cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(model.tokenizer_file))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{model.tokenizer_file} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def longest_token(tokenizer: Tokenizer) -> int:
    """Most characters of text that one token stands for; 0 where some may vanish (normalizers, tokens that swallow space)."""
    parts = json.loads(tokenizer.to_str())
    pre_tokenizer = json.dumps(parts.get("pre_tokenizer"))
    keeps_all = parts.get("normalizer") is None and "ByteLevel" in pre_tokenizer and '"Removed"' not in pre_tokenizer
    swallows = any(token["lstrip"] or token["rstrip"] for token in parts.get("added_tokens") or ())
    return max(map(len, tokenizer.get_vocab()), default=0) if keeps_all and not swallows else 0


def check_range(ids: list[int], vocab_size: int) -> None:
    """Raises TokenloomError(INVALID_REQUEST) naming the first id that is not below `vocab_size`."""
    if max(ids, default=0) >= vocab_size:
        first = next(token_id for token_id in ids if token_id >= vocab_size)
        raise TokenloomError(
            ErrorCode.INVALID_REQUEST, f"token id {first} is out of range: the vocabulary has {vocab_size} ids", param="prompt"
        )


def _checked_ids(data: bytes) -> list[int]:
    if len(data) != 4 * count_ids(data):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{len(data)} bytes are no whole number of 4-byte token ids", param="prompt")
    return unpack_ids(data)


def _json(data: bytes, kind: type, param: str) -> Any:
    """The JSON value of `data`, empty if `data` is. Raises TokenloomError(INVALID_REQUEST) when it is not of `kind`."""
    if not data:
        return kind()
    try:
        value = json.loads(data)
    except ValueError as error:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{param} is no valid JSON: {error}", param=param) from error
    if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(item, dict) for item in value)):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{param} has the wrong type", param=param)
    return value


def _scalar_values(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text: pairs are joined, lone halves become U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
