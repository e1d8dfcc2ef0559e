"""Metrics, progress, timing, cost, profiles, and the environment report.

Imports `files` and `cli.errors`, and no model or data.
"""
