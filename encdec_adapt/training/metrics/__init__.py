"""Formulas of held-out metrics: ratios of sums over rows.

`evaluation.measures.perplexity` computes them over a record set. Imports
losses, and nothing that trains or evaluates.
"""
