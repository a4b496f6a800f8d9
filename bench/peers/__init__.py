"""Compares this project with other servers on the same machine and the same weights: `python -m bench.peers --help`.

Each peer lives in a virtual environment of its own, never in this project's. docs/benchmarks.md says how it is run and what is fair in it.
"""
