"""Parts of the training loop: setup, state, step, losses, optimizers, phases.

Each loss is a module in `losses`. Objectives and framing are in `objectives`,
records in `data`, checkpoints in `checkpoints`. Only `jobs` and `start` import
`config` and `stored`; nothing imports `evaluation`, `planner` or the commands.
"""
