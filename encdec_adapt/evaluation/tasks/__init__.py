"""Tasks with questions and answers: lm-eval, prompts, text pairs, retrieval.

Every task is an object with `options`, `check` and `scores`, as the command
`evaluate` runs it. Of the other rooms of `evaluation`, `measures` and `results`
are imported.
"""
