"""Collects what the stages of a study have measured, and writes its report."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.measures import held_out, inference_cost
from encdec_adapt.evaluation.reports import html_report
from encdec_adapt.evaluation.results import results_store, variances
from encdec_adapt.evaluation.studies import pages, stage_states, stages
from encdec_adapt.files import append_log, atomic, paths
from encdec_adapt.telemetry import compute_cost, environment, metrics, progress


def scores(
  states: stage_states.States, stage: stages.Stage, task: str
) -> dict[str, tuple[results_store.Options, results_store.Score]]:
  """Returns options and score of every metric of a task, of an evaluation.

  Args:
    states: states of the stages.
    stage: a stage of an evaluation, finished or not.
    task: name of the task.
  """
  if states.status(stage) != stage_states.FINISHED:
    return {}
  (model,) = (x for x in stage.arguments if x.startswith('--checkpoint='))
  run = pages.fill(model.removeprefix('--checkpoint='), states.values(stage))
  with results_store.Store(states.folder(stage)) as store:
    return store.of_run(run, task)


def write_variances(study: pages.Study, states: stage_states.States) -> str:
  """Writes the variances of a study's results; returns the path of the file.

  Raises:
    UserError: no evaluation has two arms of two seeds that are finished.
  """
  arms = {}
  for evaluation in study.evaluations:
    names = evaluation.models or [arm.name for arm in study.arms]
    for metric in evaluation.metrics:
      task, _, name = metric.rpartition('/')
      runs = [
        [
          found[name][1]
          for stage in states.stages.values()
          if (stage.evaluation, stage.model) == (evaluation.name, model)
          if name in (found := scores(states, stage, task))
        ]
        for model in names
      ]
      complete = [x for x in runs if len(x) == max(map(len, runs)) > 1]
      if len(complete) > 1:
        arms[metric] = complete
  if not arms:
    raise study.error(
      'no evaluation has two arms of two seeds that are finished; run it first'
    )
  path = configs.path('studies/variances.json')
  variances.write(path, study.name, arms)
  return path


def write(study: pages.Study, states: stage_states.States) -> None:
  """Writes the report of what is there, and prints its findings."""
  runs = {
    stage.name: run
    for stage in states.stages.values()
    if (stage.model and not stage.evaluation and not stage.rate)
    if (run := _run(study, states, stage))
  }
  if not runs:
    print('no report: no model has been evaluated yet')
    return
  for name, arms in study.best_of.items():
    if names := [x for x in arms if x in runs]:
      runs = {name: runs[_best(states, names)], **runs}
  evaluated = [
    found['loss'][0]['records']
    for stage in states.stages.values()
    if stage.evaluation
    and 'loss' in (found := scores(states, stage, held_out.TASK))
  ]
  spec = record_sets.RecordSet.open(evaluated[0]).spec
  ended = {n: s for n, x in states.stages.items() if (s := states.state(x))}
  report = {
    'title': study.title,
    'size': study.size,
    'text': {'held-out records': evaluated[0], **dataclasses.asdict(spec)},
    'runs': runs,
    'best': list(study.best_of),
    'stages': [dataclasses.asdict(state) for state in ended.values()],
    'samples': _samples(study, states),
    'tuned': None,
    'note': ' '.join(_notes(study, states, ended)),
    'table': _table(study, states),
    'environment': environment.report(),
  }
  for sentence in html_report.write(report, states.root):
    print(f'- {sentence}')
  total = progress.format_seconds(sum(x.seconds for x in ended.values()))
  print(f'\n{total} in all; report: {states.root / "report.html"}')


def _notes(study, states, ended) -> list[str]:
  """Returns sentences on what has failed, or was made elsewhere."""
  here, notes = environment.fingerprint() | environment.versions(), []
  for name, state in ended.items():
    if state.status == stage_states.FAILED:
      notes.append(f'{name} has failed: {" ".join(state.error.split())}.')
    elif lines := state.difference(here):
      notes.append(f'{name} was made by another version: {"; ".join(lines)}.')
  return [*notes, study.note] if study.note else notes


def _file(states: stage_states.States, name: str, file: str):
  """Returns a file of a stage that is finished, else None."""
  stage = states.stages.get(name)
  if stage and states.status(stage) == stage_states.FINISHED:
    return states.folder(stage) / file
  return None


def _samples(study, states) -> list[dict[str, str]]:
  path = _file(states, study.samples, 'samples.jsonl')
  return [x for x, _ in append_log.Log(path).lines] if path else []


def _table(study, states) -> list[dict[str, Any]] | None:
  path = _file(states, study.table, 'table.json')
  return atomic.read_json(path)['rows'] if path else None


def _best(states: stage_states.States, names: Sequence[str]) -> str:
  """Returns the run with the lowest finite held-out loss."""
  # A run at too high a rate may diverge: nan compares with nothing.
  losses = {
    name: atomic.read_json(
      states.folder(states.stages[name]) / compute_cost.SUMMARY
    )['eval_loss']
    for name in names
  }
  finite = {name: x for name, x in losses.items() if math.isfinite(x)}
  if not finite:
    raise errors.UserError(f'none of the runs {losses} has a finite loss.')
  return min(finite, key=finite.get)


def training_summary(folder: paths.Path) -> dict[str, Any]:
  """Returns the summary of a run, with the training of an imported model."""
  summary = atomic.read_json(folder / compute_cost.SUMMARY)
  made_by = summary.get('made_by', {'command': 'train'})
  if made_by['command'] != 'import':
    return summary
  # The decoders in configs/decoders are shipped with their summaries.
  path = paths.at(made_by['sources'][0]) / compute_cost.SUMMARY
  training = atomic.read_json(path) if path.exists() else {}
  # `inclusive` of the import counts the training as that of its source.
  return {**summary, **training, 'inclusive': summary['inclusive']}


def _run(
  study: pages.Study, states: stage_states.States, model: stages.Stage
) -> dict[str, Any] | None:
  """Returns the results of a model; None unless its loss was measured."""
  measured: dict[str, dict] = {held_out.TASK: {}, inference_cost.TASK: {}}
  for stage in states.stages.values():
    if stage.evaluation and (stage.model, stage.seed) == (
      model.model,
      model.seed,
    ):
      for task, found in measured.items():
        # The first evaluation that has the task.
        measured[task] = found or scores(states, stage, task)
  values = {k: x.value for k, (_, x) in measured[held_out.TASK].items()}
  if not values:
    return None
  request, cost = None, measured[inference_cost.TASK]
  if cost:
    request, _ = cost['decode_ms']  # Lengths are among the options.
    medians = {metric: score.value for metric, (_, score) in cost.items()}
    costs = inference_cost.per_query(medians, request['generated'])
    request |= medians | {
      axis: median for axis, (_, median, _) in costs.items()
    }
  folder = states.folder(model)
  is_trained = (folder / metrics.FILE).exists()
  lines = metrics.read_metrics(folder) if is_trained else []
  evals = [line for line in lines if line['kind'] == 'eval']
  summary = training_summary(folder)
  return {
    # Null in the report unless the summary, below, has them.
    'eval_loss_at_step_0': None,
    'learning_rate': None,
    'seed': None,
    **summary,
    # Of the last step; the scores are of the checkpoint that was evaluated.
    'eval_loss_in_training': summary.get('eval_loss'),
    'kind': config_lib.load_run(str(folder)).model.architecture.name,
    'eval_loss': values['loss'],
    'exact_match': values['exact_match'],
    'label_accuracy': values['accuracy'] if 'macro_f1' in values else None,
    'eval_loss_shuffled_prefix': values.get(held_out.SHUFFLED),
    'request': request,
    'curve': {
      'step': [record['step'] for record in evals],
      'target_tokens': [record['target_tokens'] for record in evals],
      'eval_loss': [record['loss'] for record in evals],
    },
  }
