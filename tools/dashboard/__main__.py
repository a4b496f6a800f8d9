"""Prints the dashboard's file."""

from __future__ import annotations

from tools.dashboard.grafana import text

print(text(), end="")
