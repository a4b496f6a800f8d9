"""Which paths need a key where keys are asked for: apart from the door itself, because the description of the API says it too."""

from __future__ import annotations

# Beginnings of paths. vLLM leaves the two beside /v1 open; here they would let anybody use the tokenizers up.
GUARDED = ("/v1/", "/tokenize", "/detokenize")
