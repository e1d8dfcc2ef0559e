"""Shards made by an Apache Beam pipeline, on this machine."""

import pytest

from encdec_adapt import materialize
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.data.making import materialization, shard_jobs
from encdec_adapt.data.records import record_sets
from encdec_adapt.files import paths
from encdec_adapt.tokenizers import vocabulary_pair
from tests.data.making import test_materialization as local

pytest.importorskip(
  'apache_beam', reason='Apache Beam is not installed (setup.py, extra beam)'
)
text = local.text
reference = local.reference
OPTIONS = ('--runner=DirectRunner', '--direct_num_workers=1')


def _make(text, folder, read=local.fake_examples, **changes):
  (manifest,) = materialization.materialize_sets(
    [(local.make_spec(text, **changes), folder)],
    vocabulary_pair.Choice(str(text / 'vocabulary.model')),
    beam=OPTIONS,
    reader=read,
  )
  return manifest


def test_a_pipeline_makes_the_same_bytes(text, tmp_path):
  read = shard_jobs.read_examples
  _make(text, tmp_path / 'beam', read=read)
  local.make(text, tmp_path / 'local', read=read)
  found, expected = (
    local.contents(tmp_path / name) for name in ('beam', 'local')
  )
  assert found == expected and len(found) == 2 * 3 * 2 + 1


def test_a_pipeline_writes_to_a_bucket(
  text, reference, bucket, tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  folder = paths.at(f'{bucket}/records')
  _make(text, folder, passes=1)
  first = paths.objects(folder)
  shards = {x: first[x] for x in paths.tree(folder) if 'shard' in x}
  manifest = _make(text, folder)  # Another pass.
  names = [name for name in paths.tree(folder) if 'lock' not in name]
  assert {name: (folder / name).read_bytes() for name in names} == reference
  objects = paths.objects(folder)
  assert {name: objects[name] for name in shards} == shards
  assert len(record_sets.RecordSet.open(folder)) == manifest['totals']['rows']


def test_options_follow_two_dashes():
  arguments = ['--runner=beam', '--', '--runner=DataflowRunner']
  values, rest = command.parse_operands(materialize.define_flags, arguments)
  assert values.runner == 'beam' and rest == ['--runner=DataflowRunner']


def test_workers_elsewhere_need_a_bucket(text, tmp_path, monkeypatch):
  monkeypatch.setitem(globals(), 'OPTIONS', ('--runner=DataflowRunner',))
  with pytest.raises(errors.UserError, match='data.folder to a bucket'):
    _make(text, tmp_path)
