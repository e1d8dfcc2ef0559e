"""HTTP server for completions and chat, on the inference engine."""
