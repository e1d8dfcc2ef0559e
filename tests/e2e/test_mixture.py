"""Two objectives share the rows of one job, from text to parameters."""

import json
import os
import pathlib

import pytest

from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from tests import tiny


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
  """Flags of a job on PrefixLM and span corruption of a text file."""
  os.chdir(tiny.ROOT)
  folder = tmp_path_factory.mktemp('mixture')
  (folder / 'a.txt').write_text('\n'.join(tiny.text(150)))
  return [
    *tiny.flags(folder, 'prefix_lm'),
    f'--config.data.folder={folder}/records',
    f'--config.data.source=text:{folder}/a.txt#lines',
    '--config.data.objective=prefix_lm | span_corruption',
    '--config.data.eval_fraction=0.2',
    '--config.data.workers=1',
    '--config.train.steps=6',
    '--config.evaluation.loss=6',
  ]


def _run(flags, workdir, rates, steps=6):
  return tiny.call(
    train,
    *flags,
    f'--workdir={workdir}',
    f'--config.data.rates={rates}',
    f'--config.train.steps={steps}',
    # The learning rate does not depend on where a job is stopped.
    '--config.optimizer.schedule=constant',
  )


@pytest.mark.long
@pytest.mark.e2e
def test_a_job_learns_that_its_objective_switches(flags, tmp_path):
  whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
  switch = 'tokens:1,0; 3=tokens:1,3'
  assert _run(flags, whole, switch) == 0
  assert _run(flags, resumed, 'tokens:1,0', steps=3) == 0
  saved = manager.open_latest(resumed).read_data()
  assert saved['rows_of_parts'] == [24, 0]
  assert _run(flags, resumed, switch) == 0
  tiny.assert_same_params(resumed, whole)
  first, second = manager.open_latest(whole).read_data()['rows_of_parts']
  assert first + second == 48 and first > 24 and second > 0

  *_, folder = (one for one in flags if one.startswith('--config.data.folder='))
  path = pathlib.Path(folder.partition('=')[2]) / 'train/manifest.json'
  manifest = json.loads(path.read_text())
  names = [part['objective'] for part in manifest['parts']]
  assert names == ['prefix_lm', 'span_corruption']
  with pytest.raises(errors.UserError, match='positions of 2 parts.*as 1'):
    _run(flags, resumed, '', steps=7)
