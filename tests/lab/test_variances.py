"""Variances of earlier studies."""

import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest
from scipy import stats

from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.lab import pages, variances

_is_development = document_source.is_development
KNOWN = 0.02, 0.05, 0.03  # Deviations of an arm over seeds, groups and rest.


def _arms(arms=3, seeds=40, groups=60):
  """Scores of arms that share nothing but the groups' losses."""
  rng = np.random.default_rng(0)
  names = [name for i in range(999) if not _is_development(name := f'm{i}')]
  names, weights = names[:groups], np.full(groups, 10.0)
  shapes = (arms, seeds, 1), (arms, 1, groups), (arms, seeds, groups)
  losses = 3 + rng.normal(0, 0.3, (1, 1, groups))
  for deviation, shape in zip(KNOWN, shapes, strict=True):
    losses = losses + rng.normal(0, deviation, shape)
  return [
    [
      results_store.ratio_score('held_out', 'loss', 10 * x, weights, names)
      for x in arm
    ]
    for arm in losses
  ]


def test_known_variances_are_found():
  found = variances.estimate([*itertools.combinations(_arms(), 2)])
  assert found.freedoms == (2 * 39, 2 * 59, 2 * 39 * 59)
  # A difference of two arms has twice the variance of an arm.
  want = [2 * x * x for x in KNOWN]
  assert (found.seed, found.group, found.residual) == pytest.approx(
    want, rel=0.3
  )
  assert found.residual == pytest.approx(want[2], rel=0.05)
  # Two pairs without a common arm have twice the freedoms of one.
  a, b, c, d = _arms(4, 3, 30)
  assert variances.estimate([(a, b), (c, d)]).freedoms == (4, 58, 116)


def test_a_file_of_studies(tmp_path):
  path = tmp_path / 'variances.json'
  # Two decoders, and a pair that is far from them on every other text.
  decoders, (pair,) = _arms(2, 3, 30), _arms(1, 3, 30)
  far = [
    dataclasses.replace(x, scores=np.roll(x.scores, 1).tolist()) for x in pair
  ]
  arms = [(('decoder_only', False), x) for x in decoders]
  arms.append((('encoder_decoder', False), far))
  for study in ('encoder', 'wang', 'encoder'):
    variances.write(path, study, {'text/held_out/loss': arms})
  content = json.loads(path.read_text())
  alike, unlike = (f'{x}like/text/held_out/loss' for x in ('a', 'un'))
  assert [*content] == [alike, unlike]
  assert set(content[alike]) == {'encoder', 'wang'}
  assert content[alike]['wang']['freedoms'] == [2, 29, 58]
  assert content[unlike]['wang']['freedoms'] == [4, 58, 116]
  groups = [content[x]['wang']['group'] for x in (alike, unlike)]
  assert groups[1] > 5 * groups[0]
  assert variances.planned(path, 'alike/text/held_out/accuracy', 'x') is None
  # Never of the page that is planned.
  del content[alike]['encoder']
  path.write_text(json.dumps(content))
  assert variances.planned(path, alike, 'wang') is None
  adapted, random = ('encoder_decoder', False), ('encoder_decoder', True)
  assert variances.kind([adapted, adapted]) == 'alike'
  assert variances.kind([adapted, random]) == 'alike_random'
  assert variances.kind([adapted, None]) == 'unlike'
  assert variances.kind([random, None]) == 'unlike_random'


def test_models_of_a_random_model_of_their_seed_began_at_random():
  arm = functools.partial(pages.Arm, config='')
  study = pages.Study(
    name='x',
    title='x',
    size='cpu',
    seeds=(0, 1),
    arms=(
      arm('shared', seeds=(0,)),
      arm('scratch'),
      arm('tuned', starts={'init.encoder': 'scratch'}),
      arm('again', starts={'init.encoder': 'tuned'}),
      arm('adapted', starts={'init.encoder': 'shared'}),
      arm('merge_tuned', starts={'init.encoder': 'merge'}),
    ),
    commands=(
      pages.Command('base', 'convert', ('--output={base}',), seeds=(0, 1)),
      pages.Command(
        'merge', 'convert', ('{again}', '--output={merge}'), seeds=(0, 1)
      ),
    ),
  )
  modes = {x.name: 'checkpoint' for x in study.arms}
  modes |= dict.fromkeys(('shared', 'scratch'), 'random')
  values = {k: {'model.kind': 'a', 'init.mode': x} for k, x in modes.items()}
  origins = variances.origins(values, study.parents)
  # All seeds of `adapted` have one source.
  random = 'shared scratch tuned again merge merge_tuned'
  assert {k for k, x in origins.items() if x == ('a', True)} == {
    *random.split()
  }
  assert origins['adapted'] == ('a', False)


def test_few_degrees_of_freedom_have_upper_bounds(tmp_path):
  path = tmp_path / 'variances.json'
  fields = dict(seed=1.0, group=2.0, residual=0.0, freedoms=[2, 29, 58])
  entry = {**fields, 'seeds': 3, 'groups': 30}
  path.write_text(json.dumps({'held_out/loss': {'wang': entry}}))
  found = variances.planned(path, 'held_out/loss', 'meap')
  # In one of five studies a mean square of 2 degrees is below .223.
  assert found.seed == pytest.approx(2 / stats.chi2.ppf(0.2, 2))
  assert found.seed == pytest.approx(4.48, abs=0.01)
  assert (found.group, found.residual) == (2, 0)
  # Enough of them have none; a contrast of four arms has twice the variance.
  entry['freedoms'] = [8, 29, 58]
  path.write_text(json.dumps({'held_out/loss': {'wang': entry}}))
  found = variances.planned(path, 'held_out/loss', 'meap', arms=4)
  assert (found.seed, found.group) == (2, 4)
