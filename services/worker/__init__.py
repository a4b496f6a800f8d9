"""The hands of the mesh: weights, paged KV cache, attention and sampling behind one gRPC stream.

Rooms, every arrow downwards:

    server (stream, attach, fencing, heartbeats) > runner (one step, whole batch, in a thread of its own) > engine (one forward and
    one draw) > models (families, written once against Ops) > ops (reference, cpu) > kernels; beside them slots and batch (the state that
    an `open` rebuilds), kv_cache, weights, sampling.

Owns: what a step computes and what it leaves in slots and cache; the numbers it promises (`numerics`).
Does not own: any policy (what runs, who waits, when a request ends), any text, any HTTP. The scheduler's ledger is the truth; all
that lives here can be rebuilt by replay.
"""
