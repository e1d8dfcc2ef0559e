"""A job and its export of which nothing is on a disk, on a fake store."""

import json

import pytest

from encdec_adapt import train
from encdec_adapt.data.records import record_sets
from encdec_adapt.files import paths
from encdec_adapt.huggingface import new_folder
from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders

pytestmark = [pytest.mark.long, pytest.mark.e2e]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture
def put(bucket, gemma):
  """The address of a Hugging Face folder in the bucket."""
  target = paths.at(f'{bucket}/gemma')
  paths.upload(gemma, target, new_folder.MARKER)
  return str(target)


def test_a_job_with_all_in_the_bucket(bucket, put, folder, pairs, capsys):
  """Sources, vocabulary, records, work directory, outputs."""
  for split in ('train', 'eval'):
    paths.upload(
      folder / 'prefix_lm' / split,
      paths.at(f'{bucket}/records/{split}'),
      record_sets.MANIFEST,
    )
  vocabulary = f'{bucket}/vocabulary.model'
  paths.copy(folder / 'vocabulary.model', vocabulary)
  workdir = f'{bucket}/runs/adapted'
  flags = [
    *pairs,
    f'--config.data.folder={bucket}/records',
    f'--config.data.vocabulary={vocabulary}',
    '--config.init.mode=adapt',
    f'--config.init.encoder={put}',
    '--config.train.steps=4',
    '--config.checkpoint.every=2',
    '--config.train.profile_from=3',
    '--config.train.profile_steps=1',
    f'--workdir={workdir}',
  ]
  assert tiny.call(train, *flags) == 0
  place = paths.at(workdir)
  summary = json.loads((place / 'summary.json').read_text())
  assert summary['steps'] == 4 and list(summary['ledger']) == [workdir]
  steps = [r['step'] for r in metrics.read_metrics(workdir)]
  assert max(steps) == 4
  names = paths.tree(place)
  assert 'coverage.json' in names and 'environment.json' in names
  assert 'hugging_face/decoder/tokenizer.model' in names
  assert any(name.startswith('profile/') for name in names)
  capsys.readouterr()
  assert tiny.call(train, *flags) == 0
  assert 'resuming at step 4' in capsys.readouterr().out
  assert folders.evaluate(workdir, f'{bucket}/records/eval')['loss'] > 0
  assert paths.at(f'{workdir}/evaluation/report.html').exists()
  output = f'{bucket}/out/samples.json'
  assert tiny.generate(workdir, 'the quick', output) == 0
  sample = json.loads(paths.at(output).read_text())
  assert sample['run'] == 'adapted' and sample['tokens'] > 0
  exported = folders.export(workdir, f'{bucket}/exported')
  assert tiny.convert('verify', workdir, exported, folders.ROUNDED) == 0
