"""Checkpoints of training jobs, written with Orbax, verified by checksums.

`manager` saves, restores and retains steps, `checksums` writes the manifest for
their verification, and `resume_checks` compares a resumed job with its
checkpoint. Only `manager`, `orbax_folder` and `streaming` import Orbax.
"""
