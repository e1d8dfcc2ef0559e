"""Memory and time estimates for programs on hardware elsewhere.

The library does not import this folder; the commands and `lab` do.
"""
