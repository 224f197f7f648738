"""Observability-first Host Weight Runtime."""
