"""Metrics, progress, timing, cost, profiles, and the environment report.

Imports `files`, and no model or data.
"""
