"""Grafana's dashboard: `python -m tools.dashboard > deploy/grafana/dashboards/tokenloom.json`."""
