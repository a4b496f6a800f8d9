"""Kernels written by hand: `cpu` holds C++ behind a plain C interface.

Owns: sources, their build and their Python wrappers. Does not own: when they are used (ops decide).
"""
