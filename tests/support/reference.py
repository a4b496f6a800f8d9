"""transformers' own model over our weights, in float32: what greedy decoding must yield."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from libs.models.directory import ModelDirectory
from services.worker.weights import open_source

# Logits that differ by less are a tie: float32 sums in another order than transformers' may decide it either way.
NEAR_TIE = 5e-4


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A token that is not transformers' greedy one: its index in the output, both ids, and by how much transformers' logit leads it."""

    index: int
    got: int
    best: int
    lead: float


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: two of its threads on a machine where others compute too take up to eight times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Reference:
    """LlamaForCausalLM of the model directory."""

    def __init__(self, model_dir: Path) -> None:
        directory = ModelDirectory(model_dir)
        config = LlamaConfig(**json.loads((model_dir / "config.json").read_text()))
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config).to(torch.float32)
        self.model.to_empty(device="cpu")
        source = open_source(tuple(directory.weight_files()), directory.config)
        state = {}
        for name in self.model.state_dict():
            tensor = source.tensor(name)
            if tensor is not None:
                state[name] = tensor.to(torch.float32)
        missing = self.model.load_state_dict(state, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing
        self.model.tie_weights()
        # Buffers that no checkpoint holds (rotary frequencies) were made on the meta device: make them again.
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config)
        self.model.eval()
        self._checked: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens by transformers' generate, never stopping early."""
        with torch.inference_mode(), one_thread():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return list(out[0, len(prompt) :].tolist())

    def disagreements(self, prompt: list[int], ids: list[int]) -> list[Disagreement]:
        """Where `ids` is not the greedy continuation of `prompt`: each token is compared with the best one after exactly those before it.

        None at all means that `ids` is what generate yields; one pass over all tokens costs a tenth of generating them.
        """
        with torch.inference_mode(), one_thread():
            logits = self.model(torch.tensor([[*prompt, *ids[:-1]]]), logits_to_keep=len(ids)).logits[0]
        best = logits.argmax(-1).tolist()
        return [
            Disagreement(index, got, want, float(logits[index, want] - logits[index, got]))
            for index, (got, want) in enumerate(zip(ids, best, strict=True))
            if got != want
        ]

    def check(self, prompt: list[int], ids: list[int]) -> None:
        """Fails unless `ids` is the greedy continuation of `prompt`. A token that nearly ties with transformers' own passes, printed."""
        if (key := (tuple(prompt), tuple(ids))) in self._checked:
            return
        for found in self.disagreements(prompt, ids):
            assert found.lead < NEAR_TIE, f"token {found.index} is {found.got}, transformers leads with {found.best} by {found.lead:.5f}"
            print(f"near tie at token {found.index}: {found.got}, transformers leads with {found.best} by {found.lead:.6f}")
        self._checked.add(key)
