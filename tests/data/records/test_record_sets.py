"""Record sets: rows on disk, shards, manifests, and what is refused."""

import dataclasses
import itertools
import json
import os
import platform
import resource

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets, record_writing
from encdec_adapt.data.sources import document_source
from encdec_adapt.objectives import framing
from tests import gemma_ids

SPEC = record_sets.RecordSpec(
  source='python',
  split='train',
  objective='prefix_lm',
  encoder_length=8,
  decoder_length=4,
  passes=2,
  shards=3,
  seed=7,
  vocabulary='abc',
)


def make_row(number):
  """A row of one or two pairs that tells its number."""
  pairs = [
    framing.Pair(
      np.array([100 + number], np.int32), np.array([number, 5], np.int32)
    ),
    framing.Pair(np.array([], np.int32), np.array([7], np.int32)),
  ]
  return pairs[: 1 + number % 2]


PARTS = [record_sets.Part('prefix_lm', 'python')]


def write_rows(folder, spec, rows, counts, parts=PARTS):
  """Writes so many of the rows to each shard; returns the manifest."""
  rows, entries = iter(rows), {}
  for key in record_writing.shard_keys(spec, parts):
    with record_writing.ShardWriter(folder, spec, key) as writer:
      for row in itertools.islice(rows, counts[key.shard]):
        writer.write(row)
      entries[key] = writer.finish(documents=1)
  return record_writing.write_manifest(
    folder, spec, parts, entries, gemma_ids.DESCRIBED
  )


def write_set(folder, spec=SPEC, rows_per_shard=(2, 0, 3)):
  """Writes rows 0, 1, .. ; returns the manifest."""
  return write_rows(
    folder, spec, map(make_row, itertools.count()), rows_per_shard
  )


def lists_of(rows):
  """Returns dtypes and tokens of the inputs and targets of rows."""
  return [
    [[(part.dtype, part.tolist()) for part in pair.parts] for pair in row]
    for row in rows
  ]


def test_rows_are_numbered_through_shards_and_passes(tmp_path):
  write_set(tmp_path)
  found = record_sets.RecordSet.open(tmp_path, SPEC)
  assert found.spec == SPEC
  assert len(found) == 10
  assert found.passes == 2
  assert found.ranges == [[(0, 5)], [(5, 10)]]
  order = [9, 0, 4, 2, 2]
  assert lists_of(found.read(order)) == lists_of(make_row(i) for i in order)
  assert found.read([]) == []


def test_the_manifest_counts_and_measures_fill(tmp_path):
  manifest = write_set(tmp_path)
  # Per pass five rows; odd rows have a second pair (1 + 0 and 1 positions).
  assert manifest['totals'] == {
    'rows': 10,
    'pairs': 15,
    'encoder_positions': 25,
    'target_tokens': 25,
    'documents': 6,
    'bytes': sum(p.stat().st_size for p in tmp_path.rglob('*.array_record')),
  }
  assert manifest['fill'] == {'encoder': 25 / 80, 'decoder': 25 / 40}
  assert manifest['spec']['seed'] == 7
  assert json.loads((tmp_path / 'manifest.json').read_text()) == manifest
  names = [entry['file'] for entry in manifest['passes'][1]['shards']]
  assert names[2] == 'pass-00001/part-000/shard-00002-of-00003.array_record'


def _held_out(folder, documents):
  """Writes held-out rows of these documents each."""
  spec = dataclasses.replace(SPEC, split='eval', passes=1, shards=1, pack=False)
  rows = [
    [make_row(number)[0]._replace(documents=names)]
    for number, names in enumerate(documents)
  ]
  write_rows(folder, spec, rows, [len(rows)])
  return record_sets.RecordSet.open(folder)


def test_rows_of_the_development_part(tmp_path):
  names = [f'module_{i // 4}.py' for i in range(48)]
  ids = [(f'{name}::source:{i}',) for i, name in enumerate(names)]
  records = _held_out(tmp_path, ids)
  assert records.groups(range(48)) == names
  assert records.manifest['python'] == platform.python_version()
  want = [i for i in range(48) if document_source.is_development(names[i])]
  assert 8 <= len(want) < 48
  part = records.development(99)
  assert len(part) == len(want) and len(records) == 48
  numbers = [pair.targets[0] for (pair,) in part.read(range(len(part)))]
  assert numbers == want
  few = records.development(len(want) // 2)
  assert set(few.groups(range(len(few)))) == {names[i] for i in want}


def test_without_a_development_part(tmp_path):
  outside = next(
    name
    for name in map('text_{}'.format, range(99))
    if not document_source.is_development(name)
  )
  records = _held_out(tmp_path / 'a', [(outside,)] * 3)
  with pytest.raises(errors.UserError, match='none of the 3 .* their 1 groups'):
    records.development(2)
  # Rows that cross documents have no group.
  crossing = _held_out(tmp_path / 'b', [('a', 'b'), ('a',)])
  assert crossing.groups([0, 1]) == []


def test_an_unfinished_shard_leaves_nothing(tmp_path):
  with pytest.raises(RuntimeError, match='stop'):
    with record_writing.ShardWriter(tmp_path, SPEC, (0, 0, 1)) as writer:
      writer.write(make_row(0))
      raise RuntimeError('stop')
  assert [p for p in tmp_path.rglob('*') if p.is_file()] == []


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  with record_writing.ShardWriter(tmp_path, SPEC, (0, 0, 1)) as writer:
    writer.write(make_row(0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
      with pytest.raises(errors.UserError, match='shard-00001.*too large'):
        writer.finish()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert [p for p in tmp_path.rglob('*') if p.is_file()] == []


def test_finished_shards_are_known_by_their_spec_and_content(tmp_path):
  manifest = write_set(tmp_path)
  entry = dict(manifest['passes'][1]['shards'][2])
  del entry['file']
  assert record_writing.finished_shard(tmp_path, SPEC, (1, 0, 2)) == entry
  # Another number of passes changes no shard, anything else does.
  more = dataclasses.replace(SPEC, passes=5)
  assert record_writing.finished_shard(tmp_path, more, (1, 0, 2)) == entry
  assert record_writing.finished_shard(tmp_path, more, (2, 0, 2)) is None
  for field, value in (('seed', 8), ('vocabulary', 'x'), ('pack', False)):
    other = dataclasses.replace(SPEC, **{field: value})
    assert record_writing.finished_shard(tmp_path, other, (1, 0, 2)) is None
  flip_byte(record_writing.shard_path(tmp_path, SPEC, (1, 0, 2)))
  assert record_writing.finished_shard(tmp_path, SPEC, (1, 0, 2)) is None
  sidecar = record_writing.shard_path(tmp_path, SPEC, (0, 0, 0)).with_suffix(
    '.json'
  )
  sidecar.write_text(sidecar.read_text()[:20])
  assert record_writing.finished_shard(tmp_path, SPEC, (0, 0, 0)) is None


def flip_byte(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


@pytest.mark.parametrize(
  'field, value',
  [
    ('vocabulary', 'another'),
    ('encoder_length', 16),
    ('passes', 3),
    ('seed', 8),
    ('source_fingerprint', 'known'),
  ],
)
def test_records_of_another_spec_are_refused_by_field(tmp_path, field, value):
  write_set(tmp_path)
  expect = dataclasses.replace(SPEC, **{field: value})
  with pytest.raises(errors.UserError, match=f'match: {field} is .*{value!r}'):
    record_sets.RecordSet.open(tmp_path, expect)
  unknown = dataclasses.replace(SPEC, vocabulary='', source_fingerprint='')
  assert record_sets.RecordSet.open(tmp_path, unknown).spec == SPEC


def test_damaged_shards_are_refused(tmp_path):
  write_set(tmp_path)
  path = record_writing.shard_path(tmp_path, SPEC, (1, 0, 2))
  flip_byte(path)
  with pytest.raises(errors.UserError, match='another SHA-256'):
    record_sets.RecordSet.open(tmp_path)
  os.truncate(path, 1000)
  with pytest.raises(errors.UserError, match='has 1000 bytes'):
    record_sets.RecordSet.open(tmp_path)
  path.unlink()
  with pytest.raises(errors.UserError, match='00002-of-00003.*is missing'):
    record_sets.RecordSet.open(tmp_path)


def test_unusable_record_sets_are_refused(tmp_path):
  with pytest.raises(errors.UserError, match='encdec_adapt.materialize'):
    record_sets.RecordSet.open(tmp_path)
  manifest = write_set(tmp_path, rows_per_shard=(0, 0, 0))
  with pytest.raises(errors.UserError, match='no rows'):
    record_sets.RecordSet.open(tmp_path)
  path = tmp_path / 'manifest.json'
  path.write_text(json.dumps({**manifest, 'format': 99}))
  with pytest.raises(errors.UserError, match='format 99'):
    record_sets.RecordSet.open(tmp_path)
  removed = manifest | {'spec': manifest['spec'] | {'objective': 'deshuffle'}}
  path.write_text(json.dumps(removed))
  with pytest.raises(errors.UserError, match='deshuffle.* 0.1.0 is the last'):
    record_sets.RecordSet.open(tmp_path)
  path.write_text(path.read_text()[:-20])
  with pytest.raises(errors.UserError, match='is not a manifest'):
    record_sets.RecordSet.open(tmp_path)


@pytest.mark.parametrize(
  'change, name, reason',
  [
    ({'objective': 'meap'}, "objective 'meap'", 'not rounded down'),
    (
      {'objective': 'prefix_lm | prefix_lm_uniform:concatenate'},
      "objective 'prefix_lm_uniform:concatenate'",
      'share the draw of their splits',
    ),
    ({'objective': 'pairs:prefix=a '}, "objective 'pairs:prefix=a '", 'space'),
    ({'objective': 'chat'}, "objective 'chat'", 'the whole conversation'),
    (
      {'objective': 'full_lm', 'split': 'eval', 'encoder_length': 0},
      "objective 'full_lm'",
      'do not cross documents',
    ),
    (
      {'objective': 'pairs', 'source': 'pairs:a#b,c + prompts:a#b'},
      "source 'prompts:a#b'",
      "'|||' in the fields",
    ),
  ],
)
def test_records_of_a_changed_objective_or_source_are_refused(
  tmp_path, change, name, reason
):
  spec = dataclasses.replace(SPEC, **change)
  manifest = write_set(tmp_path, spec)
  assert manifest['revisions'] == {name: 1}
  record_sets.check_spec(tmp_path, manifest, spec)
  del manifest['revisions']  # As before there were any.
  with pytest.raises(errors.UserError, match='have revision 0') as error:
    record_sets.check_spec(tmp_path, manifest, spec)
  assert name in str(error.value) and reason in str(error.value)
  shard = record_writing.shard_path(tmp_path, spec, (0, 0, 0))
  entry = json.loads(shard.with_suffix('.json').read_text())
  del entry['identity']['revisions']
  shard.with_suffix('.json').write_text(json.dumps(entry))
  assert record_writing.finished_shard(tmp_path, spec, (0, 0, 0)) is None


@pytest.mark.parametrize(
  'change',
  [
    {},
    {'objective': 'prefix_lm_uniform'},
    {'objective': 'meap', 'split': 'eval'},  # Held-out rows have no masks.
    {'objective': 'pairs:prefix=a b: ,too_long=drop', 'source': 'pairs:a#b,c'},
  ],
)
def test_records_of_unchanged_objectives_stay_valid(tmp_path, change):
  spec = dataclasses.replace(SPEC, **change)
  assert 'revisions' not in spec.shard_identity()
  manifest = write_set(tmp_path, spec)
  del manifest['revisions']
  record_sets.check_spec(tmp_path, manifest, spec)
