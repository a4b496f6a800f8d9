"""Which weights of a model become integers, and from what: the reader that `--quantization` puts before a model's own.

Norms, biases and the embedding stay floats. The head takes 8 bits in either form: it is one product of many, and an error of its own is an
error of every logit. Weights that are one product once the model has joined them take one form.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch

from libs.telemetry.logs import get_logger
from services.worker.ops.quantized import QuantizedWeight, Weight
from services.worker.quantizing import grouped, per_channel
from services.worker.weights import Source

_log = get_logger(__name__)
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_PRODUCT = "_proj.weight"
# Products over the same input, which models compute as one.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
        """`read`: floats by name; `tied_head`: the head is the embedding's, whatever the file holds under its name."""
        self._source = source
        self._read = read
        self._quantization = quantization
        self._tied_head = tied_head
        self._rounded: Counter[str] = Counter()
        self._seconds = 0.0

    def __call__(self, name: str) -> Weight | None:
        """The weight of a Hugging Face name; None: there is none. Raises ValueError, with the name, for one that cannot be integers."""
        if name != _HEAD and not name.endswith(_PRODUCT):
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
        if self._quantization == "int4" and name != _HEAD and (weight := self._stored(name)) is not None:
            self._rounded["int4 as stored"] += 1
            return weight
        floats = self._read(_EMBEDDING if name == _HEAD and self._tied_head else name)
        if floats is None or floats.dim() != 2:
            return floats  # the model says what is wrong
        eight = self._quantization == "int8" or name == _HEAD
        self._rounded["int8" if eight else "int4"] += 1
        return per_channel(floats) if eight else grouped(floats)

    def _stored(self, name: str) -> QuantizedWeight | None:
        """The weight's own groups, if all that it is joined with are stored so."""
        part = name.removesuffix(".weight").rpartition(".")[2]
        joined = next((parts for parts in _JOINED if part in parts), (part,))
        names = [name.replace(part, other) for other in joined]
        return self._source.groups(name) if all(self._source.has_groups(other) for other in names) else None
