"""What two or more services need, and nothing that only one does.

Owns: the error table, configuration base, clocks, packing of id lists, gRPC conventions, the shared store, the one text
authority, sampling parameters, telemetry, the model catalogue and GGUF import.
Does not own: any policy, any HTTP, any tensor. Never imports services or cli, torch or transformers.
"""
