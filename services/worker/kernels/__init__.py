"""Kernels written by hand: `cpu` holds C++ behind a plain C interface.

Owns: sources and their build. Does not own: how and when they are called (ops). Imports nothing of the worker.
"""
