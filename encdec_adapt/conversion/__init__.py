"""Models on disk, of any software: open, compare, adapt, import, export.

Above `huggingface` (files of others), `checkpoints` and `training`; below
`evaluation`, `planning` and the commands.
"""
