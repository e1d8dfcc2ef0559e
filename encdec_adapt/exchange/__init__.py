"""Imports, exports, adapts, merges and compares models.

This folder must not import `evaluation`, `planner` or the commands.
"""
