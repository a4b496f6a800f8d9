"""The served model's names: which one a request means, and GET /v1/models."""

from __future__ import annotations

from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.responses import ModelCard, ModelList
from services.gateway.config import GatewayConfig
from services.gateway.mesh import Mesh


def resolve_model(config: GatewayConfig, asked: str | None) -> str:
    """The name a request means; the first served one when it names none. Raises TokenloomError MODEL_NOT_FOUND."""
    if asked is None:
        return config.model_names[0]
    if asked not in config.model_names:
        raise TokenloomError(ErrorCode.MODEL_NOT_FOUND, f"The model {asked[:256]!r} does not exist", param="model")
    return asked


def model_list(mesh: Mesh) -> ModelList:
    """All served names; every one is the same model."""
    return ModelList(data=[_card(mesh, name) for name in mesh.config.model_names])


def model_card(mesh: Mesh, name: str) -> ModelCard:
    """One served name. Raises TokenloomError MODEL_NOT_FOUND."""
    return _card(mesh, resolve_model(mesh.config, name))


def _card(mesh: Mesh, name: str) -> ModelCard:
    facts = mesh.session.facts
    return ModelCard(
        id=name,
        created=mesh.started_unix_ns // 1_000_000_000,
        root=mesh.config.model_names[0],
        max_model_len=facts.max_model_len if facts is not None else None,
    )
