"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace

from services.gateway.api.chat_writer import ChatWriter
from services.gateway.api.decode import decode_chat
from services.gateway.api.endpoint import Api
from services.gateway.api.messages import MessageReader, new_call_id, new_mistral_call_id
from services.gateway.api.models import resolve_model
from services.gateway.api.policy import Policy
from services.gateway.api.validate import want_chat
from services.gateway.api.writers import Form, Writer
from services.gateway.mesh import Mesh
from services.gateway.parsers.factory import new_parser, reasoning_format
from services.gateway.terms import Thinking, keeps_special_tokens, thinking_of
from services.gateway.wanted import Wanted


def _read(body: bytearray, mesh: Mesh, label: str) -> Wanted:
    request = decode_chat(body)
    return want_chat(request, resolve_model(mesh.config, request.model), label, Policy.of(mesh.config))


def _writer(form: Form, mesh: Mesh) -> Writer:
    shown, tokens = form.wanted.shown, mesh.tokenizers
    thinking = thinking_of(form.wanted, form.choices[0].prompt_ids, tokens.table)
    if thinking is Thinking.CLOSED:
        shown = replace(shown, reasoning=None)
    # Special tokens that stay in the text for the parser's sake alone are nothing for the client.
    for_parser = keeps_special_tokens(form.wanted, tokens) and not shown.keep_special_tokens
    hidden = tokens.special_tokens if for_parser else frozenset[str]()
    format_ = (shown.tools.format if shown.tools is not None else "") or tokens.tool_format
    new_id = new_mistral_call_id if format_ == "mistral" else new_call_id

    # A constraint waits for the reasoning's end (terms.constraint_of): what comes before is reasoning, however it begins.
    opened = thinking is Thinking.OPENED or form.wanted.constraint is not None

    def new_reader() -> MessageReader:
        parser = new_parser(shown, tokens.tool_format, hidden, reasoning_opened=opened)
        return MessageReader(parser, new_id, show_reasoning=shown.include_reasoning)

    return ChatWriter(form, new_reader, reasoning_format(shown.reasoning).end if shown.reasoning is not None else None)


CHAT = Api("/v1/chat/completions", "chat", "chatcmpl", _read, _writer)
