"""Traces, metrics and logs, in the same shape from every service.

Owns: span records and their export over OTLP, Prometheus endpoint and shared buckets, structured logs, the built-in trace store.
Does not own: which spans and metrics exist; each service declares its own.
"""
