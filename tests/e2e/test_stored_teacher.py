"""A teacher is stored once, by any number of workers, and trained from."""

import shutil

import pytest

from encdec_adapt import materialize, train
from encdec_adapt.base import errors
from encdec_adapt.files import disk
from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e


@pytest.fixture(scope='module')
def records(tmp_path_factory):
  """Flags of a job on records of two shards, and a teacher."""
  folder = tmp_path_factory.mktemp('stored')
  flags = tiny.make_records(
    folder, rows=24, held_out=2, shards=2, more=('t5gemma2',)
  )
  vocabulary = folder / 'vocabulary.model'
  teacher = folders.make_folder(folder / 'gemma', folders.GEMMA, vocabulary)
  return folder, [*flags, '--config.train.steps=2'], teacher


def _store(records, *flags):
  _, options, teacher = records
  assert tiny.call(materialize, *options, f'--teacher={teacher}', *flags) == 0


def _shards(folder):
  return {
    path.relative_to(folder): path.read_bytes()
    for path in folder.rglob('*.array_record')
  }


def _losses(workdir):
  return [
    (record['loss'], record['distillation'])
    for record in metrics.read_metrics(workdir / metrics.FILE)
    if record['kind'] == 'train'
  ]


@pytest.mark.long
def test_bytes_do_not_depend_on_workers_and_restarts(records, capsys):
  folder = records[0] / 'prefix_lm' / 'teacher-counts-7'
  _store(records, '--teacher_tokens=7', '--config.data.workers=2')
  # 28 bytes: 7 times 2 of the id and 2 of the weight.
  targets = tiny.target_tokens(records[0] / 'prefix_lm' / 'train')
  assert f'{targets:,} targets of 28 bytes' in capsys.readouterr().out
  shards = _shards(folder)
  assert len(shards) == 2
  # As a kill would leave it.
  (folder / 'teacher.json').unlink()
  next(folder.rglob('shard-00001*.json')).unlink()
  next(folder.rglob('shard-00001*.array_record')).unlink()
  _store(records, '--teacher_tokens=7')
  assert '1 of 2 shards to make' in capsys.readouterr().out
  assert _shards(folder) == shards


@pytest.mark.slow
def test_training_from_all_stored_tokens_equals_online(records):
  folder, options, teacher = records

  def run(name, checkpoint, *flags):
    return tiny.call(
      train,
      *options,
      '--config.loss.kind=distill',
      f'--config.teacher.checkpoint={checkpoint}',
      f'--workdir={folder}/{name}',
      *flags,
    )

  # The teacher of spans reads their text, and sentinels are one-hot.
  for objective in ('t5gemma2', 'prefix_lm'):
    flags = [
      f'--config.data.objective={objective}',
      f'--config.data.folder={folder}/{objective}',
    ]
    every = f'--teacher_tokens={tiny.VOCAB}', '--teacher_form=top'
    _store(records, *flags, *every)
    stored = folder / objective / f'teacher-top-{tiny.VOCAB}'
    online, offline = f'online_{objective}', f'stored_{objective}'
    assert run(online, teacher, *flags) == 0
    assert run(offline, f'stored:{stored}', *flags) == 0
    losses = [_losses(folder / x) for x in (online, offline)]
    assert len(losses[0]) == 2
    # Probabilities are rounded to float16.
    for expected, pair in zip(*losses, strict=True):
      assert pair == pytest.approx(expected, rel=1e-3)
  # Another stored teacher does not continue the job.
  _store(records, '--teacher_tokens=3')
  with pytest.raises(errors.UserError, match='was trained with another teach'):
    run(
      'stored_prefix_lm',
      f'stored:{folder}/prefix_lm/teacher-counts-3',
      '--config.train.steps=3',
    )
  # Other records of the same specification.
  other = folder / 'other'
  tiny.make_records(other, rows=20, held_out=2, shards=2)
  with pytest.raises(errors.UserError, match='for other records than'):
    run(
      'other',
      f'stored:{stored}',
      f'--config.data.folder={other}/prefix_lm',
      f'--config.data.vocabulary={other}/vocabulary.model',
    )


def test_what_is_refused(records, tmp_path, monkeypatch):
  folder, options, _ = records
  for flags, words in (
    (['--config.loss.distill.divergence=js'], 'has another divergence'),
    (['--config.loss.distill.temperature=2'], 'has another temperature'),
    (['--config.loss.kind=cross_entropy'], 'reads no such model'),
    ([], 'no stored teacher in'),
  ):
    with pytest.raises(errors.UserError, match=words):
      tiny.call(
        train,
        *options,
        '--config.loss.kind=distill',
        f'--config.teacher.checkpoint=stored:{tmp_path}',
        f'--workdir={tmp_path}/run',
        *flags,
      )
  with pytest.raises(errors.UserError, match='vocabulary has 400 tokens'):
    _store(records, '--teacher_tokens=401')
  llama = folders.make_folder(tmp_path / 'llama', folders.LLAMA)
  with pytest.raises(errors.UserError, match='50 tokens and that of the mod'):
    _store(records, f'--teacher={llama}')
  shutil.copytree(folder / 'prefix_lm', tmp_path / 'full')
  full = disk.shutil.disk_usage('/')._replace(free=100)
  monkeypatch.setattr(disk.shutil, 'disk_usage', lambda path: full)
  with pytest.raises(errors.UserError, match='but the probabilities of the t'):
    _store(records, f'--config.data.folder={tmp_path}/full')
