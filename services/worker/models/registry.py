"""Which class computes which architecture of config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from libs.errors import ErrorCode, TokenloomError
from libs.models.llama_config import LlamaConfig
from services.worker.models.llama import Llama, WeightSource
from services.worker.ops.base import LayerCache, Ops, StepInputs, Value


class Model(Protocol):
    """A loaded model."""

    def forward(self, inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        """Computes every token of the step, writes its K and V into `cache`; logits, float32 [S, vocabulary]."""
        ...


_FAMILIES = {"LlamaForCausalLM": Llama}


def build(config: LlamaConfig, weights: WeightSource, ops: Ops, max_positions: int) -> Model:
    """The model that config.json names, for sequences of `max_positions` tokens. Raises TokenloomError(UNSUPPORTED) for others."""
    for architecture in config.architectures:
        family = _FAMILIES.get(architecture)
        if family is not None:
            return family(config, weights, ops, max_positions)
    named = ", ".join(config.architectures) or "none named"
    raise TokenloomError(ErrorCode.UNSUPPORTED, f"the model's architecture ({named}) is not supported; supported: {', '.join(_FAMILIES)}")
