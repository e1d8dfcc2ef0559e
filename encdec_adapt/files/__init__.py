"""Local and bucket paths, atomic writes, append-only logs, disk space.

Imports `base.errors`, and nothing else of the package.
"""
