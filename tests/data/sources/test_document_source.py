"""The split of documents."""

from encdec_adapt.data.sources import document_source


def test_split_is_by_id_and_by_group():
  ids = [f'document {i}' for i in range(2000)]
  held_out = {i for i in ids if document_source.in_split(i, 'eval', 0.1, 0)}
  trained = {i for i in ids if document_source.in_split(i, 'train', 0.1, 0)}
  assert held_out | trained == set(ids) and not held_out & trained
  assert 150 < len(held_out) < 250
  for i in ids[:100]:
    sides = {
      document_source.in_split(f'{i}::{kind}', 'eval', 0.5, 0)
      for kind in ('docstrings', 'source')
    }
    assert sides == {document_source.in_split(i, 'eval', 0.5, 0)}
  assert not any(document_source.in_split(i, 'eval', 0.0, 0) for i in ids)
  assert all(document_source.in_split(i, 'eval', 1.0, 0) for i in ids)
