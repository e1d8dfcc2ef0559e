"""The public commands as a user gives them, on a tiny job."""

import json
import os
import shutil

import pytest

from encdec_adapt import evaluate, generate, train
from encdec_adapt.runtime import command, errors
from tests import tiny

pytestmark = pytest.mark.e2e


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('commands')


@pytest.fixture(scope='module')
def pairs(folder):
  """Flags of an encoder-decoder job."""
  return tiny.make_records(folder)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


def _train(*flags) -> int:
  return train.main(command.parse(train.define_flags, flags))


@pytest.fixture(scope='module')
def decoder(folder, pairs):
  """A trained decoder-only run."""
  os.chdir(tiny.ROOT)
  workdir = folder / 'decoder'
  flags = tiny.flags(folder, 'causal_lm')
  assert _train(*flags, '--config.train.steps=4', f'--workdir={workdir}') == 0
  return workdir


@pytest.fixture(scope='module')
def adapted(folder, pairs, decoder):
  """An encoder-decoder adapted from it, with it as the teacher."""
  workdir = folder / 'adapted'
  flags = [
    '--config.init.mode=adapt',
    f'--config.init.encoder={decoder}',
    f'--config.teacher.checkpoint={decoder}',
    '--config.loss.distillation=0.5',
    '--config.train.steps=4',
  ]
  assert _train(*pairs, *flags, f'--workdir={workdir}') == 0
  return workdir


def test_adaptation_leaves_what_a_reader_needs(adapted):
  coverage = json.loads((adapted / 'coverage.json').read_text())
  assert coverage
  summary = json.loads((adapted / 'summary.json').read_text())
  assert summary['steps'] == 4
  assert summary['target_tokens'] == 4 * 8 * 16
  inclusive = summary['inclusive']['target_tokens']
  assert inclusive == summary['target_tokens'] + 4 * 8 * 16
  assert list((adapted / 'tensorboard').iterdir())
  assert (adapted / 'config.json').exists()


def test_finished_run_is_not_run_again(adapted, pairs, capsys):
  before = (adapted / 'metrics.jsonl').read_bytes()
  settings = json.loads((adapted / 'config.json').read_text())
  source = settings['init']['encoder']
  flags = [
    '--config.init.mode=adapt',
    f'--config.init.encoder={source}',
    f'--config.teacher.checkpoint={source}',
    '--config.loss.distillation=0.5',
    '--config.train.steps=4',
  ]
  assert _train(*pairs, *flags, f'--workdir={adapted}') == 0
  assert 'continuing at step 4' in capsys.readouterr().out
  assert (adapted / 'metrics.jsonl').read_bytes() == before


def test_evaluate_measures_all_on_the_same_targets(folder, adapted, decoder):
  flags = [
    f'--checkpoint={adapted}',
    f'--checkpoint={decoder}',
    f'--records={folder}/prefix_lm/eval',
  ]
  assert evaluate.main(command.parse(evaluate.define_flags, flags)) == 0
  pair, alone = (
    json.loads((run / evaluate.FILE).read_text()) for run in (adapted, decoder)
  )
  assert pair['target_tokens'] == alone['target_tokens'] == 8 * 16
  assert pair['eval_loss_shuffled_prefix'] is not None
  assert alone['eval_loss_shuffled_prefix'] is None


def test_generate_continues_every_prompt(folder, adapted, decoder):
  for run in (adapted, decoder):
    output = folder / 'out.json'
    flags = [
      f'--checkpoint={run}',
      '--prompt=the quick brown',
      '--prompt=two cats',
      '--max_tokens=4',
      f'--output={output}',
    ]
    assert generate.main(command.parse(generate.define_flags, flags)) == 0
    samples = json.loads(output.read_text())
    assert [s['prompt'] for s in samples] == ['the quick brown', 'two cats']


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--config.train.batch_size=12'], 'train.batch_size is 12'),
    (['--config.train.eval_batch_size=4'], 'train.eval_batch_size is 4'),
    (['--config.mesh.fsdp=3'], 'fsdp=3'),
    (['--config.data.decoder_length=32'], 'decoder_length'),
    (['--config.model.decoder.vocab_size=64'], 'vocab'),
    (['--config.init.mode=checkpoint', '--config.init.encoder=nowhere'],
     'nowhere'),
  ],
)  # fmt: skip
def test_bad_input_before_any_work(tmp_path, pairs, flags, words):
  with pytest.raises(errors.UserError, match=words):
    _train(*pairs, *flags, f'--workdir={tmp_path}/run')
  assert not (tmp_path / 'run' / 'metrics.jsonl').exists()


def test_vocabulary_that_is_not_the_records(tmp_path, pairs, folder):
  from encdec_adapt.data import vocabularies

  other = tmp_path / 'other.model'
  vocabularies.train_vocabulary(tiny.text(200, seed=5), other, tiny.VOCAB)
  with pytest.raises(errors.UserError, match='vocabulary'):
    _train(
      *pairs, f'--config.data.vocabulary={other}', f'--workdir={tmp_path}/run'
    )


def test_checkpoint_of_another_model(folder, pairs, adapted, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(adapted, copy)
  with pytest.raises(errors.UserError, match='mlp'):
    _train(*pairs, '--config.model.decoder.mlp_width=48', f'--workdir={copy}')


def test_encoder_decoder_is_no_source(pairs, adapted, tmp_path):
  with pytest.raises(errors.UserError, match='is an encoder-decoder'):
    _train(
      *pairs,
      '--config.init.mode=adapt',
      f'--config.init.encoder={adapted}',
      f'--workdir={tmp_path}/run',
    )


def test_read_only_directory(pairs, tmp_path):
  locked = tmp_path / 'file'
  locked.write_text('not a folder')
  with pytest.raises(errors.UserError, match='file'):
    _train(*pairs, f'--workdir={locked}/run')
