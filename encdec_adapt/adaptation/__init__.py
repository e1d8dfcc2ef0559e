"""Pure functions from parameters of decoder-only models to new models.

Imports `models` and below. Reads no files and places no arrays: every function
can be traced, so that the caller's `jit` sets the shardings.
"""
