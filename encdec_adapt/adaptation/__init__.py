"""Pure maps from the parameters of decoder-only models to new models.

Imports `models` and below. Nothing here reads files or places arrays: every
function can be traced, so the caller's `jit` decides the shardings.
"""
