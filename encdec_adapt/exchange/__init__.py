"""Models between formats: import, export, adapt, merge and compare them.

This folder imports nothing of `evaluation`, `planner` or the commands.
"""
