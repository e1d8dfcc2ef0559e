"""Local and bucket paths, atomic writes, append-only logs, disk space."""
