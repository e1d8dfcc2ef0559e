"""Models on disk: the work directory of a run, or a Hugging Face folder.

`huggingface` reads foreign formats and `checkpoints` the arrays of runs; this
folder opens both as a `StoredModel`. It must not import `evaluation`, `planner`
or the commands.
"""
