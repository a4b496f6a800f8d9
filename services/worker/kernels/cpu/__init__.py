"""C++ kernels for CPUs, built with the compiler alone into a cache.

Owns: products, norm, rotation, paged attention and activation, compiled for each instruction set and chosen at run time; their build.
Does not own: how they are called (ops.cpu_kernels) and when (ops.cpu).
"""
