"""Adapters of a model with a new head, over the encoder of a stored pair."""

import itertools
import json
import shutil

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders

pytestmark = [pytest.mark.e2e, pytest.mark.long]
LORA = {'rank': 2, 'alpha': 8}
KINDS = {
  'embedding': (
    'embeddings:source={}',
    'data.source=embed:{}#query,text',
    'model.head.projections=(24,16)',
    'data.objective=embed:texts=6,query=find ',
    'loss.kind=infonce',
    'loss.infonce.learn_temperature=True',
  ),
  'classifier': (
    'classification:source={}',
    'data.source=labels:{}#query,text,label',
    'data.objective=classify:labels=no|yes',
  ),
}
HEADS = 'params/decoder/head/', 'params/decoder/embedding/'
TEXTS = ['the quick brown', 'two cats sleep']


def _train(kind, source, workdir, lora, steps, **values):
  config, data, *flags = KINDS[kind]
  values = {'encoder_length': 32, 'eval_fraction': 0.2, 'workers': 1} | values
  flags += [data.format(workdir.parent / 'rows.jsonl')]
  flags += [f'data.{key}={value}' for key, value in values.items()]
  flags += [f'data.folder={workdir.parent / kind}']
  flags += [f'train.lora.{key}={value}' for key, value in lora.items()]
  flags += [f'train.steps={steps}', 'evaluation.loss=2']
  flags += ['train.batch_size=8', 'train.eval_batch_size=8']
  flags += ['train.log_every=1', 'checkpoint.every=2']
  flags += ['checkpoint.keep_best=False', 'compute.dtype=float32']
  flags += ['compute.remat=none', 'optimizer.schedule=constant']
  flags += ['optimizer.learning_rate=0.01', 'optimizer.warmup_steps=1']
  flags = [f'--config.{flag}' for flag in flags]
  config = f'--config=configs/{config.format(source)}'.replace(':', '.py:', 1)
  assert tiny.call(train, config, *flags, f'--workdir={workdir}') == 0
  return workdir


def _losses(workdir, split='eval'):
  """Returns the losses by step, held-out ones or those of batches."""
  records = metrics.read_metrics(workdir / metrics.FILE)
  return {r['step']: r['loss'] for r in records if r['kind'] == split}


def _first(workdir, split):
  return next(iter(_losses(workdir, split).values()))


def _outputs(model):
  """Returns vectors of texts, or logits."""
  loaded = encdec_adapt.load(model)
  if loaded.config.decoder.head.kind == 'embedding':
    return loaded.embed(TEXTS)
  return loaded.logits([[2, 5, 6, 7]])


@pytest.fixture(scope='module')
def source(folder, gemma):
  """A decoder, and texts beside it."""
  rng = np.random.default_rng(0)
  rows = [
    {'query': ' '.join(x[:3]), 'text': ' '.join(x[3:]), 'label': label}
    for label in ('no', 'yes') * 40
    for x in [rng.choice(tiny.WORDS, 6)]
  ]
  (folder / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  return folders.import_folder(gemma, folder / 'source', '--vocab_multiple=8')


def _adapt(source, output, *flags):
  flags = [f'--encoder={source}', '--vocab_multiple=8', *flags]
  return folders.adapt(output, *flags)


@pytest.fixture(scope='module')
def pairs_by_table(folder, source):
  """Pairs with a table for each stack, and with one for both."""
  flag = '--model.shared_table'
  return {
    shared: _adapt(source, folder / f'pair_{shared}', f'{flag}={shared}')
    for shared in (False, True)
  }


@pytest.fixture(
  scope='module',
  params=tiny.slow_except(
    [('embedding', False), ('classifier', True)],
    itertools.product(KINDS, (False, True)),
  ),
  ids=str,
)
def case(request, pairs_by_table):
  """The kind of a model, its pair, and the start of the names of its runs."""
  kind, shared = request.param
  pair = pairs_by_table[shared]
  return kind, pair, pair.parent / f'{kind}_{shared}'


def _run(case, name, *args):
  kind, pair, prefix = case
  return _train(kind, pair, prefix.with_name(f'{prefix.name}_{name}'), *args)


@pytest.fixture(scope='module')
def tuned(case):
  return _run(case, 'tuned', LORA, 4)


def test_the_start_is_that_of_the_whole_model(case, tuned):
  whole = _run(case, 'whole', {}, 1)
  quantized = _run(case, 'int8', LORA | {'base': 'int8'}, 1)
  for split in ('train', 'eval'):
    loss = _first(whole, split)
    assert _first(tuned, split) == pytest.approx(loss, abs=1e-6)
    assert _first(quantized, split) == pytest.approx(loss, rel=0.05)
    assert _first(quantized, split) != loss


def test_only_adapters_and_the_head_train(case, tuned):
  step, stored = manager.open_latest(tuned), folders.arrays(case[1])
  names = [x for x in step.open_state().arrays if x.startswith('params/')]
  assert any(x.startswith(HEADS) for x in names)
  assert all('lora_' in x or x.startswith(HEADS) for x in names)
  adapted = {x.removeprefix('params/').rpartition('/')[0] for x in names}
  for path, value in folders.arrays(tuned).items():
    name = path.replace('decoder', 'encoder', 1)
    if f'params/{path}' in names:
      assert name not in stored
    elif path in adapted:
      assert np.abs(value - stored[name]).max() > 1e-4
    else:  # A shared table is stored with the decoder.
      np.testing.assert_array_equal(value, stored.get(name, stored.get(path)))


def test_resuming_is_exact_and_refuses_a_changed_pair(case, tuned, source):
  for steps in (2, 4):
    part = _run(case, 'part', LORA, steps)
  tiny.assert_same_params(part, tuned)
  pair = case[1]
  # The encoder of the changed pair is that of the first.
  aside = pair.rename(pair.with_name('aside'))
  _adapt(source, pair, '--cross_attention=fresh', '--seed=1')
  try:
    with pytest.raises(errors.UserError, match='is another model now'):
      encdec_adapt.load(part)
    with pytest.raises(errors.UserError, match='is another model now'):
      _run(case, 'part', LORA, 6)
  finally:
    shutil.rmtree(pair)
    aside.rename(pair)


def test_merged_and_exported_it_is_the_run(case, tuned):
  models = [tuned.with_name(f'{tuned.name}_{x}') for x in 'abc']
  flags = [f'--checkpoint={tuned}', f'--output={models[0]}']
  assert tiny.convert('merge-lora', *flags) == 0
  flags = [str(tuned), str(models[0]), f'--output={models[1]}']
  assert tiny.convert('merge', *flags) == 0  # The average of two equal models.
  folders.export(tuned, models[2])
  for model in models:
    np.testing.assert_allclose(_outputs(model), _outputs(tuned), atol=1e-6)
    stored = model_on_disk.open_model(model)
    assert stored.prompts == model_on_disk.open_model(tuned).prompts


def test_adapters_train_further_over_the_same_pair(case, tuned):
  kind, _, prefix = case
  further = prefix.with_name(f'{prefix.name}_further')
  _train(kind, tuned, further, LORA, 1)
  losses = _losses(tuned)
  assert _first(further, 'eval') == pytest.approx(losses[4], abs=1e-6)
  base = manager.open_latest(further).read_meta()['base']
  assert base == manager.open_latest(tuned).read_meta()['base']


def test_a_causal_decoder_gets_a_head(source):
  run = _train('embedding', source, source.parent / 'causal', LORA, 2)
  assert encdec_adapt.load(run).config.decoder.role == 'causal'
  start, values = folders.arrays(source), folders.arrays(run)
  for path in ('decoder/embedder/table', 'decoder/final_norm/scale'):
    np.testing.assert_array_equal(values[path], start[path])
