"""Measurements: a load client for any OpenAI-compatible server (`bench.load`), and the speed of single parts (`bench.core_speed`).

Owns how requests are drawn, sent and timed, what is computed from the times, and the results in `bench/results`. It is no part of
what is installed, nothing else imports it, and the load client imports neither libs nor services: it knows a server by HTTP alone.
"""
