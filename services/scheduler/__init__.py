"""The scheduler service: the brain of the mesh, without tensors.

Owns: the waiting queue, the running set, one KV block ledger per worker group, what each step runs, every ending of an accepted request.
Does not own: text beyond stop matching (libs/text), weights, sampling, HTTP. `core` is pure; the rest moves messages and decides nothing.
"""
