"""Local and bucket paths, atomic writes, append-only logs, disk space.

Of the package, this folder must import only `base`.
"""
