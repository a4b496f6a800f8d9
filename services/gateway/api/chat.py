"""POST /v1/chat/completions."""

from __future__ import annotations

from services.gateway.api.chat_writer import ChatWriter
from services.gateway.api.decode import decode_chat
from services.gateway.api.endpoint import Api
from services.gateway.api.messages import MessageReader
from services.gateway.api.models import resolve_model
from services.gateway.api.policy import Policy
from services.gateway.api.validate import want_chat
from services.gateway.api.writers import Form, Writer
from services.gateway.mesh import Mesh
from services.gateway.wanted import Wanted


def _read(body: bytearray, mesh: Mesh, label: str) -> Wanted:
    request = decode_chat(body)
    return want_chat(request, resolve_model(mesh.config, request.model), label, Policy.of(mesh.config))


def _writer(form: Form, _mesh: Mesh) -> Writer:
    return ChatWriter(form, lambda: MessageReader(show_reasoning=form.wanted.shown.include_reasoning))


CHAT = Api("/v1/chat/completions", "chat", "chatcmpl", _read, _writer)
