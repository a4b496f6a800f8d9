"""Model families, each written once against the operations of `services.worker.ops`.

Owns: the order of operations of a family and the names of its weights. Does not own: how an operation is computed, the cache, sampling.
"""
