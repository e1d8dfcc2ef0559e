"""Models on disk: the work directory of a run, or a Hugging Face folder.

`huggingface` knows formats of other software, `checkpoints` arrays of runs;
this folder opens either as one kind of model. It imports nothing of
`evaluation`, `planner` or the commands.
"""
