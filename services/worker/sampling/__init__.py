"""From logits to token ids: a fixed order of filters and draws that depend on nothing but their own request.

Owns: `draws` (the counter-based generator), `sampler` (filters and choice, batched). Does not own: when a request stops.
"""
