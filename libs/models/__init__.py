"""Where models come from and what their files say.

Owns: the catalogue (default model, directories, GGUF files, hub ids), the model cache, the import of a GGUF into a model directory,
and typed access to such a directory.
Does not own: weights as tensors (the worker's), encoding and templates as such (the tokenizer service's). No torch.
"""
