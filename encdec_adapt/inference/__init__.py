"""Text generation: choosing tokens and the cached decoding loop.

Imports `models`, `sharding` and below; nothing of data or training.
"""
