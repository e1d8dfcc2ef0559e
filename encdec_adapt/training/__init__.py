"""One training loop's parts: state, step, objectives, optimizers, phases,
checkpoints. Post-training is other objectives of the same loop.
"""
