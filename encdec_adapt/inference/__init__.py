"""Text generation: the engine, its compiled programs, sampling, beam search.

Embeddings of texts and kernels of 8 bits are here, too. Imports `models`,
`sharding` and below; nothing of data or training.
"""
