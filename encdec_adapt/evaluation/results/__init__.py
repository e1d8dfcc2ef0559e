"""Scores, their store on disk, comparisons with intervals, formats of numbers.

This folder imports no other folder of `evaluation`, and no model code.
"""
