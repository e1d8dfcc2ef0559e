"""HTTP server for completions, chat and embeddings.

`protocol` and `text_stream` must not depend on HTTP, nor `engine_worker` on the
protocol. This folder must not import `data`.
"""
