"""From logits to token ids: a fixed order of processors, filters and draws that depend on nothing but their own request.

Owns: `rows` (what a step's rows ask for), `steering` (what a slot remembers of it), `processing` (processors, batched), `custom` (the
operator's), `mask` (the grammar's), `sampler` (filters and choice, batched), `draws` (the counter-based generator).
Does not own: when a request stops, what a grammar allows.
"""
