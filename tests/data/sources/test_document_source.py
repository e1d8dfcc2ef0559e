"""The split of documents."""

from encdec_adapt.data.sources import text_sources


def test_split_is_by_id_and_by_group(tmp_path):
  (tmp_path / 'a').touch()
  in_split = text_sources.open_source(f'text:{tmp_path}/a').in_split
  ids = [f'document {i}' for i in range(2000)]
  held_out = {i for i in ids if in_split(i, 'eval', 0.1, 0)}
  trained = {i for i in ids if in_split(i, 'train', 0.1, 0)}
  assert held_out | trained == set(ids) and not held_out & trained
  assert 150 < len(held_out) < 250
  for i in ids[:100]:
    names = i, f'{i}::docstrings', f'{i}::source'
    assert len({in_split(name, 'eval', 0.5, 0) for name in names}) == 1
  assert not any(in_split(i, 'eval', 0.0, 0) for i in ids)
  assert all(in_split(i, 'eval', 1.0, 0) for i in ids)
