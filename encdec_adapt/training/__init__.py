"""Parts of the training loop: setup, state, step, losses, optimizers, phases.

A loss is a module in `losses`. Objectives and framing are in `objectives`,
records in `data`, checkpoints in `checkpoints`. Imports nothing of `config`,
`stored`, `evaluation`, `planner` or the commands.
"""
