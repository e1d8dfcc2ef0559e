"""Models on disk: open, compare, adapt, import, merge and export.

A model is the work directory of a run or a Hugging Face folder. Above
`huggingface` (formats of other software), `checkpoints` and `training`; imports
nothing of `evaluation`, `planning` or the commands.
"""
