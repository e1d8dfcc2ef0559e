"""Parts of the training loop: setup, state, step, losses, optimizers, phases.

Framing and objectives are in `data`, checkpoints in `checkpoints`.
"""
