"""A study's report: verdicts and sentences of made-up results; its files."""

import csv
import dataclasses
import json
import types

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.results import contrasts, results_store
from encdec_adapt.files import paths
from encdec_adapt.lab import (
  claim_results,
  claim_tables,
  collected,
  pages,
  study_report,
)

NAMES = [f'm{i}' for i in range(90)]
REPORTED = [x for x in NAMES if not document_source.is_development(x)]
# 40 groups of the report, and the first two of the development part.
GROUPS = REPORTED[:40] + [x for x in NAMES if x not in REPORTED][:2]
SEEDS = 0, 1, 2


def _claim(contrast, metric='held_out/loss', **fields):
  values = dict(direction='less', smallest=0.02, reason='noise', primary=True)
  values |= fields
  return pages.Claim(
    f'{contrast[-1]} is ahead.', 'a Fig. 2', '+2.6', contrast, metric, **values
  )


CLAIMS = (
  _claim(('scratch', 'adapted')),
  _claim(('source', 'adapted')),
  _claim(('scratch', 'adapted', 'scratch', 'adapted'), primary=False),
  _claim(('scratch', 'adapted'), 'tasks/acc', direction='greater'),
)


def _study(seeds=SEEDS, claims=CLAIMS):
  arms = [pages.Arm(name, 'base') for name in ('scratch', 'adapted')]
  source = pages.Command('source', 'convert', ('import',))
  models = 'source', 'scratch', 'adapted'
  measured = 'held_out/loss', 'tasks/acc'
  evaluation = pages.Evaluation('loss', (), measured, 'scratch', models)
  return pages.Study(
    'adaptation',
    'A study',
    'cpu',
    tuple(arms),
    seeds,
    claims,
    (evaluation,),
    (source,),
    rates=tuple(
      pages.Rate(x, 'scratch', (1e-3, 3e-3)) for x in ('rate', 'edge')
    ),
    best_of={'best': ('scratch', 'adapted')},
  )


def _loss(level, seed):
  """A loss with small differences between seeds, groups and rows."""
  rng = np.random.default_rng(seed)
  sums = 100 * (level + 0.002 * rng.normal(size=len(GROUPS)))
  weights = np.full(len(GROUPS), 100.0)
  return results_store.ratio_score('held_out', 'loss', sums, weights, GROUPS)


def _run(model, level, seed, flops=2e12, curve=True, accuracy=0.5):
  spent = dict(steps=100, target_tokens=4e5, total_tokens=8e5, seconds=60.0)
  spent |= dict(flops=flops, learning_rate=1e-3, parameters=2_345_678)
  # Falls by a nat for each factor of 10 of tokens, down to the level.
  tokens = [0.0, 4e3, 4e4, 4e5]
  steps = [0, 1, 10, 100]
  lines = dict(step=steps, target_tokens=tokens)
  lines['loss'] = [level + x for x in (5, 2, 1, 0)]
  lines['flops'] = [1e12 + flops * step / 100 for step in steps]
  cost = dict(prefill_flops=2e9 * level, decode_flops=1e9, prefill_ms=2.0)
  cost |= dict(prefill_ms_low=1.9, prefill_ms_high=2.2, decode_ms=0.1)
  cost |= dict(decode_ms_low=0.1, decode_ms_high=0.11, other_load=0.0)
  cost |= dict(parameters=2e6, published_flops=2e9, paper_flops=2e9)
  cost |= dict(prefill_tokens_per_second=1e3, decode_tokens_per_second=1e2)
  cost |= dict(prefill_bytes=1e6, decode_bytes=2e6 * level)
  draw = 10 * (seed or 0) + len(model)
  scores = [
    _loss(level, draw),
    dataclasses.replace(
      _loss(1.1 * level, draw), metric='loss_shuffled_prefix'
    ),
    results_store.Score('tasks', 'acc', accuracy, 0.1, 20),
    results_store.Score('held_out', 'exact_match', 0.0, 0.0, 20),
    results_store.Score('held_out', 'target_tokens', 4e3, None, 20),
    results_store.Score('held_out', 'macro_f1', 0.5, None, 20),
    results_store.Score('needle/64/0.5', 'choice', 0.25, 0.1, 8),
    *(results_store.Score('cost', k, v, None, 1) for k, v in cost.items()),
  ]
  return collected.Run(
    model,
    seed,
    f'runs/x/{model}',
    {'data.folder': '{records}', 'init.mode': model, 'seed': seed or 0}
    | {'data.development_rows': 2},
    {**spent, 'inclusive': {**spent, 'flops': flops + 1e12}},
    dict(
      {'parameters': 2_345_678, 'without tables': 2e6, 'FLOPs': 3e9},
      **{'FLOPs, published': 2e9},
    ),
    '4x128+4x128',
    lines if curve else dict.fromkeys(lines, []),
    {'loss': scores},
    generated=32,
  )


def _collected(study, **fields):
  """Adapted ends .5 below scratch, with small differences between seeds."""
  noise = 0.0, 0.004, -0.004
  runs = [_run('source', 2.7, None, curve=False, accuracy=0.4)]
  runs += [_run('scratch', 3 + noise[x], x, flops=4e12) for x in study.seeds]
  runs += [_run('adapted', 2.5 + noise[-x], x) for x in study.seeds]
  stage = dict(name='adapted', model='adapted', status='finished', starts=2)
  stage |= dict(command='python -m train --workdir=<runs>', seconds=7200.0)
  # Made by another page: its hours have it.
  other = {**stage, 'error': '', 'name': 'scratch', 'own': False}
  values = dict(
    command='python -m encdec_adapt.study --study=x',
    date='2031-02-03',
    runs=runs,
    stages=[{**stage, 'error': '', 'own': True}, other],
    rates={
      'rate': {'0.001': 3.25, '0.003': 3.125, '0.009': float('nan')},
      'edge': {'0.001': 3.25, '0.003': 3.125},
    },
    request=(128, 128),
    samples=[
      {
        'run': 'adapted',
        'prompt': 'def f',
        'continuation': 'a < b',
        'log_prob': -12.5,
      }
    ],
    text={'python': '3.11.7'},
  )
  return collected.Collected(study, **values | fields)


def _results(content):
  return [claim_results.result(content, x) for x in content.study.claims]


def test_claims_have_effects_and_verdicts():
  ahead, source, gain, task = _results(_collected(_study()))
  # Three primary claims.
  assert ahead.level == pytest.approx(1 - 0.05 / 3) and gain.level == 0.95
  assert (ahead.seeds, ahead.groups, ahead.verdict) == (3, 40, 'reproduced')
  assert ahead.effective == pytest.approx(40)
  assert ahead.effect == pytest.approx(-0.5, abs=0.002)
  bounds = pytest.approx((-0.535, -0.465), abs=0.002)
  assert (ahead.low, ahead.high) == bounds
  assert ahead.effect_text == '-0.500'
  # The source has no seeds: it is compared with each of the pair's.
  assert source.effect == pytest.approx(-0.2, abs=0.002)
  assert (source.seeds, source.verdict) == (3, 'reproduced')
  assert ahead.outcome == 'reproduced at 2.35 M parameters'
  # A contrast with itself, which is not primary.
  assert (gain.effect_text, gain.outcome) == (
    '+0.000',
    'not primary: no verdict',
  )
  # The metric has no examples: over seeds alone, and equal here.
  assert (task.over, task.verdict) == ('3 seeds', 'no difference')


def test_a_single_seed_has_no_interval_and_no_verdict():
  results = _results(_collected(_study((0,))))
  for x in results:
    assert (x.seeds, x.low, x.high, x.verdict) == (1, None, None, '')
    assert x.note == 'a single seed: no interval over seeds and no verdict'
  assert results[0].sentence == (
    'adapted is ahead. A single seed: no interval over seeds and no verdict.'
    ' held_out/loss: adapted - scratch: -0.500, of 1 seed, 40 groups.'
  )


def test_missing_seeds_have_no_verdict():
  content = _collected(_study())
  runs = [x for x in content.runs if (x.model, x.seed) != ('adapted', 2)]
  (ahead, *_) = _results(dataclasses.replace(content, runs=runs))
  assert (ahead.seeds, ahead.verdict) == (2, '')
  assert ahead.note == '2 of 3 seeds are there'
  # A diverged run, and none at all.
  nan = results_store.Score('held_out', 'loss', float('nan'), None, 1)
  runs = [
    dataclasses.replace(x, scores={'loss': [nan]})
    if x.model == 'adapted'
    else x
    for x in content.runs
  ]
  for finite in (runs, []):
    (ahead, *_) = _results(dataclasses.replace(content, runs=finite))
    assert (ahead.effect, ahead.note) == (None, '0 of 3 seeds are there')


def _scores(run, **changes):
  """A run whose scores of some metrics are others."""
  scores = [changes.get(x.metric, x) for x in run.scores['loss']]
  return dataclasses.replace(run, scores={'loss': scores})


def _reading_inputs(run, cost):
  """A run whose loss with other inputs is higher by `cost`."""
  (loss,) = (y for y in run.scores['loss'] if y.metric == 'loss')
  others = dataclasses.replace(
    loss,
    metric='loss_shuffled_prefix',
    value=loss.value + cost,
    scores=tuple(y + cost for y in loss.scores),
  )
  return _scores(run, loss_shuffled_prefix=others)


def test_a_claim_needs_an_arm_that_has_learned(monkeypatch):
  content = _collected(_study())

  def verdicts_of(cost):
    runs = [_reading_inputs(x, cost) for x in content.runs]
    ahead, *_ = _results(dataclasses.replace(content, runs=runs))
    return ahead.outcome

  assert verdicts_of(0.021).startswith('reproduced')
  assert verdicts_of(0.019) == (
    'not learned at 2.35 M parameters: ahead of the floor by at most 0.019'
  )
  assert verdicts_of(-0.5).endswith('not ahead of the floor')
  low = types.SimpleNamespace(is_low=True)
  monkeypatch.setattr(claim_results, 'power', lambda *_: low)
  assert verdicts_of(0.019).endswith(
    'low power, ahead of the floor by at most 0.019'
  )


def test_a_gain_needs_a_model_that_has_learned_by_tuning():
  gain = _claim(('scratch', 'adapted', 'source', 'source'))
  content = _collected(_study(claims=(gain,)))

  def outcome(costs):
    runs = [_reading_inputs(x, costs[x.model]) for x in content.runs]
    (result,) = _results(dataclasses.replace(content, runs=runs))
    return result.outcome

  # What the model before tuning reads does not count.
  costs = {'scratch': 0.0, 'adapted': 0.0, 'source': 1.0}
  assert outcome(costs) == (
    'not learned at 2.35 M parameters: not ahead of the floor'
  )
  assert outcome(costs | {'adapted': 1.0}) == (
    'reproduced at 2.35 M parameters: scratch has not learned'
  )
  assert outcome(costs | {'adapted': 1.0, 'scratch': 1.0}) == (
    'reproduced at 2.35 M parameters'
  )


def test_the_most_frequent_label_is_a_floor():
  study = _study()
  (evaluation,) = study.evaluations
  floors = {'tasks/acc': 'held_out/macro_f1'}  # Of all rows, .5.
  changed = dataclasses.replace(evaluation, floors=floors)
  *_, task = _results(
    _collected(dataclasses.replace(study, evaluations=(changed,)))
  )
  assert task.outcome == (
    'not learned at 2.35 M parameters: not ahead of the floor'
  )


def test_the_most_frequent_label_is_one_number():
  # A module has one label: right or wrong for all of its pieces.
  names = [f'{i}.py' for i in range(24) for _ in range(4)]
  weights = np.ones(len(names))
  majority = np.repeat(np.arange(24) % 2 == 0, 4).astype(float)
  right = np.tile([1.0, 1.0, 0.0, 1.0], 24)
  scores = [
    results_store.ratio_score('held_out', name, x, weights, names)
    for name, x in (('majority', majority), ('accuracy', right))
  ]
  study = _study()
  (evaluation,) = study.evaluations
  evaluation = dataclasses.replace(
    evaluation, floors={'held_out/accuracy': pages.MAJORITY}
  )
  run = next(x for x in _collected(study).runs if x.model == 'adapted')
  run = dataclasses.replace(run, scores={evaluation.name: scores})
  floor = contrasts.reported(scores[0]).value
  lead = claim_results.lead([run] * 3, 'held_out/accuracy', evaluation)
  assert lead == pytest.approx(0.75 - floor) and 0 < floor < 0.75


def test_chance_is_a_floor():
  study = _study()
  (evaluation,) = study.evaluations
  for floor, verdict in ((0.47, 'no difference'), (0.49, 'not learned')):
    changed = dataclasses.replace(evaluation, floors={'tasks/acc': floor})
    *_, task = _results(
      _collected(dataclasses.replace(study, evaluations=(changed,)))
    )
    assert task.verdict == verdict


def test_other_examples_are_not_compared():
  content = _collected(_study())
  score = _loss(3.0, 0)
  weights = 200.0, *score.weights[1:]
  other = dataclasses.replace(score, weights=weights)
  runs = [
    dataclasses.replace(x, scores={'loss': [other]})
    if x.model == 'scratch'
    else x
    for x in content.runs
  ]
  (ahead, *_) = _results(dataclasses.replace(content, runs=runs))
  assert ahead.effect is None and 'another version of Python' in ahead.note


def test_keys_in_which_arms_differ():
  content = _collected(_study())
  assert claim_results.differences(content, ('scratch', 'adapted')) == [
    {'key': 'init.mode', 'scratch': 'scratch', 'adapted': 'adapted'}
  ]
  # A model that was imported has its shape alone.
  source = dataclasses.replace(
    content.runs[0],
    values={'model.kind': 'decoder_only'},
    summary={'made_by': {'command': 'import', 'sources': ['decoders/base']}},
  )
  adapted = content.of('adapted')[0]
  values = {**adapted.values, 'model.kind': 'encoder_decoder'}
  adapted = dataclasses.replace(adapted, values=values)
  content = dataclasses.replace(content, runs=[source, adapted])
  rows = claim_results.differences(content, ('source', 'adapted'))
  assert rows == [
    {'key': 'made by', 'source': 'import decoders/base', 'adapted': 'train'},
    {
      **{'key': 'model.kind', 'source': 'decoder_only'},
      'adapted': 'encoder_decoder',
    },
  ]


@pytest.mark.parametrize(
  'direction,side',
  # What is better contradicts "no better": its side is what is worse.
  [('less', 1), ('greater', -1), ('no better', -1), ('equal', -1)],
)
def test_a_claim_is_drawn_on_the_side_that_it_claims(direction, side):
  claim = _claim(('scratch', 'adapted'), direction=direction)
  result = claim_results.Result(claim, 0.95, effect=-0.5, low=-0.6, high=-0.4)
  _, *drawn = result.drawn
  assert drawn == pytest.approx([side * 25, side * 30, side * 20])


@pytest.mark.parametrize(
  'smallest,effect,text',
  [(0.02, -0.1234, '-0.123'), (0.5, 1.0, '+1.00'), (1.0, -2e7, '-2e+07')],
)
def test_effects_have_digits_by_what_matters(smallest, effect, text):
  claim = _claim(('scratch', 'adapted'), smallest=smallest)
  assert claim_results.Result(claim, 0.95, effect=effect).effect_text == text


def test_a_policy_has_curves_and_rollouts(tmp_path):
  study = _study(claims=())
  rollout = {'model': 'adapted', 'seed': 0, 'step': 100, 'prompt': 'a < b'}
  content = _collected(study, rollouts=[rollout | {'completion': 'c\nd'}])
  for run in content.runs:
    if run.model == 'adapted':
      run.curve['reward'] = [0.1, 0.2, 0.3, 0.4]
      run.curve['kl'] = [0.0, 0.5, 1.0, 30.0]
  study_report.write(content, tmp_path)
  page = (tmp_path / 'report.html').read_text()
  assert 'alt="held-out reward"' in page and 'alt="held-out kl"' in page
  assert '1 completions of held-out prompts' in page
  assert '<td>a &lt; b</td><td>c\nd</td>' in page
  assert (tmp_path / 'held_out_kl.png').exists()


def test_write(tmp_path, bucket):
  content = _collected(_study())
  *summary, first = (sentences := study_report.write(content, tmp_path))[:4]
  assert summary == [
    'Of 3 models, adapted has the lowest held-out loss in the evaluation'
    " 'loss': 2.500 nats per target token, then source with 2.700.",
    'With the inputs of other examples its loss changes by +0.250.',
    'Primary claims by verdict: reproduced: 2, no difference: 1.',
  ]
  assert first.startswith(
    'adapted is ahead. Reproduced at 2.35 M parameters. held_out/loss: adapted'
    ' - scratch: -0.500 (98.33 % interval -0.5'
  )
  assert (
    'rate: the best learning rate is 0.003 (loss on rows that reports leave'
    ' out: 0.001: 3.250, 0.003: 3.125, 0.009: nan).'
  ) in sentences
  assert (
    'best is adapted: of 2 it has the lowest held-out loss, 2.500.'
  ) in sentences
  assert (
    'edge: the best learning rate is 0.003 (loss on rows that reports leave'
    ' out: 0.001: 3.250, 0.003: 3.125), the largest tried: a larger one may'
    ' be better.'
  ) in sentences
  assert (
    'loss: with the inputs of other examples the loss is higher by adapted'
    ' 0.250, source 0.270, scratch 0.300; a model that loses little hardly'
    ' reads its inputs.'
  ) in sentences
  page = (tmp_path / 'report.html').read_text()
  text = (tmp_path / 'report.md').read_text()
  for note in (study_report._SEEDS, study_report._LEVELS, '3.11.7', '40.0'):
    assert note in page and note in text
  for text in ('3.11.7', 'a &lt; b', '--workdir=&lt;runs&gt;', '2031-02-03'):
    assert text in page
  assert 'adapted, log_prob -12.5:' in page and 'href="' in page
  assert '2.35 M' in page and '<td>init.mode</td>' in page
  assert 'http' not in page  # Nothing outside the page.
  assert 'exact_match' not in page  # Language modelling.
  names = [x for x in page.split('<h2>') if '</h2>' in x]
  names = [x.split('</h2>')[0] for x in names]
  assert names[:4] == [
    *('A number for each model', 'Continuations', 'Loss', 'Claims')
  ]
  assert 'Rollouts' not in page and 'Held-out metrics' not in page
  for name in (
    'models',
    'claims',
    'loss_target_tokens',
    'loss_flops',
    'needles',
    'scatter_0',
  ):
    assert (tmp_path / f'{name}.png').read_bytes().startswith(b'\x89PNG')
  report = json.loads((tmp_path / 'report.json').read_text())
  assert report['summary'] == summary
  assert report['findings'] == sentences[len(summary) + len(CLAIMS) :]
  assert [x['verdict'] for x in report['claims']] == [
    *['reproduced at 2.35 M parameters'] * 2,
    'not primary: no verdict',
    'no difference at 2.35 M parameters: no floor',
  ]
  with open(tmp_path / 'numbers.csv') as file:
    rows = list(csv.DictReader(file))
  assert tuple(rows[0]) == claim_tables.COLUMNS
  adapted = [x for x in rows if (x['arm'], x['seed']) == ('adapted', '0')]
  assert [x['value'] for x in adapted if x['task'] == 'development'] == [
    *('7.5', '4.5', '3.5', '2.5')
  ]
  (loss,) = (
    x for x in adapted if (x['task'], x['metric']) == ('loss/held_out', 'loss')
  )
  assert float(loss['value']) == pytest.approx(2.5, abs=0.002)
  assert (loss['step'], loss['tokens'], loss['FLOPs']) == (
    *('100', '400000', '3e+12'),
  )
  # Language modelling; and a score of all rows, of the development part too.
  names = {x['metric'] for x in rows}
  assert 'loss' in names and 'choice' in names
  assert not names & {'exact_match', 'target_tokens', 'macro_f1'}
  study_report.write(content, f'{bucket}/study')
  assert paths.tree(paths.at(f'{bucket}/study')) == paths.tree(tmp_path)


def test_a_single_seed_and_a_score_of_zero_are_summarised(tmp_path):
  study = _study((0,), claims=CLAIMS[:1])
  runs = [_run('scratch', 0.0, 0), _run('adapted', 2.5, 0)]
  summary = study_report.write(_collected(study, runs=runs), tmp_path)
  assert summary[0].startswith('Of 2 models, scratch has the lowest held-out')
  assert summary[2].startswith('Every model has one seed')


def test_nothing_is_finished(tmp_path):
  content = _collected(_study(), runs=[], stages=[], rates={})
  first, *_ = study_report.write(content, tmp_path)
  assert first == 'adapted is ahead. 0 of 3 seeds are there.'


def test_the_table_of_all_claims(tmp_path, monkeypatch):
  content = _collected(_study())
  study_report.write(content, tmp_path / 'a')
  study_report.write(_collected(_study(claims=())), tmp_path / 'c')
  names = {'adaptation': 'a', 'wang': 'd', 'meap': 'b', 'correlation': 'c'}
  folders = {name: tmp_path / folder for name, folder in names.items()}
  readme = tmp_path / 'README.md'
  readme.write_text(
    '# Studies\n<!-- claims -->\nold\n<!-- end of claims -->\n.'
  )
  earlier = [{'claim': 'It is so.', 'verdict': 'undecided'}]
  arms = 'scratch', 'adapted'
  picture = {'A paper (x)': (('adaptation', arms), ('wang', arms))}
  kept, figure = tmp_path / claim_tables.RESULTS, tmp_path / 'verdicts.png'
  kept.write_text(json.dumps({'adaptation': earlier, 'wang': earlier}))
  # A sitting that has not come to its claims.
  study_report.write(_collected(_study(), runs=[]), tmp_path / 'd')
  for _ in range(2):  # The same again.
    figure.unlink(missing_ok=True)
    claim_tables.write_readme(readme, folders, picture)
    text = readme.read_text()
    end = 'correlation.\n\nNot run: meap.\n<!-- end of claims -->\n.'
    assert text.endswith(f'|\n\nWithout claims: {end}')
    assert '| It is so. | undecided (by the rule of before) |' in text
    # Of pages that were not run again.
    assert json.loads(kept.read_text()) == {'wang': earlier}
    assert figure.read_bytes().startswith(b'\x89PNG')
  first = text.splitlines()[4]
  assert '; claimed less, m = 0.02, level 98.33 % | -0.5' in first
  start = (
    '| adapted is ahead. | a Fig. 2 | +2.6 | adaptation, cpu; held_out/loss:'
  )
  start += ' adapted - scratch; 3 seeds; 40 groups; claimed less'
  assert first.startswith(start)
  end = '| reproduced at 2.35 M parameters |'
  end += ' `python -m encdec_adapt.study --study=x` | 2.0 |'
  assert first.endswith(end)
  drawn = []  # Of the picture, those with a verdict.
  draw = lambda rows, path: drawn.extend(row[:2] for row in rows)  # noqa: E731
  monkeypatch.setattr(claim_tables.report_figures, 'draw_claims', draw)
  claim_tables.write_readme(readme, folders, picture)
  assert drawn == [
    ('A paper: adapted is ahead.', 'reproduced'),
    ('A paper: adapted is ahead.', 'no difference'),
  ]
  readme.write_text('# Studies')
  with pytest.raises(errors.UserError, match='has no lines <!-- claims -->'):
    claim_tables.write_readme(readme, folders, picture)


def test_models_name_the_edge_and_the_arm_of_their_learning_rate(tmp_path):
  page = _study()
  arms = [dataclasses.replace(x, rate='edge') for x in page.arms]
  rates = (pages.Rate('edge', 'scratch', (1e-3, 3e-3)),)
  page = dataclasses.replace(page, arms=tuple(arms), rates=rates)
  study_report.write(_collected(page), tmp_path)
  text = (tmp_path / 'report.html').read_text()
  assert '<td>0.001 (edge)</td>' in text
  assert '<td>0.001 (edge), that of scratch</td>' in text


def test_a_claim_of_one_arm_has_its_value_as_effect():
  claim = _claim(('adapted',), direction='greater')
  (result,) = _results(_collected(_study(claims=(claim,))))
  assert result.effect == pytest.approx(2.5, abs=0.002)
  assert result.contrast == 'held_out/loss: adapted'
  assert result.low > 2 and result.verdict == 'reproduced'
