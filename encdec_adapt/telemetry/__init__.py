"""Metrics, progress, timing, cost, profiles, and the environment report.

Of the package, this folder imports only `files` and `base`.
"""
