"""One prompt from text, chat or ids to token ids and block hashes. Runs inside an encoder process, one prompt at a time."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from libs.blocks import block_hashes
from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.packing import count_ids, pack_ids, unpack_ids
from services.tokenizer.templates import ChatTemplate
from tokenloom.tokenizer.v1 import tokenizer_pb2

# Of the templates that requests bring: the longest, in characters, and how many stay compiled.
MAX_TEMPLATE_CHARS = 1 << 18
MAX_CLIENT_TEMPLATES = 16

SpecialTokens = tokenizer_pb2.SpecialTokens


class Encoder:
    """A model's tokenizer (as load_tokenizer gives it) and its template."""

    def __init__(self, model: ModelDirectory, tokenizer: Tokenizer) -> None:
        """Raises TokenloomError(TEMPLATE_ERROR) when the template is broken."""
        self._tokenizer = tokenizer
        self._fingerprint = model.tokenizer_fingerprint
        self._vocab_size = model.vocab_size
        self._longest_token = longest_token(tokenizer)
        self._special_tokens = model.special_tokens
        self._template = _compiled(model.chat_template, model.special_tokens)
        self._tool_template = _compiled(model.tool_template, model.special_tokens) or self._template
        self._clients_templates: OrderedDict[str, ChatTemplate] = OrderedDict()

    def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """The response, with queue_us left 0. Raises TokenloomError as TokenizerService.Encode says."""
        began = time.monotonic_ns()
        kind = request.WhichOneof("input")
        text = self._render(request.chat) if kind == "chat" else request.text
        rendered = time.monotonic_ns()
        ids = self._ids(request, kind, text)
        self._check(ids, kind, request.max_tokens)
        hashes = b"".join(block_hashes(ids, request.hash_salt))
        return tokenizer_pb2.EncodeResponse(
            token_ids=pack_ids(ids),
            block_hashes=hashes,
            # 0 would say that nothing was rendered.
            render_us=max(1, (rendered - began) // 1000) if kind == "chat" else 0,
            encode_us=(time.monotonic_ns() - rendered) // 1000,
            tokenizer_fingerprint=self._fingerprint,
            bad_words=self._bad_words(request.bad_words),
            text=self._tokenizer.decode(ids, skip_special_tokens=False) if request.want_text else "",
            tokens=[self._tokenizer.id_to_token(token_id) or "" for token_id in ids] if request.want_tokens else (),
        )

    def _ids(self, request: tokenizer_pb2.EncodeRequest, kind: str | None, text: str) -> list[int]:
        """The ids of the prompt, cut to its end where that is wanted."""
        if not request.keep_last:  # what is cut cannot be too long
            self._refuse_far_too_long(text, kind, request.max_tokens)
        if kind == "token_ids":
            ids = _checked_ids(request.token_ids.ids)
        else:
            special = request.special_tokens
            added = special == SpecialTokens.SPECIAL_TOKENS_ADD or (special == SpecialTokens.SPECIAL_TOKENS_UNSPECIFIED and kind == "text")
            ids = self._encode_text(text, add_special_tokens=added)
        return ids[-request.keep_last :] if request.keep_last else ids

    def _render(self, chat: tokenizer_pb2.Chat) -> str:
        tools = _json(chat.tools_json, list, "tools")
        own = self._tool_template if tools else self._template
        template = self._clients_template(chat.template) if chat.template else own
        if template is None:
            raise TokenloomError(ErrorCode.TEMPLATE_ERROR, "the model has no chat template; use /v1/completions", param="messages")
        return template.render(
            _json(chat.messages_json, list, "messages"),
            tools=tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=_json(chat.template_kwargs_json, dict, "chat_template_kwargs"),
        )

    def _clients_template(self, source: str) -> ChatTemplate:
        """A template that a request brought, compiled; the last few stay compiled."""
        if len(source) > MAX_TEMPLATE_CHARS:
            message = f"chat_template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are allowed"
            raise TokenloomError(ErrorCode.INVALID_REQUEST, message, param="chat_template")
        template = self._clients_templates.pop(source, None)
        if template is None:
            try:
                template = ChatTemplate(source, self._special_tokens, owner="chat_template")
            except TokenloomError as error:
                error.param = "chat_template"
                raise
            if len(self._clients_templates) >= MAX_CLIENT_TEMPLATES:
                self._clients_templates.popitem(last=False)
        self._clients_templates[source] = template
        return template

    def _bad_words(self, words: Sequence[str]) -> list[bytes]:
        """The spellings of words that must not occur: as a text begins with it and, where that is other, as it follows a blank.

        A spelling that ends with the word's first one is left out: whoever cannot write the one cannot write the other.
        Raises TokenloomError(INVALID_REQUEST) for a word that is empty.
        """
        spellings: list[bytes] = []
        for index, word in enumerate(words):
            bare = word.lstrip(" ")
            first, *others = (self._encode_text(spelled, add_special_tokens=False) for spelled in (bare, f" {bare}"))
            if not bare or not first:
                raise TokenloomError(ErrorCode.INVALID_REQUEST, f"bad_words[{index}] must not be empty", param="bad_words")
            spellings += [pack_ids(ids) for ids in (first, *others) if ids is first or ids[-len(first) :] != first]
        return spellings

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


def _compiled(source: str | None, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, special_tokens)


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
