"""Measures of a model: held-out loss, likelihoods, texts, attention, cost.

Of the other rooms of `evaluation` only `results` is imported: tasks build on
measures, not the reverse.
"""
