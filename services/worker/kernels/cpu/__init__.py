"""C++ kernels for CPUs, built with the compiler alone into a cache and called through ctypes.

Owns: paged attention with run-time dispatch on instruction sets, and its build. Does not own: torch's own operators.
"""
