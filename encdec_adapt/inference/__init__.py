"""Text generation: the engine, its compiled programs, sampling, beam search.

Also scores and embeds texts, and quantizes kernels to int8. Must not import
data or training.
"""
