"""Held-out metrics: ratios of sums over rows.

`evaluation.measures.perplexity` computes them over a record set. Imports
losses, but no training or evaluation loop.
"""
