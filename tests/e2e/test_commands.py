"""The public commands as a user gives them, on a tiny job."""

import functools
import json
import os
import re
import shutil
import types

import jax
import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.data.records import record_sets, row_order
from encdec_adapt.models import model_config, parameters
from encdec_adapt.stored import pretrained_files
from encdec_adapt.telemetry import metrics
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import setup
from tests import tiny, tiny_tokenizers, toy_models
from tests.e2e import folders

pytestmark = pytest.mark.e2e
_train = functools.partial(tiny.call, train)


@pytest.fixture(scope='module')
def decoder(folder, pairs):
  """A trained decoder-only run."""
  os.chdir(tiny.ROOT)
  workdir = folder / 'decoder'
  flags = tiny.flags(folder, 'causal_lm')
  flags += ['--config.train.steps=4', '--config.compute.remat=full']
  assert _train(*flags, f'--workdir={workdir}') == 0
  return workdir


@pytest.fixture(scope='module')
def adapting(pairs, decoder):
  """Flags of an encoder-decoder adapted from it, with it as the teacher.

  There is a checkpoint of step 3, at which the other parameters thaw.
  """
  return [
    *pairs,
    '--config.init.mode=adapt',
    f'--config.init.encoder={decoder}',
    f'--config.teacher.checkpoint={decoder}',
    '--config.loss.kind=distill',
    '--config.loss.distill.share=0.5',
    '--config.train.steps=4',
    '--config.train.cross_attention_warmup=3',
  ]


@pytest.fixture(scope='module')
def adapted(folder, adapting):
  """The run of these flags."""
  workdir = folder / 'adapted'
  assert _train(*adapting, f'--workdir={workdir}') == 0
  return workdir


@pytest.mark.long
def test_adaptation_leaves_what_a_reader_needs(folder, adapted):
  coverage = folders.read(adapted / 'coverage.json')
  count = parameters.count(config_lib.load_run(str(adapted)).model)
  # A balanced pair takes everything from its source.
  counts = {'copied': count, 'fresh': 0, 'constant': 0}
  assert coverage['parameters'] == counts
  summary = folders.read(adapted / 'summary.json')
  assert summary['steps'] == 4
  trained, source = (
    tiny.target_tokens(folder / objective / 'train', rows=4 * 8)
    for objective in ('prefix_lm', 'causal_lm')
  )
  assert summary['target_tokens'] == trained
  assert summary['inclusive']['target_tokens'] == trained + source
  assert list((adapted / 'tensorboard').iterdir())
  assert (adapted / 'config.json').exists()
  assert folders.read(adapted / 'environment.json')['jax'] == jax.__version__


@pytest.mark.long
def test_the_optimizer_of_a_source_goes_on(
  folder, pairs, decoder, adapted, tmp_path, capsys
):
  flags = ['--config.init.mode=adapt', '--config.optimizer.schedule=constant']
  carried = [*flags, '--config.init.optimizer=source']
  source = [f'--config.init.encoder={decoder}', '--config.train.steps=2']
  assert _train(*pairs, *carried, *source, f'--workdir={tmp_path}/run') == 0
  state = manager.open_latest(tmp_path / 'run').open_state()
  names = ['step', 'groups/all/count', 'groups/all/inner/count']
  # 4 steps of the source, and 2.
  assert {name: int(x) for name, x in state.read(names).items()} == (
    dict.fromkeys(names, 6)
  )
  # A decoder from that of the pair, which had groups with states apart.
  text = tiny.flags(folder, 'causal_lm')
  source = f'--config.init.encoder={adapted}'
  assert _train(*text, *flags, source, '--dry_run') == 0
  assert 'the target has no encoder' in capsys.readouterr().out
  with pytest.raises(errors.UserError, match='not that of config.optimizer'):
    _train(*text, *carried, source, f'--workdir={tmp_path}/decoder')


@pytest.mark.long
def test_a_step_is_named_wherever_a_run_is(
  folder, adapted, adapting, tmp_path, capsys
):
  at_3 = folders.arrays(f'{adapted}@3')
  assert at_3.keys() == folders.arrays(adapted).keys()
  # The mean of a step and the newest, as averages of checkpoints are made.
  operands = [f'{adapted}@3', f'{adapted}@4']
  mean = tmp_path / 'mean'
  assert tiny.convert('merge', *operands, f'--output={mean}') == 0
  assert folders.read(mean / 'summary.json')['made_by']['sources'] == operands
  for name, array in folders.arrays(mean).items():
    both = at_3[name] + folders.arrays(adapted)[name]
    np.testing.assert_allclose(array, both / 2, atol=1e-6, err_msg=name)
  assert tiny.convert('diff', f'{adapted}@4', adapted) == 0
  assert tiny.convert('diff', *operands) == 1
  card = folders.export(mean, tmp_path / 'exported') / 'README.md'
  assert 'merge` of `adapted@3` and `adapted@4`' in card.read_text()
  source = f'--config.init.encoder={folder}/decoder@3'
  assert _train(*adapting, source, f'--workdir={tmp_path}/run') == 0
  assert 'decoder: step 3' in capsys.readouterr().err
  kept = f'{adapted}@2 has no undamaged checkpoint; {adapted}/checkpoints'
  kept += ' holds the steps 3, 4'
  for path, words in (
    (f'{adapted}@2', kept),
    (f'{adapted}/checkpoints/4', f'give {adapted}@4'),
    (f'{adapted}/checkpoints', f'give {adapted}, or {adapted}@STEP'),
    (f'{tmp_path}/exported@4', 'Hugging Face folder, which has none'),
    (f'{tmp_path}/nothing@4', 'nothing holds no model'),
  ):
    with pytest.raises(errors.UserError, match=re.escape(words)):
      tiny.generate(path, 'the quick', tmp_path / 'out')


@pytest.mark.long
def test_a_run_is_repeated_from_its_folder(adapted, tmp_path, capsys):
  again = tmp_path / 'again'
  config = f'--config=configs/rerun.py:run={adapted}'
  assert _train(config, f'--workdir={again}') == 0
  tiny.assert_same_params(again, adapted)
  shown = capsys.readouterr().out
  stamp = r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d '
  first, *lines = (again / 'train.log').read_text().splitlines()
  command = f'python -m encdec_adapt.train {config} --workdir={again}'
  assert re.fullmatch(f'{stamp}\\$ {re.escape(command)}', first)
  assert [re.sub(stamp, '', line) for line in lines] == shown.splitlines()
  assert folders.read(again / 'config.json')['made_by'] == {
    'command': command,
    'config_file': 'configs/rerun.py',
    'config_argument': f'run={adapted}',
  }
  with pytest.raises(errors.UserError, match='position in other rows'):
    _train(config, f'--workdir={again}', '--config.seed=1')
  assert 'Error: the checkpoint was' in (again / 'train.log').read_text()


def test_finished_run_is_not_run_again(adapted, adapting, capsys):
  before = (adapted / 'metrics.jsonl').read_bytes()
  assert _train(*adapting, f'--workdir={adapted}') == 0
  assert 'resuming at step 4' in capsys.readouterr().out
  assert (adapted / 'metrics.jsonl').read_bytes() == before


def test_continues_where_parameters_thaw_and_shows_the_first_batch(
  folder, adapted, adapting, tmp_path, capsys
):
  # The run as it was at step 3, from which all parameters move.
  copy = shutil.copytree(adapted, tmp_path / 'copy')
  shutil.rmtree(copy / manager.FOLDER / '4')
  (copy / 'summary.json').unlink()
  assert _train(*adapting, f'--workdir={copy}') == 0
  shown = capsys.readouterr().out
  assert 'resuming at step 3' in shown
  assert manager.open_latest(copy).step == 4
  tiny.assert_same_params(copy, adapted)

  records = record_sets.RecordSet.open(folder / 'prefix_lm' / 'train')
  (pair, *_) = records.read([row_order.Order(records).row(3 * 8)])[0]
  vocabulary = vocabulary_pair.open_vocabulary(folder / 'vocabulary.model')
  for field, tokens in (
    ('encoder_tokens', pair.inputs),
    ('decoder_tokens', pair.targets[:-1]),
    ('targets', pair.targets[:-1]),
  ):
    (line,) = re.findall(rf'^  {field} .*', shown, re.MULTILINE)
    assert vocabulary.decode(tokens, start=False) in line


def _end(*_, **__):
  raise InterruptedError('the job must end before this')


def test_artifacts_of_an_earlier_start_are_replaced(
  pairs, tmp_path, monkeypatch
):
  run = tmp_path / 'run'
  (run / pretrained_files.FOLDER / 'decoder').mkdir(parents=True)
  files = 'summary.json', 'coverage.json'
  for name in files:
    (run / name).write_text('{"of": "others"}')
  monkeypatch.setattr(setup, 'step_flops', _end)
  with pytest.raises(InterruptedError):
    _train(*pairs, f'--workdir={run}')
  # Fresh parameters have neither a coverage report nor kept files.
  assert not any((run / name).exists() for name in files)
  assert not (run / pretrained_files.FOLDER).exists()


def test_no_room_for_checkpoints_before_any_work(tmp_path, pairs, monkeypatch):
  monkeypatch.setattr(setup, 'open_data', _end)
  full = types.SimpleNamespace(free=1000)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: full)
  with pytest.raises(errors.UserError, match='1000 .* but 3 checkpoints need'):
    _train(*pairs, f'--workdir={tmp_path}/run')


def test_evaluate_measures_all_on_the_same_targets(folder, adapted, decoder):
  held_out = folder / 'prefix_lm' / 'eval'
  for run in (adapted, decoder):
    scores = folders.evaluate(run, held_out)
    assert scores['target_tokens'] == tiny.target_tokens(held_out)
    assert scores['loss_shuffled_prefix'] != scores['loss']


# Found by a dry run as well.
BAD_PLANS = [
  (['--config.train.batch_size=12'], 'train.batch_size is 12'),
  (['--config.train.eval_batch_size=4'], 'train.eval_batch_size is 4'),
  (['--config.mesh.fsdp=3'], 'fsdp=3'),
  (['--config.init.mode=random', '--config.init.encoder=runs/other'],
   "init.encoder is 'runs/other'.*init.mode is 'random'"),
]  # fmt: skip


@pytest.mark.parametrize(
  'flags, words',
  [
    *BAD_PLANS,
    (['--config.compute.attention=splash'],
     "compute.attention is 'splash', which needs tpu; .* chunked, reference"),
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
  if (flags, words) in BAD_PLANS:
    with pytest.raises(errors.UserError, match=words):
      _train(*pairs, *flags, '--dry_run')


def test_a_run_whose_attention_these_devices_lack_is_used(
  folder, adapted, tmp_path
):
  copy = shutil.copytree(adapted, tmp_path / 'copy')
  saved = folders.read(copy / 'config.json')
  saved['compute']['attention'] = 'splash'
  (copy / 'config.json').write_text(json.dumps(saved))
  assert folders.evaluate(copy, folder / 'prefix_lm' / 'eval')['loss'] > 0
  assert tiny.generate(copy, 'two cats', tmp_path / 'out.json') == 0


@pytest.mark.parametrize(
  'how, said',
  [
    ('workdir', 'The checkpoint .* is of another model'),
    ('checkpoint', 'is of another model than config.model'),
    ('embeddings', 'embedder/table'),
    ('adapt', 'of kind encoder_decoder'),
  ],
)
def test_another_model_is_refused_before_records_are_made(
  pairs, decoder, adapted, tmp_path, monkeypatch, how, said
):
  monkeypatch.setattr(setup, 'open_data', _end)
  workdir = tmp_path / 'run'
  if how == 'workdir':
    shutil.copytree(adapted, workdir)
    flags = []
  else:
    source = decoder if how == 'embeddings' else adapted
    flags = [f'--config.init.mode={how}', f'--config.init.encoder={source}']
  wider = [f'--config.model.{side}.width=24' for side in ('encoder', 'decoder')]
  with pytest.raises(errors.UserError, match=said):
    _train(*pairs, *flags, *wider, f'--workdir={workdir}')


def test_dry_run_counts_a_teacher_and_plans_the_adaptation(
  pairs, decoder, adapted, capsys, tmp_path
):
  flags = [
    '--config.init.mode=adapt',
    f'--config.init.encoder={decoder}',
    '--config.loss.kind=distill',
    '--config.loss.distill.share=0.5',
  ]
  teacher = '--config.teacher.checkpoint='
  for checkpoint in (decoder, adapted):
    assert _train(*pairs, *flags, f'{teacher}{checkpoint}', '--dry_run') == 0
    shown = capsys.readouterr().out
    assert re.search(r'^  teacher +[\d.]+ \w', shown, re.MULTILINE)
    assert "decoder's shape" not in shown
    assert 'decoder/layers' in shown
  encoder = model_config.DecoderOnlyConfig(
    toy_models.stack(role='bidirectional', vocab_size=512)
  )
  toy_models.save(tmp_path / 'encoder', encoder, native=True)
  kinds = 'decoder_only and prefix_decoder and encoder_decoder'
  with pytest.raises(errors.UserError, match=f'encoder_only.*of kind {kinds}'):
    _train(*pairs, *flags, f'{teacher}{tmp_path}/encoder', '--dry_run')


@pytest.fixture
def copied(decoder, tmp_path):
  """A copy of the decoder-only run of 4 steps, to be continued."""
  return shutil.copytree(decoder, tmp_path / 'copy')


def _continue(folder, workdir, *flags) -> int:
  """Gives the command of the decoder-only run again, with changes."""
  standard = *tiny.flags(folder, 'causal_lm'), '--config.train.steps=4'
  return _train(*standard, *flags, f'--workdir={workdir}')


def test_without_a_sound_checkpoint_it_does_not_start_over(
  folder, copied, capsys
):
  for step in (3, 4):
    path = copied / manager.FOLDER / str(step) / 'data' / 'metadata'
    path.write_bytes(path.read_bytes() + b' ')
  written = (copied / 'metrics.jsonl').read_bytes()
  for _ in range(2):
    words = 'damaged-00000003, damaged-00000004. Restore an undamaged'
    with pytest.raises(errors.UserError, match=words):
      _continue(folder, copied)
    assert (copied / 'metrics.jsonl').read_bytes() == written
  assert capsys.readouterr().err.count('is damaged') == 2
  for path in (copied / manager.FOLDER).glob('damaged-*'):
    shutil.rmtree(path)
  assert _continue(folder, copied) == 0
  shown = capsys.readouterr().out
  assert re.search(r'^\d+ records of metrics are dropped', shown, re.M)
  assert manager.open_latest(copied).step == 4


def test_another_seed_is_refused_and_another_rate_is_reported(
  folder, copied, capsys
):
  with pytest.raises(errors.UserError, match='config.seed'):
    _continue(folder, copied, '--config.seed=1')
  assert folders.read(copied / 'config.json')['seed'] == 0
  assert _continue(folder, copied, '--config.optimizer.learning_rate=0.5') == 0
  shown = capsys.readouterr().out
  assert 'config.optimizer.learning_rate: 0.001 before, 0.5 now' in shown


def test_another_batch_size_continues_at_the_saved_rows(folder, copied, capsys):
  assert manager.open_latest(copied).read_data()['rows'] == 4 * 8
  flags = ['--config.train.steps=6', '--config.train.batch_size=16']
  assert _continue(folder, copied, *flags) == 0
  assert 'the records last for' not in capsys.readouterr().out
  rows = 4 * 8 + 2 * 16
  checkpoint = manager.open_latest(copied)
  assert (checkpoint.step, checkpoint.read_data()['rows']) == (6, rows)
  # The first start had another policy than 'auto' is here.
  compute = folders.read(copied / 'config.json')['compute']
  assert (compute['dtype'], compute['remat']) == ('float32', 'full')
  # No row was read twice and none was passed over.
  tokens = tiny.target_tokens(folder / 'causal_lm' / 'train', rows)
  assert folders.read(copied / 'summary.json')['target_tokens'] == tokens


@pytest.mark.parametrize('eval_every, save_every', [(3, 4), (4, 3)])
def test_records_that_end_between_evaluations_or_saves(
  folder, copied, capsys, eval_every, save_every
):
  flags = [
    # Of 96 rows 32 were read in 4 steps: what is left are 2 steps.
    '--config.train.batch_size=32',
    '--config.train.steps=10',
    f'--config.evaluation.loss={eval_every}',
    f'--config.checkpoint.every={save_every}',
  ]
  assert _continue(folder, copied, *flags) == 0
  shown = capsys.readouterr().out
  assert 'the records last for 2 of the 6 remaining steps' in shown
  assert 'the records end after 96 rows, at step 6 of 10' in shown
  assert 'step 5/6' in shown  # Time left is of these steps.
  checkpoint = manager.open_latest(copied)
  assert (checkpoint.step, checkpoint.read_data()['rows']) == (6, 96)
  evaluations = [r for r in metrics.read_metrics(copied) if r['kind'] == 'eval']
  assert [r['step'] for r in evaluations] == [0, 4, 6]
  summary = folders.read(copied / 'summary.json')
  assert summary['steps'] == 6
  assert summary['eval_loss'] == evaluations[-1]['loss']


@pytest.mark.long
def test_steps_of_0_end_with_the_records(folder, decoder, tmp_path):
  flags = tiny.flags(folder, 'causal_lm')
  flags += ['--config.train.batch_size=32', '--config.checkpoint.every=0.67']
  closed, open_end = tmp_path / 'closed', tmp_path / 'open'
  assert _train(*flags, '--config.train.steps=3', f'--workdir={closed}') == 0
  flags = [*flags, '--config.train.steps=0', f'--workdir={open_end}']
  for _ in range(2):
    assert _train(*flags) == 0
    assert folders.read(open_end / 'summary.json')['steps'] == 3
    # The learning rate falls to the same end, also after a kill.
    tiny.assert_same_params(open_end, closed)
    shutil.rmtree(open_end / manager.FOLDER / '3')


def test_the_best_checkpoint_is_kept_and_used(folder, tmp_path, capsys):
  # The rate is far too high after the warm-up, so that the loss rises again.
  workdir, flags = tmp_path / 'run', tiny.flags(folder, 'causal_lm')
  flags += [
    '--config.checkpoint.keep_best=True',
    '--config.checkpoint.keep=1',
    '--config.checkpoint.every=2',
    '--config.optimizer.learning_rate=3.0',
    '--config.optimizer.warmup_steps=12',
    f'--workdir={workdir}',
  ]
  assert _train(*flags, '--config.train.steps=12') == 0
  # Each save has the loss of its step, as does the last.
  losses = {
    record['step']: record['loss']
    for record in metrics.read_metrics(workdir)
    if record['kind'] == 'eval' and record['step']
  }
  assert list(losses) == [2, 4, 6, 8, 10, 12]
  best = min(losses, key=losses.get)
  assert best < 12
  steps = manager.Checkpoints(workdir / manager.FOLDER).all_steps()
  assert steps == [best, 12]
  capsys.readouterr()
  result = folders.evaluate(workdir, folder / 'causal_lm' / 'eval')
  assert f'step {best}, held-out loss ' in capsys.readouterr().err
  assert result['loss'] == pytest.approx(losses[best], rel=1e-5)
  # A job resumes from the newest.
  assert _train(*flags, '--config.train.steps=12') == 0
  assert 'resuming at step 12' in capsys.readouterr().out


def test_steps_of_0_still_refuse_bad_input_before_records_are_made(
  folder, tmp_path, monkeypatch
):
  monkeypatch.setattr(setup, 'open_data', _end)
  flags = [*tiny.flags(folder, 'causal_lm'), f'--workdir={tmp_path}']
  # Symbols, and a space before every text.
  path = tiny_tokenizers.train(tmp_path / 'm', 1000, add_dummy_prefix=True)
  for bad, words in (
    (['train.batch_size=12'], 'config.train.batch_size is 12; it must divide'),
    (['train.cross_attention_warmup=1'], 'must be 0 without cross-attention'),
    (['data.vocabulary=no.model', 'data.train_vocabulary=False'], 'no.model'),
    (
      [f'data.vocabulary={path}', 'data.train_vocabulary=False'],
      'a model trained with it cannot be exported',
    ),
    (['init.mode=checkpoint', 'init.encoder=nowhere'], 'nowhere'),
  ):
    with pytest.raises(errors.UserError, match=words):
      _train(*flags, *(f'--config.{x}' for x in ['train.steps=0', *bad]))


def test_a_job_killed_before_its_last_evaluation_makes_up_for_it(
  folder, copied
):
  path = copied / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(lines[:-1]))
  (copied / 'summary.json').unlink()
  assert _continue(folder, copied) == 0
  rewritten = path.read_text().splitlines(keepends=True)
  assert rewritten[:-1] == lines[:-1]
  records = [json.loads(line[-1]) for line in (lines, rewritten)]
  assert [record['kind'] for record in records] == ['eval', 'eval']
  assert records[0]['loss'] == records[1]['loss']
  assert (copied / 'summary.json').exists()
