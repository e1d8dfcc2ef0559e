"""Vocabularies: SentencePiece files, tokenizer.json, bytes; chat formats.

`vocabulary` is the interface, `vocabulary_pair` opens the vocabularies of a
model's two sides, `special_ids` finds special tokens by name, and
`tokenizer_writer` writes the files that `transformers` reads.
"""
