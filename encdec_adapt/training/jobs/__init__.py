"""What a job opens of what its recipe declares: models, batches, rewards.

Imports `config` and stored models; recipes and the step import nothing of it.
"""
