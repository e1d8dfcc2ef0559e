"""HTTP server for completions and chat, on the inference engine.

`protocol` and `text_stream` know no HTTP, `engine_worker` no protocol. Imports
`inference` and `tokenizers`; nothing of data or training.
"""
