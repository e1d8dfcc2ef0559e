"""Vocabularies: SentencePiece files, tokenizer.json, bytes; chat formats.

`vocabulary` is the interface, `vocabulary_pair` opens the vocabularies of a
model's two sides, `special_ids` holds the ids that frame rows, and
`tokenizer_writer` writes tokenizer files for `transformers`.
"""
