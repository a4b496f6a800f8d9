"""Tables of rotary position embeddings (Su et al. 2021), with the ways in which models stretch them."""

from __future__ import annotations

import math

import torch

from libs.models.llama_config import LlamaConfig, RopeScaling


def rotation_table(config: LlamaConfig, max_positions: int) -> torch.Tensor:
    """Cosines of each position's angles, then their sines: float32 [max_positions, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Frequencies stretched as RopeScaling says (llama3: Grattafiori et al. 2024)."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * slow + smooth * frequencies
