"""Pure maps from the parameters of decoder-only models to new models.

Imports `models` only. Nothing here reads files or places arrays: every
function can be traced, so that the caller's `jit` decides the shardings.
"""
