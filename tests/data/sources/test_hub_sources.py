"""Parquet files of a data set on the Hugging Face Hub."""

import pyarrow as pa
from pyarrow import parquet

from encdec_adapt import config as config_lib
from encdec_adapt import materialize
from encdec_adapt.cli import command
from encdec_adapt.data.records import record_sets
from encdec_adapt.files import hub as hub_lib
from tests import fake_hub

ROWS = [{'body': f'text {i} of the data set'} for i in range(60)]


def test_records_keep_the_commit_of_their_source(monkeypatch, tmp_path):
  folder = tmp_path / 'set'
  (folder / 'old').mkdir(parents=True)
  for name, rows in (('a', ROWS[:40]), ('b', ROWS[40:]), ('old/a', ROWS)):
    path = folder / f'{name}.parquet'
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
  sources = 'parquet:hf://datasets/org/set{}/*.parquet#body@0.5 + parquet:{}'
  local = f'{folder}/[ab].parquet#body'
  with fake_hub.serve(monkeypatch, tmp_path / 'cache') as hub:
    commit = hub.put('org/set', folder)
    flags = [
      '--config=configs/base.py',
      f'--config.data.source={sources.format("", local)}',
      f'--config.data.folder={tmp_path}/records',
      '--config.data.vocabulary=bytes',
      '--config.data.workers=1',
    ]
    values, _ = command.parse_operands(materialize.define_flags, flags)
    assert materialize.main(values) == 0
    assert sorted(hub.downloads) == ['a.parquet', 'b.parquet']
    pinned = sources.format(f'@{commit}', local)
    records = record_sets.RecordSet.open(tmp_path / 'records' / 'train')
    assert records.spec.source == pinned
    # Half of the rows besides those of the local files, less those held out.
    assert 70 < records.manifest['totals']['examples'] < 100
    # The branch moves: a job that reads the records takes their commit.
    hub.put('org/set', folder, extra=b'')
    hub_lib.commit_of.cache_clear()
    hub.refusal = 500, ''
    config = config_lib.pinned(values.config, str(tmp_path / 'run'))
    assert config.data.source == pinned
