"""Metrics, progress, timing, cost, profiles, and the environment report.

Imports `files` and `base.errors`, and no model or data.
"""
