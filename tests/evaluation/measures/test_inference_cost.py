"""Cost of generation: the metrics, and the Pareto front."""

import collections
import math

import numpy as np
import pytest

from encdec_adapt.evaluation.measures import inference_cost
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.inference import decoding
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.lab import score_tables
from encdec_adapt.models import forward_flops
from encdec_adapt.planner import hlo
from tests import toy_models

CONFIGS = toy_models.pair_and_decoder(toy_models.stack(layers=2, vocab_size=19))


@pytest.mark.long
@pytest.mark.parametrize('kind', CONFIGS)
def test_prefill_and_decode_are_measured_apart(kind):
  loaded = toy_models.load(CONFIGS[kind])
  scores = inference_cost.CostEvaluation(8, 4, batch_size=2).scores(loaded, 2)
  found = {x.metric: x.value for x in scores}
  # The load is 0 on a quiet machine, and unknown where Linux does not say.
  assert not found.pop('other_load') < 0
  assert all(value > 0 for value in found.values())
  for name in ('prefill_ms', 'decode_ms'):
    assert found[f'{name}_low'] <= found[name] <= found[f'{name}_high']
  counted = forward_flops.generation(CONFIGS[kind], 8, 4)
  assert (found['prefill_flops'], found['decode_flops']) == counted
  whole = inference_cost.per_query(found, 4)
  assert set(whole['FLOPs']) == {sum(counted)}
  assert whole['ms at batch 1'][1] == pytest.approx(
    found['prefill_ms'] + 4 * found['decode_ms']
  )


@pytest.mark.parametrize('kind', CONFIGS)
def test_prefill_flops_are_those_of_the_compiled_program(kind):
  # Wide, as XLA counts norms, soft-caps and activations, too; and without a
  # scan, whose body XLA counts once.
  fields = dict(layers=3, width=256, mlp_width=512, head_dim=64)
  stack = toy_models.stack(pattern=('global',) * 4, **fields)
  loaded = toy_models.load(toy_models.pair_and_decoder(stack)[kind])
  engine = loaded.engine(rows=1, ids=engine_lib.SpecialIds(0, (-1,), 0))
  length = 128
  request = engine_lib.Request(np.zeros(length, np.int32), 16)
  arguments = engine.prefill_arguments([request], 1)
  program = engine.programs.get(decoding.prefill, *arguments)
  counted, _ = forward_flops.generation(loaded.config, length, 16)
  if kind == 'decoder_only':
    # On CPUs the pairs that a causal mask hides are multiplied, too.
    hidden = length**2 - forward_flops.visible_pairs(length, causal=True)
    counted += 2 * 4 * 4 * 64 * hidden
    # Nothing reads the last layer's queries, which a merged kernel projects.
    counted += 2 * length * 256 * 4 * 64
  assert hlo.totals(program.as_text()).flops == counted
  assert program.cost_analysis()['flops'] == pytest.approx(counted, rel=0.02)


def test_tables_have_flops_with_both_widths_where_they_differ():
  values = collections.defaultdict(lambda: 3e12)
  assert '3e+12' in inference_cost.describe(values).values()
  values['paper_flops'] = 2e12
  cell = "3e+12 (2e+12 with the paper's widths)"
  assert cell in inference_cost.describe(values).values()


def test_pareto_front():
  points = [(2, 5), (1, 3), (2, 6), (3, 6), (4, 7)]
  points = [((cost,) * 3, (quality,) * 3) for cost, quality in points]
  assert inference_cost.pareto_front(points) == [1, 2, 4]
  # The worst point has a latency that may be as low as the best one's.
  points[3] = (1, 3, 5), (6, 6, 6)
  assert inference_cost.pareto_front(points) == [1, 2, 3, 4]
  # A quality that may be as high as the best one's.
  points[0] = points[0][0], (4, 5, 7)
  assert inference_cost.pareto_front(points) == [1, 0, 2, 3, 4]


def test_latencies_are_ranked_beyond_their_spread():
  def cost(low, high, load=0.0):
    values = {'prefill_ms_low': low, 'prefill_ms_high': high}
    return collections.defaultdict(lambda: 1.0, values, other_load=load)

  costs = {'a': cost(1, 3), 'b': cost(2, 4, math.nan), 'c': cost(5, 6, 0.43)}
  ranked, loaded = inference_cost.notes(costs, 4)
  assert 'Not ranked by latency' in ranked and ranked.endswith(': a and b.')
  assert 'while c was measured' in loaded and '43%' in loaded


def _score(task, metric, value):
  return results_store.Score(task, metric, value, None, 4)


def test_quality_is_of_tasks_that_all_have():
  scores = {
    'a': [_score('held_out', 'loss', 2.0), _score('x', 'acc', 0.5)],
    'b': [_score('held_out', 'loss', 3.0), _score('x', 'acc', 0.25)],
  }
  scores['a'] += [_score('y', 'f1', 0.75), _score('z', 'acc', 1.0)]
  scores['b'] += [_score('y', 'f1', 0.25)]
  label, values = score_tables.quality(scores, {'x', 'y', 'z'})
  assert (label, values) == ('mean of 2 tasks', {'a': 0.625, 'b': 0.25})
  assert score_tables.column(scores, 'x') == [0.5, 0.25]
  assert score_tables.column(scores, 'y/f1') == [0.75, 0.25]
  losses = {name: own[:1] for name, own in scores.items()}
  assert score_tables.quality(losses, {'x'})[1] == {'a': -2.0, 'b': -3.0}


def test_better_means_less_of_a_loss():
  low, high = (
    results_store.Score('t', 'loss', x, 0.1, 4, (x, x, x + 0.1, x - 0.1))
    for x in (1.0, 2.0)
  )
  (row,) = score_tables.comparison_rows(
    {'low': [low], 'high': [high]}, {'low': ['low'], 'high': ['high']}, {}
  )
  assert row['models'] == 'high - low'
  assert (row['difference'], row['better']) == ('+1.0000', 'low')
