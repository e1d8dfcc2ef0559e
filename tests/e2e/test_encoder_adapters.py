"""Adapters of a model with a new head, over the encoder of a stored pair."""

import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e
LORA = 'rank=2,alpha=8'
KINDS = {
  'embedding': (
    'embeddings:source={},head=projections=24+12',
    'data.source=embed:{}#query,text',
    'data.objective=embed:texts=6',
    'loss.kind=infonce:temperature=0.05,learn_temperature=1',
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
  flags += [f'data.folder={workdir.parent / kind}', f'train.lora={lora}']
  flags += [f'train.steps={steps}', 'train.evaluators=loss=2']
  flags += ['train.batch_size=8', 'train.eval_batch_size=8']
  flags += ['train.log_every=1', 'checkpoint.every=2']
  flags += ['checkpoint.keep_best=False', 'compute.dtype=float32']
  flags += ['compute.remat=none', 'optimizer.schedule=constant']
  flags += ['optimizer.learning_rate=0.01', 'optimizer.warmup_steps=1']
  flags = [f'--config.{flag}' for flag in flags]
  config = f'--config=configs/{config.format(source)}'.replace(':', '.py:', 1)
  assert tiny.call(train, config, *flags, f'--workdir={workdir}') == 0
  return workdir


def _first(workdir, kind):
  """Returns the first loss: held-out before a step, or that of step 1."""
  records = metrics.read_metrics(workdir / metrics.FILE)
  return next(r['loss'] for r in records if r['kind'] == kind)


def _outputs(model):
  """Returns vectors of texts, or logits."""
  loaded = encdec_adapt.load(model)
  if loaded.config.decoder.embedding:
    return loaded.embed(TEXTS)
  return loaded.logits([[2, 5, 6, 7]])


@pytest.fixture(scope='module', params=['False', 'True'])
def pair(folder, imported, request):
  """A pair with tables of both stacks, and one whose stacks share a table."""
  rng = np.random.default_rng(0)
  rows = [
    {'query': ' '.join(x[:4]), 'text': ' '.join(x[4:]), 'label': label}
    for label in ('no', 'yes') * 40
    for x in [rng.choice(tiny.WORDS, 8)]
  ]
  path = folder / f'shared_{request.param}'
  path.mkdir()
  (path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  flags = [f'--encoder={imported}', f'--model.shared_table={request.param}']
  return folders.adapt(path / 'pair', *flags)


@pytest.fixture(scope='module', params=KINDS)
def kind(request):
  return request.param


@pytest.fixture(scope='module')
def tuned(kind, pair):
  return _train(kind, pair, pair.parent / f'tuned_{kind}', LORA, 4)


def test_the_start_is_that_of_the_whole_model(kind, pair, tuned):
  whole = _train(kind, pair, pair.parent / f'whole_{kind}', '', 1)
  quantized = pair.parent / f'int8_{kind}'
  quantized = _train(kind, pair, quantized, f'{LORA},base=int8', 1)
  for split in ('train', 'eval'):
    loss = _first(whole, split)
    assert _first(tuned, split) == pytest.approx(loss, abs=1e-6)
    assert _first(quantized, split) == pytest.approx(loss, abs=0.05) != loss


def test_only_adapters_and_the_head_train(pair, tuned):
  step = manager.open_latest(tuned)
  names = [x for x in step.open_state().arrays if x.startswith('params/')]
  assert any(x.startswith(HEADS) for x in names)
  assert all('lora_' in x or x.startswith(HEADS) for x in names)
  adapted = {x.removeprefix('params/').rpartition('/')[0] for x in names}
  stored = folders.arrays(pair)
  for path, value in folders.arrays(tuned).items():
    name = path.replace('decoder', 'encoder', 1)
    if 'params/' + path in names:
      assert name not in stored
    elif path in adapted:
      assert np.abs(value - stored[name]).max() > 1e-4
    else:  # A shared table is stored with the decoder.
      np.testing.assert_array_equal(value, stored.get(name, stored.get(path)))


def test_resuming_is_exact_and_refuses_a_changed_pair(
  kind, pair, tuned, imported
):
  part = pair.parent / f'part_{kind}'
  for steps in (2, 4):
    _train(kind, pair, part, LORA, steps)
  tiny.assert_same_params(part, tuned)
  # A pair of the same encoder.
  pair.rename(pair.parent / 'aside')
  flags = ['--cross_attention=fresh', '--seed=1', f'--encoder={imported}']
  folders.adapt(pair, *flags)
  for call in (
    lambda: encdec_adapt.load(part),
    lambda: _train(kind, pair, part, LORA, 6),
  ):
    with pytest.raises(errors.UserError, match='is another model now'):
      call()
  pair.rename(pair.parent / f'changed_{kind}')
  (pair.parent / 'aside').rename(pair)


def test_merged_and_exported_it_is_the_run(kind, pair, tuned):
  merged = pair.parent / f'merged_{kind}'
  flags = [f'--checkpoint={tuned}', f'--output={merged}']
  assert tiny.convert('merge-lora', *flags) == 0
  exported = folders.export(tuned, pair.parent / f'exported_{kind}')
  for model in (merged, exported):
    np.testing.assert_allclose(_outputs(model), _outputs(tuned), atol=1e-6)
  with pytest.raises(errors.UserError):
    folders.export(tuned, pair.parent / 'peft', '--layout=peft')


def test_a_causal_decoder_gets_a_head(folder, pair, imported):
  run = pair.parent / 'causal'
  run = _train('embedding', imported, run, f'{LORA},base=int8', 2)
  assert encdec_adapt.load(run).config.decoder.role == 'causal'
