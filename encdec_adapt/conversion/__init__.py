"""Models on disk, ours or others: open, compare, adapt, import, export.

Above `huggingface` (files of others), `checkpoints` and `training`; below
`evaluation`, `planning` and the commands.
"""
