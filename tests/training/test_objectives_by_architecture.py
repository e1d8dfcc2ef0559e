"""Every objective trains every kind of model that it feeds.

The table of configs/objectives.md is held equal to what is trained here.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.data.making import packing
from encdec_adapt.models import (
  architecture,
  build,
  heads,
  model_config,
)
from encdec_adapt.objectives import framing, objective_names
from tests import gemma_ids
from tests.objectives import objective_cases
from tests.training import conftest

STACK = dataclasses.replace(conftest.STACK, vocab_size=1100)
ROLES = {
  kind.name: kind.role
  for kind in architecture.BY_NAME.values()
  if not kind.encodes_prompt
}
MODELS = {
  'encoder_decoder': model_config.encoder_decoder(STACK, STACK),
  **{
    kind: model_config.DecoderOnlyConfig(dataclasses.replace(STACK, role=role))
    for kind, role in ROLES.items()
  },
}
CLASSIFIERS = MODELS | {
  kind: model_config.DecoderOnlyConfig(
    dataclasses.replace(STACK, role=ROLES[kind], head=heads.Labels(2))
  )
  for kind in ('decoder_only', 'encoder_only')
}
CLASSIFIERS['encoder_decoder'] = model_config.classifier(
  MODELS['encoder_decoder'], 2
)
EMBEDDERS = MODELS | {
  kind: model_config.DecoderOnlyConfig(
    dataclasses.replace(STACK, role=ROLES[kind], head=heads.Embedding())
  )
  for kind in heads.Embedding.models
}
NAMES = [name for name in objective_names.NAMES if name != 'denoise']
TEXT = [n for n in NAMES if objective_names.NAMES[n].maker.documents == 'text']
LENGTH, ROWS = 32, 4


@pytest.fixture(scope='module')
def trainers():
  """One trainer for each kind of model: its step is compiled once a shape."""
  return {
    kind: conftest.Trainer(model=build.build(model), rate=3e-2)
    for kind, model in MODELS.items()
  }


def _rows(name, kind):
  """A batch of packed rows of an objective on repetitive text."""
  objective = objective_names.parse_one(name)
  maker = objective_cases.make_fitting(name, LENGTH, sentinel_policy='recycle')
  tokens = np.resize(np.arange(500, 508, dtype=np.int32), 900)
  pairs = objective_cases.pairs(maker, tokens)
  rows = list(packing.pack_pairs(pairs, maker.lengths))[:ROWS]
  rows += [[]] * (ROWS - len(rows))
  reads_pairs = kind in ('decoder_only', 'prefix_decoder')
  framed = framing.stack_rows(
    [
      framing.frame_row(
        row,
        maker.lengths,
        gemma_ids.FRAMING,
        teacher=reads_pairs and objective.rows.content == 'pair',
      )
      for row in rows
    ]
  )
  framing.check_framing(
    framed,
    gemma_ids.FRAMING,
    mask=objective_cases.MASK if objective.masks_inputs else None,
    eos_inside=maker.concatenate,
  )
  return framed


@pytest.mark.long
@pytest.mark.parametrize('kind', MODELS)
def test_every_objective_trains(kind, trainers):
  trainer = trainers[kind]
  model = trainer.where.model
  first = trainer.init(trainer.where.place(model.init, jax.random.key(0)))
  for name in TEXT:
    try:
      config_lib.check_kind(MODELS[kind], objective_names.parse_one(name))
    except errors.UserError:
      continue
    rows = _rows(name, kind)
    # A copy, because the step donates its state.
    state = jax.tree.map(jnp.copy, first)
    found = []
    for _ in range(6):
      state, metrics = trainer.step(state, rows)
      found.append(float(metrics['loss']))
    assert metrics['weight'] == rows['weights'].sum() > 0, name
    assert np.isfinite(found).all() and found[-1] < found[0] - 0.3, name


def test_a_prefix_decoder_sees_its_inputs_from_both_sides():
  rows = _rows('prefix_lm', 'prefix_decoder')
  inputs = np.asarray(architecture.inputs_of(jax.tree.map(jnp.asarray, rows)))
  length = int((rows['encoder_segments'][0] == 1).sum())
  assert inputs[0, :length].all() and not inputs[0, length]
  assert inputs.sum() == (rows['encoder_segments'] > 0).sum()
  params = build.build(MODELS['decoder_only']).init(jax.random.key(0))
  changed = {k: v.copy() for k, v in rows.items()}
  changed['teacher_tokens'][0, 2] += 1  # An input after position 1.
  for kind, sees in (('prefix_decoder', True), ('decoder_only', False)):
    model = build.build(MODELS[kind])
    states = [
      jax.jit(model.decode)(
        params,
        *(some[f'teacher_{x}'] for x in ('tokens', 'segments', 'positions')),
        prefix=architecture.inputs_of(some),
      )
      for some in (
        jax.tree.map(jnp.asarray, rows),
        jax.tree.map(jnp.asarray, changed),
      )
    ]
    assert bool((states[0][0, 1] != states[1][0, 1]).any()) == sees


def test_the_table_says_what_feeds_which_model(request):
  path = request.config.rootpath / 'configs' / 'objectives.md'
  kinds = ('encoder_decoder', 'decoder_only', 'prefix_decoder', 'encoder_only')
  table = {}
  for line in path.read_text().splitlines():
    match = re.fullmatch(
      r'\| `(\w+)` \|' + r' (\S*) \|' * 4 + ' (.*) \\|', line
    )
    if match:
      *cells, predicts = match.groups()[1:]
      table[match[1]] = [bool(cell) for cell in cells]
      assert predicts == objective_names.NAMES[match[1]].predicts
  assert set(table) == set(objective_names.NAMES)
  for name, cells in table.items():
    text = name if name != 'denoise' else 'denoise:R:3:0.15'
    models = MODELS
    if name in ('classify', 'tag'):
      text, models = f'{name}:labels=a|b', CLASSIFIERS
    models = EMBEDDERS if name == 'embed' else models
    for kind, cell in zip(kinds, cells, strict=True):
      if cell:
        config_lib.check_kind(models[kind], objective_names.parse_one(text))
      else:
        with pytest.raises(errors.UserError, match='feeds models of kind'):
          config_lib.check_kind(models[kind], objective_names.parse_one(text))
