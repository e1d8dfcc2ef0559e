"""The pages in configs/studies: they load, and cost what they may."""

import dataclasses
import json

import pytest

from encdec_adapt import configs, study
from encdec_adapt.base import errors
from encdec_adapt.configs.studies import all as all_pages
from encdec_adapt.configs.studies import shared
from encdec_adapt.evaluation.tasks import retrieval_scores, retrieval_tasks
from encdec_adapt.lab import (
  claim_tables,
  pages,
  stage_states,
  stages,
  study_plan,
)
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny

SIZES = 'smoke', 'cpu', 'gpu', 'pod'
FOLDER = configs.FOLDER / 'studies'
NAMES = [name for name in all_pages.PAGES if (FOLDER / f'{name}.py').exists()]
# Pages with arms that read rows of several objectives, or with those of other
# pages.
UNPAIRED = 'wang', 'objectives', 'meap', 'correlation', 'efficiency', 'all'
# FLOPs of a page, and of one of its runs.
MOST, MOST_RUN = 3.0e14, 6.5e12
MORE = {'adaptation': (1.15e15, 3.3e13), 'wang': (3.4e14, MOST_RUN)}
MORE['conversion'] = 3.3e14, MOST_RUN
# Models at equal total FLOPs have the cost of the source, too.
MOST_RUNS = dict.fromkeys(('scratch_total', 'wide'), 6.6e13)


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


def _page(name, size='cpu'):
  return study.load(f'configs/studies/{name}.py:size={size}')


def _key(page, arm):
  """Returns what identifies a run of an arm, whatever its names are."""
  items = {x.name: x for x in (*page.arms, *page.commands)}
  starts = []
  for key, text in arm.starts.items():
    reads = [items[x] for x in pages.placeholders(text) or [text]]
    starts.append(
      (
        key,
        *(
          # Another page has the page before a name.
          _key(page, x)
          if isinstance(x, pages.Arm)
          else x.module + x.name.rpartition('.')[2]
          for x in reads
        ),
      )
    )
  changes = tuple(sorted(map(str, arm.changes.items())))
  return arm.config, changes, tuple(starts), str(arm.budget)


def _costs(page):
  """Returns FLOPs of runs by what identifies them: arms, rates, evaluation."""
  size, costs = shared.Size(page.size), {}
  for arm in page.arms:
    step, steps = shared.spent(size, arm)
    for seed in page.seeds_of(arm.name):
      costs[_key(page, arm), seed] = step * steps
    for rate in page.rates:
      if rate.arm == arm.name:
        count = len(rate.values) * step * steps
        costs[_key(page, arm), rate.values] = count
    # A bound: the step of a pair has its teacher's forward pass, too.
    values = shared.settings(arm)
    forward = step / values.train.batch_size / 3
    for evaluation in page.evaluations:
      models = evaluation.models or [x.name for x in page.arms]
      if arm.name in models and evaluation.records:
        for seed in page.seeds_of(arm.name):
          records = evaluation.records.rpartition('.')[2]
          key = _key(page, arm), seed, records
          # Twice: also with the prefixes of other rows.
          costs[key] = 2 * values.data.eval_rows * forward
  return costs


@pytest.mark.parametrize(
  'size',
  [pytest.param(x, marks=[pytest.mark.long] * (x != 'cpu')) for x in SIZES],
)
@pytest.mark.parametrize('name', NAMES)
def test_pages_load_and_their_configurations_are_valid(name, size):
  page = _page(name, size)
  assert page.size == size
  for arm in page.arms:
    shared.settings(arm)


def test_a_baseline_searches_the_texts_of_the_arms():
  page = _page('embeddings', 'cpu,baseline=MINILM')
  command, evaluation = page.commands[-1], page.evaluations[0]
  assert '--checkpoint=MINILM' in command.arguments
  assert evaluation.models[-1] == command.name
  assert 'baseline' not in str(_page('embeddings').evaluations)


@pytest.mark.parametrize('name', (*NAMES, 'all'))
def test_a_page_is_short(name):
  lines = (FOLDER / f'{name}.py').read_text().splitlines()
  assert len(lines) <= 165  # 150, and a tenth.


def test_the_table_has_the_results_by_the_rule_of_before():
  results = json.loads((FOLDER / claim_tables.RESULTS).read_text())
  rows = [row for rows in results.values() for row in rows]
  table = (FOLDER / 'README.md').read_text()
  for row in rows:
    verdict = f'{row["verdict"]} ({claim_tables.BEFORE})'
    line = claim_tables.markdown([row | {'verdict': verdict}]).splitlines()[-1]
    assert line in table


def test_look_ups_fit_what_models_were_trained_on(monkeypatch):
  stages.resolve(_page('tuning'))
  # As the page had them.
  monkeypatch.setitem(shared.TUNING, 'data.encoder_length', 384)
  monkeypatch.setitem(shared.TUNING, 'data.decoder_length', 128)
  with pytest.raises(errors.UserError) as caught:
    stages.resolve(_page('tuning'))
  for text in 'study tuning', 'rate_base_tuned', '512 tokens', 'at most 256':
    assert text in str(caught.value)


def test_needles_fit_what_models_were_trained_on():
  (needles,) = (x for x in _page('meap').evaluations if x.name == 'needles')
  flags = dict(x[2:].split('=') for x in needles.arguments)
  retrieval = retrieval_tasks.read(
    flags['retrieval'],
    flags['retrieval_lengths'],
    flags['retrieval_tasks'],
    int(flags['limit']),
  )
  reader = vocabulary_pair.open_vocabulary('configs/decoders/base')
  longest = max(
    len(x.context) + len(reader.encode(x.question))
    for x in retrieval.examples(reader)
  )
  # BOS, and what is generated.
  assert longest + 1 + retrieval_scores.ANSWER_TOKENS <= 256


@pytest.mark.parametrize('size', ['cpu', 'gpu'])
@pytest.mark.parametrize('name', NAMES)
def test_arms_of_primary_claims_choose_a_learning_rate(name, size):
  page = _page(name, size)
  rates = {rate.name: rate for rate in page.rates}
  named = {x for claim in page.claims if claim.primary for x in claim.contrast}
  # The trained source of gpu has a rate of its own by hand.
  for arm in page.arms:
    if arm.name in named - {'base', 'small'}:
      rate = rates[arm.rate]
      assert (rate.arm, rate.seed, rate.extra) == (arm.name, 1000, 2), arm.name
      low, middle, high = rate.values
      assert (middle / low, high / middle) == pytest.approx((3, 3))


@pytest.mark.parametrize('name', NAMES)
def test_a_claim_with_a_verdict_has_a_floor(name):
  page = _page(name)
  for claim in page.claims:
    evaluation = page.evaluation_for(claim)
    # Attention is compared with itself; nothing is learned for it.
    if claim.primary and not claim.metric.startswith('attention/'):
      assert claim.metric in evaluation.floors, claim.sentence


def test_claims_of_the_picture_are_primary():
  rows = [x for claims in all_pages.PICTURE.values() for x in claims]
  assert len(rows) == len({*rows}) == 8
  for paper, claims in all_pages.PICTURE.items():
    for name, contrast in claims:
      (_,) = (
        x
        for x in _page(name).claims
        if x.primary and x.contrast == contrast and x.source.startswith(paper)
      )


@pytest.mark.parametrize('name', NAMES)
def test_arms_end_with_a_decay(name):
  schedules = {shared.settings(x).optimizer.schedule for x in _page(name).arms}
  kinds = {schedule.kind for schedule in schedules}
  assert kinds <= ({'rsqrt'} if name == 'conversion' else {'cosine'})


@pytest.mark.long
def test_costs_at_cpu():
  total = {}
  for name in NAMES:
    page = _page(name)
    if page.claims or page.arms:
      costs = _costs(page)
      new = {key: x for key, x in costs.items() if key not in total}
      most, most_run = MORE.get(name, (MOST, MOST_RUN))
      assert sum(new.values()) <= most, name
      for arm in page.arms:
        if (_key(page, arm), page.seeds_of(arm.name)[0]) not in new:
          continue  # A run of another page.
        flops = shared.flops(shared.Size('cpu'), arm)
        limit = MOST_RUNS.get(arm.name, most_run)
        assert flops <= limit, (name, arm.name)
      total |= costs
  assert sum(total.values()) <= 3.6e15


def test_scratch_costs_as_much_as_source_adaptation_and_teacher():
  page, size = _page('adaptation'), shared.Size('cpu')
  arms = {arm.name: arm for arm in page.arms}
  # Of configs/decoders/base/summary.json.
  total = 49_387_143_168_000 + shared.flops(size, arms['adapted'])
  for name, flops in (
    ('scratch_total', total),
    ('continued_flops', total - 49_387_143_168_000),
  ):
    spent = shared.flops(size, arms[name])
    assert spent == pytest.approx(flops, rel=0.01), name
  steps = [
    shared.spent(size, arms[name])[1]
    for name in ('adapted', 'scratch', 'scratch_taught', 'continued')
  ]
  assert steps == 4 * [375]
  # A quarter of the tokens that the source has read.
  assert steps[0] * 16 * 256 == pytest.approx(6_141_172 / 4, rel=0.01)


def test_pages_of_other_pages_have_their_names():
  page = _page('correlation')
  arms = {arm.name: arm for arm in page.arms}
  tuned = arms['tuning.prefix_tuned']
  assert tuned.starts['init.encoder'] == 'tuning.base'
  assert tuned.rate == 'tuning.rate_prefix_tuned'
  assert arms['adaptation.adapted'].seeds == (0, 1, 2)
  command = next(x for x in page.commands if x.name == 'objectives.merged')
  assert command.arguments[1] == '{objectives.prefix_taught}'
  assert command.arguments[-1] == '--output={objectives.merged}'


def test_efficiency_measures_each_shape_at_its_lowest_loss():
  cost = _page('efficiency').evaluations[-1]
  names = 'adapted', 'continued_flops', 'wide', 'unbalanced'
  assert {*cost.models} == {f'adaptation.{x}' for x in names}


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_arms_of_paired_claims_read_equal_rows(name):
  page = _page(name)
  paired = [claim for claim in page.claims if claim.paired]
  stages.resolve(page)  # Refuses others.
  assert paired or name in UNPAIRED


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_steps_at_pod_fit_their_chips(name, tmp_path):
  for i in range(9):  # Passages of several files have labels.
    (tmp_path / f'{i}.txt').write_text('a line of text\n' * 400)
  text = f'text="text:{tmp_path}/*.txt",vocabulary=configs/decoders/base'
  page = dataclasses.replace(_page(name, f'pod,{text}'), root=str(tmp_path))
  states = stage_states.States(page, stages.resolve(page))
  lines = study_plan.describe(page, states).splitlines()
  assert not any('does not fit' in x or 'not measured' in x for x in lines)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_page_runs(tmp_path):
  arguments = ['--study=configs/studies/t5gemma2.py:size=smoke']
  assert tiny.call(study, *arguments, f'--root={tmp_path}') == 0
  assert (tmp_path / 'report.html').exists()


def test_identities_are_the_same_in_every_folder(tmp_path, monkeypatch):
  def identities():
    resolved = stages.resolve(study.load('architecture:size=smoke'))
    return {name: stage.identity for name, stage in resolved.items()}

  in_checkout = identities()
  monkeypatch.chdir(tmp_path)
  assert identities() == in_checkout
