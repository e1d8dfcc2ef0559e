"""Measures of a model: held-out loss, likelihoods, texts, attention, cost.

From `evaluation`, this folder imports only `results`: tasks build on measures,
not the reverse.
"""
