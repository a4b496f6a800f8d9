"""transformers' own model over our weights, in float32: what greedy decoding must yield."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from libs.models.directory import ModelDirectory
from services.worker.weights import open_source

NEAR_TIE = 5e-4


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy continuation: ids, and by how much each one's logit led the second best."""

    ids: list[int]
    leads: list[float]


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

    def greedy(self, prompt: list[int], count: int) -> Greedy:
        """`count` tokens by transformers' generate, never stopping early."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        leads = []
        for logits in out.logits:
            best = torch.topk(logits[0], 2).values
            leads.append(float(best[0] - best[1]))
        return Greedy(out.sequences[0, len(prompt) :].tolist(), leads)
