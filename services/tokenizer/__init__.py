"""The tokenizer service: text in, token ids out. Stateless, scaled out, no weights and no torch.

Owns: chat templates, encoding, block hashes of prompts, the text table that is handed to gateway and scheduler, the pool of encoder
processes and its bounds.
Does not own: what a request is, limits of the API (callers pass them), stop matching and streaming (libs/text, used by others).
"""
