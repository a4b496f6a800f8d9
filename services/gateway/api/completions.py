"""POST /v1/completions."""

from __future__ import annotations

from services.gateway.api.completion_writer import CompletionWriter
from services.gateway.api.decode import decode_completion
from services.gateway.api.endpoint import Api
from services.gateway.api.models import resolve_model
from services.gateway.api.policy import Policy
from services.gateway.api.validate import want_completion
from services.gateway.api.writers import Form, Writer
from services.gateway.mesh import Mesh
from services.gateway.wanted import Wanted


def _read(body: bytearray, mesh: Mesh, label: str) -> Wanted:
    request = decode_completion(body)
    return want_completion(request, resolve_model(mesh.config, request.model), label, Policy.of(mesh.config))


def _writer(form: Form, _mesh: Mesh) -> Writer:
    return CompletionWriter(form)


COMPLETIONS = Api("/v1/completions", "text_completion", "cmpl", _read, _writer)
