"""Tasks with questions and answers: lm-eval, prompts, text pairs, retrieval.

Every task is an object with `options`, `check` and `scores`, the interface of
the command `evaluate`. From `evaluation`, this folder imports `measures` and
`results`.
"""
