"""Collects the results of a study's stages, and writes its report."""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import datetime
import math
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.measures import held_out, inference_cost
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import append_log, atomic, paths
from encdec_adapt.lab import (
  collected,
  pages,
  stage_states,
  stages,
  stored_results,
  study_report,
  variances,
)
from encdec_adapt.models import forward_flops, model_config, parameters
from encdec_adapt.telemetry import compute_cost, environment, metrics, progress
from encdec_adapt.training.jobs import policy_batches

_RATE = 'optimizer.learning_rate'
# Stored facts of a stage's environment, and fields of a model's run.
_ENVIRONMENT = (*stage_states.ENVIRONMENT, 'git', 'cpu', 'date')
_SHAPE = 'values', 'summary', 'counts', 'size', 'curve'


def scores(
  states: stage_states.States, stage: stages.Stage
) -> list[tuple[results_store.Options, results_store.Score]]:
  """Returns the scores of a stage with their options, newest last.

  Args:
    states: states of the stages.
    stage: evaluation of a model, or choice of a rate, whose metrics are scores
      of the task 'rate' with a rate as name; finished or not.
  """
  if stage.name in states.stored:
    stored = states.stored[stage.name]
    return [(stored.facts['options'], score) for score in stored.scores]
  if states.status(stage) != stage_states.FINISHED:
    return []
  if stage.rate:
    summary = atomic.read_json(states.folder(stage) / 'rates.json')
    return [
      ({}, results_store.Score('rate', x, value, None, 1))
      for x, value in summary[stage.rate.results].items()
    ]
  with results_store.Store(states.folder(stage)) as store:
    return store.entries()


def write_variances(study: pages.Study, states: stage_states.States) -> str:
  """Writes the variances of a study's results; returns the path of the file.

  Raises:
    UserError: no evaluation has two arms with two finished seeds.
  """
  arms, origins = {}, stages.origins(study, states.stages)
  for evaluation in study.evaluations:
    page, name = study.origin(evaluation)
    if page != study.name:
      continue  # That page writes its own.
    for metric in evaluation.metrics:
      runs = [
        (origins.get(model), _finite(states, evaluation, model, metric))
        for model in study.measured(evaluation)
      ]
      most = max(len(x) for _, x in runs)
      complete = [x for x in runs if len(x[1]) == most > 1]
      if len(complete) > 1:
        arms[f'{name}/{metric}'] = complete
  if not arms:
    raise study.error(
      'no evaluation of its own arms has two of them, of two seeds each, that'
      ' are finished; run it first'
    )
  path = configs.path('studies/variances.json')
  variances.write(path, study.name, arms)
  return path


def _finite(
  states: stage_states.States,
  evaluation: pages.Evaluation,
  model: str,
  metric: str,
) -> list[results_store.Score]:
  finite = []
  for stage in states.stages.values():
    if (stage.evaluation, stage.model) == (evaluation.name, model):
      matches = [
        score
        for _, score in scores(states, stage)
        if f'{score.task}/{score.metric}' == metric
      ]
      finite += [x for x in matches[-1:] if math.isfinite(x.value)]
  return finite


def write(
  study: pages.Study, states: stage_states.States, command: str
) -> None:
  """Writes the report of the available results, and prints its sentences.

  Args:
    study: the study.
    states: states of its stages.
    command: command that runs it.
  """
  content = collect(study, states, command)
  if study.results:
    store(content, states)
  for sentence in study_report.write(content, states.root):
    print(f'- {sentence}')
  total = progress.format_seconds(content.seconds)
  print(f'\n{total} in all; report: {states.root / "report.html"}')


def store(content: collected.Collected, states: stage_states.States) -> None:
  """Writes the results of finished stages to the file of the study.

  Results of the same identity in the file stay where a stage is not finished.
  A page of other pages' models stores only stages that ran in its own folder.

  Raises:
    UserError: scores of a stage were edited in its folder.
  """
  study = content.study
  runs = {(run.model, run.seed): run for run in content.runs}
  (_, earlier), results = stored_results.find(study.results), {}
  for name, stage in states.stages.items():
    before = earlier.get(stage.identity)
    if name in states.stored or states.status(stage) != stage_states.FINISHED:
      results |= {name: before} if before else {}
      continue
    run = runs.get((stage.model, stage.seed))
    results[name] = new = _stored(states, stage, run)
    # A stage that ran again has another time; machines round differently.
    if before and before.facts['state'] == new.facts['state']:
      values = [
        [(*x[:3], f'{float(x[3]):.9g}', x[4]) for x in y.rows]
        for y in (before, new)
      ]
      if values[0] != values[1]:
        folder = states.folder(stage)
        raise errors.UserError(
          f'{folder} has other results of stage {name} than {study.results} of'
          f' study {study.name}: they were edited. Remove'
          f' {folder.parent / "stages" / folder.name}, to use the stored ones.'
        )
  if paths.at(study.results).exists():
    # Stages that are not finished here, such as with another Python, stay.
    _, in_file = stored_results.read(study.results)
    missing = states.stages.keys() & in_file.keys() - results
    results |= {name: x for name, x in in_file.items() if name in missing}
  facts = {'study': study.name, 'claims': states.terms}
  if any(study.origin(x)[0] != study.name for x in study.evaluations):
    results = {name: x for name, x in results.items() if x.facts['own']}
  if results:
    stored_results.write(study.results, facts, results)


def _stored(
  states: stage_states.States, stage: stages.Stage, run: collected.Run | None
) -> stored_results.Stored:
  state = dataclasses.asdict(states.state(stage))
  made_in = {key: state['environment'].get(key) for key in _ENVIRONMENT}
  # Command lines have folders of the machine.
  facts = {'state': state | {'command': '', 'environment': made_in}}
  facts['own'] = _is_own(states, stage)
  entries = scores(states, stage) if stage.rate or stage.evaluation else []
  lengths = [x['generated'] for x, _ in entries if 'generated' in x]
  facts['options'] = {'generated': max(lengths)} if lengths else {}
  if run and not entries:
    facts |= {x: getattr(run, x) for x in _SHAPE}
    # Keys of training are those of the page; the ledger has folders.
    facts['values'] = {} if stage.values else run.values
    facts['summary'] = {k: x for k, x in run.summary.items() if k != 'ledger'}
  # The newest of each metric, as in reports.
  newest = {(x.task, x.metric): x for _, x in entries}.values()
  rows = [row for x in newest for row in stored_results.rows(x)]
  return stored_results.Stored(facts, rows)


def collect(
  study: pages.Study, states: stage_states.States, command: str
) -> collected.Collected:
  """Reads the results of finished stages; see `write`."""
  items = {x.name: i for i, x in enumerate((*study.commands, *study.arms))}
  arms = {arm.name for arm in study.arms}
  evaluated = {x.model for x in states.stages.values() if x.evaluation}
  request = _request(study, states)
  models = [
    stage
    for stage in states.stages.values()
    if stage.model in arms | evaluated and not (stage.evaluation or stage.rate)
    if states.status(stage) == stage_states.FINISHED
  ]
  models.sort(key=lambda x: (items[x.model], x.seed or 0))
  started = {n: s for n, x in states.stages.items() if (s := states.state(x))}
  return collected.Collected(
    study,
    command,
    datetime.date.today().isoformat(),
    [_run(states, stage, request) for stage in models],
    [
      dataclasses.asdict(state)
      | {'model': stage.model, 'own': _is_own(states, stage)}
      for name, state in started.items()
      if (stage := states.stages[name])
    ],
    notes=[*_notes(started), *_audit(study, states)],
    rates={
      name: {x.metric: x.value for _, x in entries}
      for name, stage in states.stages.items()
      if stage.rate and (entries := scores(states, stage))
    },
    request=request,
    samples=_samples(study, states),
    rollouts=[*_rollouts(states, models)],
    text=_text(states),
    environment=environment.report(),
  )


def _request(
  study: pages.Study, states: stage_states.States
) -> tuple[int, int]:
  lengths = [
    stage.settings.data.train.lengths
    for stage in states.stages.values()
    if stage.module == 'train'
  ]
  # Decoder rows without inputs hold the tokens of both.
  pairs = [x for x in lengths if x.encoder and x.decoder]
  if pairs:
    return pairs[0].encoder, pairs[0].decoder
  row = lengths[0].decoder or lengths[0].encoder if lengths else 2
  return row - row // 2, row // 2


def _text(states: stage_states.States) -> dict[str, Any]:
  for stage in states.stages.values():
    entries = scores(states, stage) if stage.evaluation else []
    for options, score in entries:
      if score.task == held_out.TASK:
        facts = {'python': states.state(stage).environment['python']}
        if folder := options.get('records'):  # Stored results have no records.
          spec = record_sets.RecordSet.open(folder).spec
          facts |= {'held-out records': folder, **dataclasses.asdict(spec)}
        return facts
  return {}


def _notes(started: Mapping[str, stage_states.State]) -> list[str]:
  here, notes = environment.versions(), []
  elsewhere: dict[str, list[str]] = {}
  cores = collections.Counter()
  for name, state in started.items():
    if state.status == stage_states.FAILED:
      error = ' '.join(state.error.split()).rstrip('.')
      notes.append(f'{name} has failed: {error}.')
      continue
    # Workers may have fewer cores than the report's process.
    made_with = state.environment.get('cores')
    cores[made_with] += 1
    if lines := state.difference({**here, 'cores': made_with}):
      elsewhere.setdefault('; '.join(lines), []).append(name)
  for lines, names in elsewhere.items():
    notes.append(f'made by another version ({lines}): {", ".join(names)}.')
  if len(cores) > 1:
    counts = ', '.join(f'{n} with {x}' for x, n in cores.items())
    notes.append(f'Stages were made with different numbers of cores: {counts}.')
  return notes


def _audit(study: pages.Study, states: stage_states.States) -> Iterator[str]:
  for line in environment.difference(states.terms, study.terms):
    yield f'Changed since the first start: {line}.'
  if states.stored:
    count = f'{len(states.stored)} of {len(states.stages)} stages'
    yield f'{count} are stored results, without continuations and rollouts.'


def _is_own(states: stage_states.States, stage: stages.Stage) -> bool:
  if stage.name in states.stored:
    return states.stored[stage.name].facts['own']
  return states.folder(stage).parent == states.root


def _file(states: stage_states.States, name: str, file: str):
  stage = states.stages.get(name)
  if stage and states.status(stage) == stage_states.FINISHED:
    path = states.folder(stage) / file
    return path if path.exists() else None  # Stored results have no folder.
  return None


def _samples(study, states) -> list[dict[str, str]]:
  files = (_file(states, name, 'samples.jsonl') for name in study.samples)
  return [x for path in files if path for x, _ in append_log.Log(path).lines]


def _rollouts(states, models: Sequence[stages.Stage]) -> Iterator[Any]:
  for stage in models:
    log = append_log.Log(states.folder(stage) / policy_batches.FILE)
    lines = [x for x, _ in log.lines if x and x['split'] == 'eval']
    names = ('step', 'prompt', 'completion', 'greedy', 'reward')
    for x in lines:
      if x['step'] == lines[-1]['step']:
        model = {'model': stage.model, 'seed': stage.seed}
        yield model | {name: x[name] for name in names}


def training_summary(folder: paths.Path) -> dict[str, Any]:
  """Returns the summary of a run, with the training of an imported model."""
  summary = atomic.read_json(folder / compute_cost.SUMMARY)
  made_by = summary.get('made_by', {'command': 'train'})
  if made_by['command'] != 'import':
    return summary
  # The decoders in configs/decoders are shipped with their summaries.
  path = paths.at(made_by['sources'][0]) / compute_cost.SUMMARY
  training = atomic.read_json(path) if path.exists() else {}
  # `inclusive` of an import counts the training as its source's.
  kept = {name: summary[name] for name in ('made_by', 'inclusive')}
  return {**summary, **training, **kept}


def _run(
  states: stage_states.States, model: stages.Stage, request: tuple[int, int]
) -> collected.Run:
  by_evaluation, generated = {}, 0
  for stage in states.stages.values():
    is_of_model = (stage.model, stage.seed) == (model.model, model.seed)
    if stage.evaluation and is_of_model:
      entries = scores(states, stage)
      by_evaluation[stage.evaluation] = [score for _, score in entries]
      lengths = [
        options['generated']
        for options, score in entries
        if score.task == inference_cost.TASK
      ]
      generated = max([generated, *lengths])
  return collected.Run(
    model=model.model,
    seed=model.seed,
    **_content(states, model, request),
    scores=by_evaluation,
    generated=generated,
  )


def _content(
  states: stage_states.States, model: stages.Stage, request: tuple[int, int]
) -> dict[str, Any]:
  if model.name in states.stored:
    facts = states.stored[model.name].facts
    content = {'folder': ''} | {x: facts[x] for x in _SHAPE}
    if model.settings:
      config = model.settings.model
      content['values'] = _values(states, model, config)
      content['counts'] = _counts(config, request)
    return content
  folder = states.folder(model)
  summary = training_summary(folder)
  config = config_lib.load_run(str(folder)).model
  return {
    'folder': str(folder),
    'values': _values(states, model, config),
    'summary': summary,
    'counts': _counts(config, request),
    'size': '+'.join(f'{x.layers}x{x.width}' for x in config.stacks.values()),
    'curve': _curve(folder, summary),
  }


def _values(
  states: stage_states.States,
  stage: stages.Stage,
  config: model_config.ModelConfig,
) -> dict[str, Any]:
  values = dict(stage.values)
  if values:
    rate = str(values[_RATE])
    values[_RATE] = pages.fill(rate, states.values(stage))
  else:  # Imported and merged models only have a shape.
    saved = config_lib.saved(str(states.folder(stage))).to_dict()
    values = environment.flat({'model': saved['model']})
  unused = {f'model.{x}.' for x in ('encoder', 'decoder')}
  unused -= {f'model.{x}.' for x in config.stacks}
  return {k: x for k, x in values.items() if not k.startswith(tuple(unused))}


def _counts(
  config: model_config.ModelConfig, request: tuple[int, int]
) -> dict[str, float]:
  stacks = parameters.count_by_stack(config).values()
  tables = sum(x.embeddings + x.head for x in stacks)
  total = parameters.count(config)
  counts = {'parameters': total, 'without tables': total - tables}
  if config.architecture.generates:
    counts['FLOPs'] = sum(forward_flops.generation(config, *request))
    published = forward_flops.published(config, *request)
    counts['FLOPs, published'] = published
  return counts


def _curve(
  folder: paths.Path, summary: Mapping[str, Any]
) -> dict[str, list[float]]:
  is_trained = (folder / metrics.FILE).exists()
  lines = metrics.read_metrics(folder) if is_trained else []
  # A policy has no loss on held-out targets.
  evals = [x for x in lines if x['kind'] == 'eval' and 'loss' in x]
  ends = [x.removesuffix('_at_step_0') for x in summary if 'at_step_0' in x]
  names = {'step', 'target_tokens', 'loss'}
  names |= {x.removeprefix('eval_') for x in ends}
  curve = {name: [line[name] for line in evals] for name in sorted(names)}
  if evals:
    sources = summary['inclusive']['flops'] - summary['flops']
    step = summary['flops'] / max(summary['steps'], 1)
    curve['flops'] = [sources + step * line['step'] for line in evals]
  return {'flops': [], **curve}
