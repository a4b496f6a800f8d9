"""Which weights of a model become integers, and from what: the reader that `--quantization` puts before a model's own.

Norms, biases and the embedding stay floats. The head takes 8 bits in either form: it is one product of many, and an error of its own is an
error of every logit. In 4 bits a GGUF's own groups are taken as stored, whatever a weight is joined with: rounded ones have the same form.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch

from libs.models.llama_config import LlamaConfig
from libs.telemetry.logs import get_logger
from services.worker.ops.quantized import GROUP, Weight
from services.worker.quantizing import WAY_OUT, grouped, per_channel
from services.worker.weights import Source

_log = get_logger(__name__)
# A head's name, of one that is tied to the embedding too.
HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_PRODUCT = "_proj.weight"


def check_widths(config: LlamaConfig, quantization: Literal["int8", "int4"]) -> None:
    """Raises ValueError for a model with products whose inputs are no whole groups, where the form has groups."""
    if quantization == "int8":
        return
    widths = {
        "hidden_size": config.hidden_size,
        "num_attention_heads * head_dim": config.num_attention_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    for name, width in widths.items():
        if width % GROUP:
            raise ValueError(f"{name} is {width}, no multiple of {GROUP}, the inputs that share a scale in 4 bits; {WAY_OUT}")


class QuantizedReader:
    """A weight by its name, integers where it is a product's. Belongs to the thread that loads."""

    def __init__(
        self,
        source: Source,
        read: Callable[[str], torch.Tensor | None],
        quantization: Literal["int8", "int4"],
        *,
        tied_head: bool,
    ) -> None:
        """`read`: floats by name, of a model that check_widths let pass.

        `tied_head`: the head is the embedding's, whatever the file holds under its name.
        """
        self._source = source
        self._read = read
        self._quantization = quantization
        self._tied_head = tied_head
        self._rounded: Counter[str] = Counter()
        self._seconds = 0.0

    def __call__(self, name: str) -> Weight | None:
        """The weight of a Hugging Face name; None: there is none. Raises ValueError, with the name, for one that cannot be integers."""
        if name != HEAD and not name.endswith(_PRODUCT):
            return self._read(name)
        started = time.monotonic()
        try:
            return self._product(name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        finally:
            self._seconds += time.monotonic() - started

    def log(self) -> None:
        """Says what became integers, from what, and how long that took, reading included."""
        _log.info("weights quantised", to=self._quantization, products=dict(self._rounded), seconds=round(self._seconds, 2))

    def _product(self, name: str) -> Weight | None:
        if self._quantization == "int4" and name != HEAD and self._source.has_groups(name):
            self._rounded["int4 as stored"] += 1
            return self._source.groups(name)
        floats = self._read(_EMBEDDING if name == HEAD and self._tied_head else name)
        if floats is None or floats.dim() != 2:
            return floats  # the model says what is wrong
        eight = self._quantization == "int8" or name == HEAD
        if not eight and floats.shape[1] % GROUP:
            return floats  # not the configuration's width either: the model says so
        self._rounded["int8" if eight else "int4"] += 1
        return per_channel(floats) if eight else grouped(floats)
