"""Estimates of memory and time of programs on hardware that is not at hand.

The library does not import this folder; the commands and `lab` do.
"""
