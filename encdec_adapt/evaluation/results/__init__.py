"""Scores, their store on disk, comparisons with intervals, formats of numbers.

The room imports no other room of `evaluation`, and no code of models.
"""
