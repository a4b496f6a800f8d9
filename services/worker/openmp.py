"""How long a thread of torch spins for its partner before it sleeps. Import this before torch, which reads it as it loads.

The forward pass of the C++ kernels has a team of its own (ops.native); torch's computes it with `--kernels reference` only.

Left at its default, a team whose member lost its core spins on the other core for the member's whole time slice. Measured with the
products of a 135M model on two cores: 65 ms a step on a quiet machine either way; beside one busy process 225 ms (at worst 512) by
default and 138 ms (at worst 158) with 2,000 turns.
"""

from __future__ import annotations

import os

SPIN_COUNT = os.environ.setdefault("GOMP_SPINCOUNT", "2000")
