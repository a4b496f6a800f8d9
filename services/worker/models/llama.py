"""The Llama family (Touvron et al. 2023; Grattafiori et al. 2024): pre-norm blocks, rotary positions, grouped queries, gated MLP.

    hidden -> [norm -> qkv -> rope, cache -> attention -> o] -> [norm -> gate, up -> silu(gate) * up -> down] -> ... -> norm -> head

Written against Ops only. Query, key and value weights are packed as one product, gate and up as another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from libs.errors import TokenloomError
from libs.models.llama_config import LlamaConfig
from services.worker.models.rope import rotation_table
from services.worker.ops.base import HeadShape, LayerCache, Ops, PackedLinear, StepInputs, Value
from services.worker.ops.quantized import QuantizedWeight, Weight, stacked

# Gives a weight by its Hugging Face name, in the executor's dtype; None where the file has none. Weights of products may be integers. Those
# of a head that is tied to the embedding are under the head's own name; floats under it are not asked for.
WeightSource = Callable[[str], Weight | None]


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Llama:
    """A loaded model; `forward` is one step over all its rows."""

    def __init__(self, config: LlamaConfig, weights: WeightSource, ops: Ops, max_positions: int) -> None:
        """Takes the weights it needs out of `weights`. Raises KeyError when one is missing, ValueError when a shape is wrong."""
        self._ops = ops
        self._epsilon = config.rms_norm_eps
        self._heads = HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self._scale = config.head_dim**-0.5
        self._rotations = rotation_table(config, max_positions)
        need = _Needed(weights)
        self._embedding = need("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [_layer(config, need, ops, index) for index in range(config.num_hidden_layers)]
        self._norm = need("model.norm.weight", (config.hidden_size,))
        tied = config.tie_word_embeddings
        head = need.tied_head(self._embedding) if tied else need.product("lm_head.weight", (config.vocab_size, config.hidden_size))
        self._head = _packed(ops, ["lm_head"], head, None)

    def forward(self, inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        """Computes every token of the step, writes its K and V into `cache` (one entry a layer); logits, float32 [S, vocabulary]."""
        ops, heads = self._ops, self._heads
        x = ops.embedding(inputs.token_ids, self._embedding)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            qkv = ops.linear(ops.norm(x, layer.input_norm, self._epsilon), layer.qkv)
            queries = ops.rope_and_cache(qkv, self._rotations, layer_cache, inputs, heads)
            attended = ops.attention(queries, layer_cache, inputs, heads, self._scale)
            if layer is self._layers[-1]:  # all keys and values are in the cache: what follows is for the logits alone
                attended, x = ops.pick(attended, inputs.sampled), ops.pick(x, inputs.sampled)
            x = ops.linear(attended, layer.output, residual=x)
            inner = ops.linear(ops.norm(x, layer.post_norm, self._epsilon), layer.gate_up)
            x = ops.linear(inner, layer.down, residual=x)
        return ops.head(ops.norm(x, self._norm, self._epsilon), inputs.sampled, self._head)


class _Needed:
    """A weight source that insists on presence and shape."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A weight that must be floats, in memory of its own: the model keeps it, and a view would keep the whole file mapped."""
        weight = self.product(name, shape)
        if isinstance(weight, QuantizedWeight):
            raise ValueError(f"{name} is integers, where only weights of products may be")
        return weight.clone()

    def product(self, name: str, shape: tuple[int, ...]) -> Weight:
        """A product's weight."""
        weight = self._weights(name)
        if weight is None:
            raise KeyError(f"the weights hold no {name}")
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, the configuration asks for {shape}")
        return weight

    def tied_head(self, embedding: torch.Tensor) -> Weight:
        """The embedding as the head's weight. A copy in the file does not count; integers are the loader's own, and do."""
        weight = self._weights("lm_head.weight")
        return weight if isinstance(weight, QuantizedWeight) else embedding

    def joined(self, names: Sequence[str], widths: Sequence[int], inputs: int, *, bias: bool) -> tuple[Weight, torch.Tensor | None]:
        """Weights [sum of widths, inputs] of several products over the same input, and their biases."""
        weight = stacked([self.product(f"{name}.weight", (width, inputs)) for name, width in zip(names, widths, strict=True)])
        if not bias:
            return weight, None
        return weight, torch.cat([self(f"{name}.bias", (width,)) for name, width in zip(names, widths, strict=True)])


def _packed(ops: Ops, names: Sequence[str], weight: Weight, bias: torch.Tensor | None, *, gated: bool = False) -> PackedLinear:
    """Raises TokenloomError, with the products' names, for a weight that the executor cannot take."""
    try:
        return ops.pack_linear(weight, bias, gated=gated)
    except TokenloomError as error:
        raise TokenloomError(error.code, f"{', '.join(names)}: {error.message}") from error


def _layer(config: LlamaConfig, need: _Needed, ops: Ops, index: int) -> Layer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def packed(names: Sequence[str], widths: Sequence[int], inputs: int, bias: bool, gated: bool = False) -> PackedLinear:
        return _packed(ops, names, *need.joined(names, widths, inputs, bias=bias), gated=gated)

    return Layer(
        input_norm=need(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=packed([f"{attention}.{name}_proj" for name in "qkv"], [queries, keys, keys], hidden, config.attention_bias),
        output=packed([f"{attention}.o_proj"], [hidden], queries, config.attention_bias),
        post_norm=need(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=packed([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, config.mlp_bias, gated=True),
        down=packed([f"{mlp}.down_proj"], [hidden], inner, config.mlp_bias),
    )
