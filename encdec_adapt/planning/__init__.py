"""Estimates of memory and time of programs on hardware that is not at hand.

Only `train` and `plan` import this folder: no model or training code may.
"""
