"""The small set of fused operations that every model is written against, and their executors.

Owns: `base` (what each operation means), `reference` (plain torch, run eagerly: the oracle), `cpu` (records a
program for the C++ kernels: `recording`, `places`, `packing`, and `native`, which runs it).
Does not own: the order of operations (models), memory of the cache (kv_cache), the kernels' sources (kernels).
"""
