"""Greedy continuations by transformers, the oracle of the accuracy gate. Runs in transformers' own environment.

    python reference.py MODEL_DIR PROMPTS.json TOKENS > CONTINUATIONS.json

Prompts are lists of token ids; each is continued alone, in float32, by exactly so many tokens. `margins` are the least differences of
the two best logits on each way: where one is nearly nothing, float32's rounding decides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Reads, continues, prints."""
    directory, prompts, count = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)  # in evaluation mode
    continuations, margins = [], []
    with torch.inference_mode():
        for prompt in prompts:
            tokens: list[int] = []
            least, past = float("inf"), None
            fed = torch.tensor([prompt])
            while len(tokens) < count:
                output = model(fed, past_key_values=past, use_cache=True, logits_to_keep=1)
                past = output.past_key_values
                best, second = output.logits[0, -1].topk(2).values.tolist()
                least = min(least, best - second)
                tokens.append(int(output.logits[0, -1].argmax()))
                fed = torch.tensor([[tokens[-1]]])
            continuations.append(tokens)
            margins.append(least)
    json.dump({"continuations": continuations, "margins": margins}, sys.stdout)


if __name__ == "__main__":
    main()
