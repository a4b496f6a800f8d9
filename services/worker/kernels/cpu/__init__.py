"""C++ kernels for CPUs, built with the compiler alone into a cache.

Owns: the kernels, compiled for each instruction set and chosen at run time; the program that strings them together; the team of threads
that runs it; their build.
Does not own: how they are called (ops.native) and in which order (ops.cpu records it).
"""
