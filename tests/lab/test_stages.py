"""Stages by content: what an edit of a page runs, and who else reads it."""

import dataclasses
import json

import pytest

from encdec_adapt import study
from encdec_adapt.base import errors
from encdec_adapt.lab import pages, stage_states, stages, workers
from encdec_adapt.telemetry import environment

CONFIG = {
  'data.vocabulary': 'bytes',
  'data.objective': 'prefix_lm',
  'data.encoder_length': 16,
  'data.decoder_length': 16,
  'train.steps': 8,
  'train.batch_size': 8,
}
CONFIG |= {
  f'model.{side}.{key}': value
  for side in ('encoder', 'decoder')
  for key, value in {'layers': 1, 'width': 16, 'vocab_size': 512}.items()
}


@pytest.fixture
def page(tmp_path, monkeypatch):
  """A study: a pair, the same tuned, and a pair with a chosen rate."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'lines.txt').write_text('a line of text\n' * 40)
  config = CONFIG | {'data.source': 'text:lines.txt#lines'}
  return pages.Study(
    name='small',
    title='A study',
    size='test',
    arms=(
      pages.Arm('pair', 'base', config),
      pages.Arm(
        'tuned',
        'base',
        config | {'init.mode': 'checkpoint', 'data.seed': 3},
        starts={'init.encoder': 'pair'},
      ),
      pages.Arm('scratch', 'base', config, rate='rate'),
    ),
    seeds=(0, 1),
    evaluations=(
      pages.Evaluation('loss', records='pair', models=('pair', 'scratch')),
    ),
    commands=(
      pages.Command('hf', 'convert', ('export', '--checkpoint={pair}', '{hf}')),
    ),
    rates=(pages.Rate('rate', 'scratch', (1e-3, 3e-3)),),
    root='runs/studies/small_test',
  )


def run(study, failing=(), only=''):
  """Names of the stages that a command runs; nothing is computed."""
  names = []
  states = stage_states.States(study, stages.resolve(study))

  def run_stage(stage, arguments):
    assert not any('{' in text for text in arguments), arguments
    names.append(stage.name)
    states.folder(stage).mkdir(parents=True, exist_ok=True)
    (states.folder(stage) / 'result').write_text('1')
    if stage.name in failing:
      raise errors.UserError('it diverged')
    return 0, 3e-3 if stage.rate else None

  status = workers.work(study, states, run_stage, only)
  assert len(names) == len(set(names))
  return set(names), status, states


def _changed(study, arm_name, **fields):
  """The study with fields of an arm changed; those of `changes` are added."""
  arms = []
  for arm in study.arms:
    if arm.name == arm_name:
      changes = arm.changes | fields.get('changes', {})
      arm = dataclasses.replace(arm, **(fields | {'changes': changes}))
    arms.append(arm)
  return dataclasses.replace(study, arms=tuple(arms))


ALL = {'pair', 'pair_seed1', 'tuned', 'tuned_seed1', 'scratch'}
ALL |= {'scratch_seed1', 'rate', 'records', 'records_tuned', 'hf'}
ALL |= {f'loss_{x}' for x in ALL if x.startswith(('pair', 'scratch'))}
PAIR = {x for x in ALL if x.startswith(('pair', 'tuned', 'loss_pair', 'hf'))}
SCRATCH = {'scratch', 'scratch_seed1', 'loss_scratch', 'loss_scratch_seed1'}


def _replace(**fields):
  return lambda page: dataclasses.replace(page, **fields)


EDITS = {
  'nothing': (lambda page: page, set()),
  'words': (_replace(title='Another', note='See above.', size='more'), set()),
  'order': (
    lambda page: dataclasses.replace(page, arms=page.arms[::-1]),
    set(),
  ),
  'a claim': (
    _replace(
      claims=(
        pages.Claim(
          'Adapted is better.',
          'paper',
          '+2',
          ('scratch', 'pair'),
          'held_out/loss',
          'less',
          0.1,
          'seeds differ by as much',
          True,
          True,
        ),
      )
    ),
    set(),
  ),
  'a seed': (
    _replace(seeds=(0, 1, 2)),
    {'pair_seed2', 'tuned_seed2', 'scratch_seed2'}
    | {'loss_pair_seed2', 'loss_scratch_seed2'},
  ),
  'an arm': (
    lambda page: dataclasses.replace(
      page,
      arms=(
        dataclasses.replace(
          page.arms[0],
          name='wide',
          changes=page.arms[0].changes | {'model.decoder.mlp_width': 48},
        ),
        *page.arms,
      ),
    ),
    {'wide', 'wide_seed1'},
  ),
  'an evaluation': (
    lambda page: dataclasses.replace(
      page,
      evaluations=(
        *page.evaluations,
        pages.Evaluation('cost', ('--cost=8,8',), all_seeds=False),
      ),
    ),
    {'cost_pair', 'cost_tuned', 'cost_scratch'},
  ),
  'a value of an arm that others read': (
    lambda page: _changed(page, 'pair', changes={'train.dropout': 0.1}),
    PAIR,
  ),
  'a value equal to the default': (
    lambda page: _changed(page, 'pair', changes={'train.dropout': 0.0}),
    set(),
  ),
  'where compiled programs are': (
    lambda page: _changed(page, 'pair', changes={'compute.compile_cache': 'x'}),
    set(),
  ),
  'rates': (
    _replace(rates=(pages.Rate('rate', 'scratch', (1e-3, 2e-3)),)),
    SCRATCH | {'rate'},
  ),
  'a budget': (
    lambda page: _changed(page, 'scratch', budget=16),
    SCRATCH | {'rate'},
  ),
  'data of one arm': (
    lambda page: _changed(page, 'tuned', changes={'data.seed': 4}),
    {'records_tuned', 'tuned', 'tuned_seed1'},
  ),
}


@pytest.mark.long
@pytest.mark.parametrize('edit, expected', EDITS.values(), ids=EDITS)
def test_an_edit_runs_what_depends_on_it(page, edit, expected):
  names, status, _ = run(page)
  assert (names, status) == (ALL, 0)
  # The edited page has a name of its own for every stage that it runs.
  assert run(edit(page))[:2] == (expected, 0)
  # The stages of the first page are still there.
  assert run(page)[0] == set()


def test_an_evaluation_follows_its_model(page):
  names = list(stages.resolve(page))
  assert names.index('loss_pair') == names.index('pair') + 1


def test_a_rate_chosen_by_another_metric_is_another(page):
  (rate,) = page.rates
  other = dataclasses.replace(rate, metric='reward')
  edited = dataclasses.replace(page, rates=(other,))
  before, after = map(stages.resolve, (page, edited))
  changed = {x for x in before if before[x].identity != after[x].identity}
  assert changed >= {'rate', *SCRATCH}
  with pytest.raises(errors.UserError, match="metric='accuracy'"):
    other = dataclasses.replace(rate, metric='accuracy')
    dataclasses.replace(page, rates=(other,))


def test_origins_are_those_of_trained_models():
  page = study.load('tuning:size=smoke')
  origins = stages.origins(page, stages.resolve(page))
  assert origins['adapted_tuned'] == ('encoder_decoder', False)
  assert origins['base_tuned'] == ('decoder_only', False)
  # A model that is tuned from random weights of its seed, too.
  for name in 'scratch', 'scratch_tuned':
    assert origins[name] == ('encoder_decoder', True)


def test_an_edit_of_the_text_runs_everything(page, tmp_path):
  run(page)
  with open(tmp_path / 'lines.txt', 'a') as file:
    file.write('one more\n')
  assert run(page)[0] == ALL


def test_another_study_reads_finished_stages(page):
  run(page)
  root = 'runs/studies/other_test'
  other = dataclasses.replace(page, name='other', root=root)
  names, _, states = run(dataclasses.replace(other, seeds=(1, 2)))
  # The single export is of the first seed.
  assert {x for x in names if not x.endswith('_seed2')} == {'hf'}
  folder = states.folder(states.stages['pair_seed1'])
  assert str(folder) == 'runs/studies/small_test/pair_seed1'
  index = (folder.parent.parent / 'stages.jsonl').read_text().splitlines()
  identities = [json.loads(line)['identity'] for line in index]
  assert len(identities) == len(set(identities)) == len(ALL) + len(names)


@pytest.mark.long
def test_a_study_in_a_bucket(page, bucket):
  page = dataclasses.replace(page, root=f'{bucket}/studies/small', seeds=(0,))
  names, status, states = run(page)
  assert len(names) == 9 and status == 0
  assert run(page)[0] == set()
  other = dataclasses.replace(page, root=f'{bucket}/studies/other')
  assert run(other)[0] == set()


def test_a_failure_is_a_result_and_stops_what_reads_it(page):
  names, status, states = run(page, failing=['rate'])
  assert names == ALL - SCRATCH and status == 1
  assert states.state(states.stages['rate']).error == 'UserError: it diverged'
  # Given again, the command repeats no failure; --stage does.
  assert run(page)[:2] == (set(), 1)
  assert run(page, only='pair')[:2] == (set(), 0)  # What else failed.
  assert run(page, only='rate')[:2] == ({'rate'}, 0)
  assert run(page)[:2] == (SCRATCH, 0)
  with pytest.raises(errors.UserError, match='--stage=pair reads'):
    study = _changed(page, 'pair', changes={'data.seed': 9})
    run(study, only='pair')


def test_other_versions_are_named_and_run_again(page, monkeypatch):
  run(page)
  versions = environment.versions()
  here = versions | {'jax': '0.99'}
  monkeypatch.setattr(environment, 'versions', lambda: here)
  _, _, states = run(page)
  state = states.state(states.stages['pair'])
  cores = state.environment['cores']
  (line,) = state.difference(here | {'cores': cores})
  assert line.startswith('jax: ') and '0.99' in line
  monkeypatch.setattr(environment, 'versions', lambda: versions)
  states.discard_others(cores)
  assert run(page)[0] == set()
  states.discard_others(cores + 1)
  assert run(page)[0] == ALL


@pytest.mark.parametrize(
  'name, content, problem',
  [
    ('study.json', '{"digest": "1"}', 'small_test holds stages of an earlier'),
    ('report.json', '{"study": "large"}', 'small_test has the results of the'),
    ('stages/study.json', '{"study": "large"}', 'has the results of the'),
  ],
)
def test_the_folder_of_another_study_or_version_is_refused(
  page, tmp_path, name, content, problem
):
  folder = tmp_path / page.root
  (folder / name).parent.mkdir(parents=True)
  (folder / name).write_text(content)
  with pytest.raises(errors.UserError, match=problem):
    run(page)


def _claim(**fields):
  base = {'contrast': ('pair', 'scratch'), 'metric': 'held_out/loss'}
  base |= {'direction': 'less', 'smallest': 0.1}
  return pages.Claim('It is so.', 'paper', '1', reason='', **(base | fields))


@pytest.mark.parametrize(
  'fields, problem',
  [
    ({'claims': (_claim(contrast=('pair', 'pear')),)}, r"names 'pear'.*'pair'"),
    ({'claims': (_claim(metric='held_out/lost'),)}, "'held_out/lost', and the"),
    ({'claims': (_claim(contrast=('pair', 'tuned')),)}, 'metric .* none'),
    ({'claims': (_claim(direction='less '),)}, 'one of greater, less, equal'),
    ({'claims': (_claim(smallest=0.0),)}, 'smallest=0.0'),
    ({'claims': (_claim(primary=True),) * 6}, '6 claims are primary'),
    ({'arms': (pages.Arm('hf', 'base'),)}, "name 'hf' is given twice"),
    (
      {'arms': (pages.Arm('a', 'base', starts={'init.encoder': 'b'}),)},
      "a starts from 'b', which is not among a, hf",
    ),
    ({'rates': ()}, "learning rate of 'rate'"),
    ({'seeds': (0, 1, 1)}, r'seeds \(0, 1, 1\) name one twice'),
    (
      {'evaluations': (pages.Evaluation('loss', metrics=()),)},
      'evaluation loss names no metric',
    ),
  ],
)
def test_bad_pages_are_refused(page, fields, problem):
  with pytest.raises(errors.UserError, match=problem):
    dataclasses.replace(page, **fields)


def test_paired_arms_read_equal_rows(page):
  claims = (_claim(contrast=('scratch', 'pair'), paired=True),)
  study = dataclasses.replace(page, claims=claims)
  stages.resolve(study)
  study = _changed(study, 'scratch', changes={'train.batch_size': 4})
  with pytest.raises(errors.UserError, match='read different rows'):
    stages.resolve(study)


def test_rows_longer_than_those_of_training_are_refused(page):
  longest = {x.name: x.longest for x in stages.resolve(page).values()}
  assert {longest[x] for x in ('pair', 'tuned', 'scratch', 'hf')} == {32}
  long = {'data.encoder_length': 24}
  with pytest.raises(errors.UserError, match='stage tuned has .* 40 tokens'):
    stages.resolve(_changed(page, 'tuned', changes=long))
  # Other models are measured on the rows of `pair`.
  with pytest.raises(errors.UserError, match='stage loss_scratch has .* 40 to'):
    stages.resolve(_changed(page, 'pair', changes=long))
  for length in 32, 33:
    needles = pages.Evaluation(
      'needles',
      ('--retrieval=python', f'--retrieval_lengths=8,{length}'),
      models=('tuned',),
    )
    study = dataclasses.replace(page, evaluations=(needles,))
    if length == 32:
      stages.resolve(study)
    else:
      with pytest.raises(errors.UserError, match='needles_tuned has .* 33 tok'):
        stages.resolve(study)


def test_a_learning_rate_is_chosen_in_runs_of_full_length(page):
  resolved = stages.resolve(_changed(page, 'scratch', budget=12))
  choice, run = resolved['rate'], resolved['scratch']
  assert choice.settings.train.steps == run.settings.train.steps == 12
  assert choice.values['seed'] == 1000


def test_arms_that_read_each_other_are_refused(page):
  changes = {'init.mode': 'checkpoint'}
  starts = {'init.encoder': 'tuned'}
  study = _changed(page, 'pair', changes=changes, starts=starts)
  with pytest.raises(errors.UserError, match='pair reads tuned reads pair'):
    stages.resolve(study)
  study = _changed(page, 'tuned', seeds=(5,))
  with pytest.raises(errors.UserError, match=r'pair has the seeds \(0, 1\)'):
    stages.resolve(study)


def test_each_model_is_measured_on_all_examples_in_its_rows(page):
  evaluation = pages.Evaluation(
    'text', records=pages.EACH_MODEL, models=('pair', 'tuned')
  )
  study = dataclasses.replace(page, evaluations=(evaluation,))
  resolved = stages.resolve(study)
  records = {
    name: [x for x in resolved[f'text_{name}'].arguments if '--records' in x]
    for name in ('pair', 'tuned_seed1')
  }
  assert records == {
    'pair': ['--records={records_pair_all}/eval'],
    'tuned_seed1': ['--records={records_tuned_all}/eval'],
  }
  data = resolved['records_tuned_all'].settings.data
  assert (data.eval_rows, data.seed) == (0, 3)
  evaluation = dataclasses.replace(evaluation, models=('pair', 'hf'))
  with pytest.raises(errors.UserError, match="reads records of 'hf'"):
    dataclasses.replace(page, evaluations=(evaluation,))
