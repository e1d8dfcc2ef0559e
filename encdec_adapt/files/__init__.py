"""Local and bucket paths, atomic writes, append-only logs, disk space.

Of the package, only `base.errors` may be imported.
"""
