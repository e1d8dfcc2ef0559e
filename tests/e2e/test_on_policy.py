"""On-policy distillation: sampled targets, and resuming is exact."""

import numpy as np
import pytest

from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets
from encdec_adapt.telemetry import metrics
from encdec_adapt.training.jobs import on_policy
from tests import tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e


@pytest.fixture(scope='module')
def job(tmp_path_factory):
  """Folder and flags of a job of which half of the targets are sampled."""
  folder = tmp_path_factory.mktemp('on_policy')
  flags = tiny.make_records(folder, rows=32, held_out=2, pack=False)
  vocabulary = folder / 'vocabulary.model'
  teacher = folders.make_folder(folder / 'gemma', folders.GEMMA, vocabulary)
  return folder, [
    *flags,
    '--config.loss.kind=distill',
    '--config.loss.distill.divergence=reverse',
    '--config.loss.distill.on_policy=0.45',
    '--config.train.rollouts.tokens=8',
    '--config.train.rollouts.temperature=0.9',
    f'--config.teacher.checkpoint={teacher}',
    '--config.checkpoint.every=2',
    f'--config.compute.compile_cache={folder}/compiled',
  ]


def _train(job, name, *more):
  folder, flags = job
  return tiny.call(train, *flags, f'--workdir={folder}/{name}', *more)


def _steps(workdir):
  records = metrics.read_metrics(workdir / metrics.FILE)
  return [record for record in records if record['kind'] == 'train']


@pytest.mark.long
def test_sampled_targets_and_exact_resume(job, monkeypatch):
  folder, _ = job
  batches, call = [], on_policy.OnPolicyBatches.next

  def recorded(self, step, params):
    rows, numbers, values = call(self, step, params)
    batches.append((rows, numbers))
    return rows, numbers, values

  monkeypatch.setattr(on_policy.OnPolicyBatches, 'next', recorded)
  for name, steps in (('whole', 4), ('resumed', 2), ('resumed', 4)):
    assert _train(job, name, f'--config.train.steps={steps}') == 0
  records = record_sets.RecordSet.open(folder / 'prefix_lm' / 'train')
  differ = []
  for rows, numbers in batches[:4]:
    records.spec.objectives[0].rows.check(rows, records.framing)
    for i, (pair,) in enumerate(records.read(numbers)):
      count = int(rows['weights'][i].sum())
      targets = rows['targets'][i, :count]
      same = np.array_equal(targets, pair.targets)
      # 0.45 of 8 rows, rounded up.
      assert same or i < 4
      differ.append(not same)
      if i < 4:
        # One end at most, and nothing after it.
        ends = np.flatnonzero(targets == records.framing.decoder.eos)
        assert list(ends) == [count - 1] or (count == 8 and not len(ends))
      inputs = rows['encoder_tokens'][i, 1 : 1 + len(pair.inputs)]
      np.testing.assert_array_equal(inputs, pair.inputs)
  assert sum(differ) > 12
  steps = _steps(folder / 'whole')
  assert [step['step'] for step in steps] == [1, 2, 3, 4]
  assert steps == _steps(folder / 'resumed')
  assert 4 <= steps[0]['sampled_tokens'] <= 32
  # The loss is the divergence alone.
  assert steps[0]['loss'] == pytest.approx(steps[0]['distillation'], rel=1e-5)
  tiny.assert_same_params(folder / 'resumed', folder / 'whole')


@pytest.mark.parametrize(
  'flags, words',
  [
    (['train.rollouts.samples=4'], 'samples is 4, which .* does not read'),
    (['train.rollouts.cut=mask'], "cut is 'mask'"),
    (['loss.distill.share=0.5'], 'own samples teaches a student nothing'),
    (['teacher.checkpoint=stored:x'], 'has another .*on_policy'),
    (
      ['loss.distill.on_policy=0'],
      'rollouts.tokens is 8, which is not read',
    ),
  ],
)
def test_what_is_refused(flags, words, job):
  with pytest.raises(errors.UserError, match=words):
    _train(job, 'refused', *(f'--config.{flag}' for flag in flags))
