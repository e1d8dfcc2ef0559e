r"""Evaluates models, compares them, and measures their cost.

    python -m encdec_adapt.evaluate --checkpoint=runs/adapted \
      --checkpoint=runs/scratch --records=runs/records/prefix_lm/eval \
      --task_folder=FOLDER --output=runs/evaluation

A checkpoint is the work directory of a run, RUN@STEP for a step of it, or a
Hugging Face folder. Scores are cached in OUTPUT/results.jsonl by model and
options. The command prints every score with its interval, paired tests between
the models, and their cost, and writes OUTPUT/report.html.
--checkpoint=RUN,RUN,RUN is an arm of several runs, one per seed, which is
compared over runs and examples. See `evaluation/README.md`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import time
from typing import Any, Protocol

from absl import flags

from encdec_adapt.base import errors, option_strings
from encdec_adapt.cli import command
from encdec_adapt.cluster import distributed, lock
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.measures import (
  attention_analysis,
  held_out,
  inference_cost,
  preference_scores,
)
from encdec_adapt.evaluation.results import (
  comparisons,
  predictions,
  results_store,
)
from encdec_adapt.evaluation.tasks import (
  embedding_tasks,
  preference_tasks,
  retrieval_scores,
  retrieval_tasks,
  task_groups,
  text_pairs,
)
from encdec_adapt.files import paths
from encdec_adapt.generation import (
  model_in_memory,
  prompt_encoding,
  text_generation,
)
from encdec_adapt.inference import quantization
from encdec_adapt.lab import html_report, score_tables
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import environment, progress

define_flags = command.define(
  command.flag(
    'multi_string',
    'checkpoint',
    'A run, RUN@STEP, or a Hugging Face folder; may be repeated. RUN,RUN are'
    ' runs of an arm that differ in their seeds.',
    default=[],
  ),
  command.string('output', 'Folder of results and report.'),
  command.string('records', 'Folder of a held-out record set.'),
  command.integer(
    'attention', 'Rows of --records to analyse attention in.', lower_bound=1
  ),
  command.string(
    'tasks',
    'Names of tasks and groups of them: NAME,NAME; of local tasks, of lm-eval,'
    ' or pt, it, eai, t0.',
  ),
  command.string(
    'task_folder', 'Folder of local tasks; all of them without --tasks.'
  ),
  command.integer(
    'shots', "Examples in the context; default: the task's own.", lower_bound=0
  ),
  command.integer('limit', 'Most examples of a task.', lower_bound=1),
  command.boolean('allow_code', 'Run programs that the model generates.'),
  command.string(
    'pairs',
    'FILE[#INPUT,TARGET[,DOCUMENTS]]: text to text, answered with --max_tokens,'
    ' --beams, --length_penalty and --prefix; JSON lines, .parquet, .tsv or a'
    ' .json array. With documents, an input is a question about them.',
  ),
  command.string(
    'tokenizers', 'BLEU,ROUGE of --pairs; by default by script.', default=''
  ),
  command.string(
    'preferences',
    'GLOB#[PROMPT,]CHOSEN,REJECTED[,label=FIELD]: how often models prefer the'
    ' better of two answers; files and fields of the source preferences.',
  ),
  command.string(
    'rewards',
    'FILE.jsonl[#PROMPT,COMPLETION]: rewards of completions by reward models.',
  ),
  command.flag(
    'multi_string',
    'embeddings',
    'A folder with corpus.jsonl, queries.jsonl and qrels/test.tsv to search in,'
    ' FILE.jsonl#TEXT,TEXT,SCORE of similarities, or FILE.jsonl#TEXT,LABEL to'
    ' cluster; may be repeated.',
    default=[],
  ),
  command.options(text_generation.Options, *text_pairs.OPTIONS),
  command.boolean(
    'run_prefix', 'Put the prefix before prompts of tasks and retrieval, too.'
  ),
  command.string(
    'retrieval', 'Text source, such as text:GLOB, that needles are hidden in.'
  ),
  command.string(
    'retrieval_lengths', 'Tokens of the texts: N,N.', default='256,512'
  ),
  command.string(
    'retrieval_tasks',
    'Kinds of the tasks: KIND,KIND.',
    default=','.join(retrieval_tasks.FACTS),
  ),
  command.string(
    'cost',
    'PROMPT,GENERATED: tokens of a request whose cost is measured; empty for'
    ' no measurement.',
    default='128,32',
  ),
  command.string(
    'correlate',
    'TASK,TASK: rank correlation of two tasks, or groups, over the models;'
    ' TASK/METRIC names another metric than the first.',
  ),
  command.integer('batch_size', 'Rows at a time.', default=16, lower_bound=1),
  command.boolean(
    'int8', 'Round kernels to 8-bit integers, as `generate --int8` does.'
  ),
  command.define_processes,
)


class Evaluation(Protocol):
  """An evaluation; its scores are stored together.

  Attributes:
    name: name in progress lines.
  """

  name: str

  def options(self) -> results_store.Options:
    """Returns the settings that affect scores."""

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Raises a `UserError` for an unsuitable model."""

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> Iterable[predictions.Result]:
    """Evaluates a model; must be called by all processes.

    Args:
      model: the model.
      rows: batch size; divides over the model's devices.
      report: called with the numbers of finished and of all examples.

    Returns:
      Scores, and the generated answers.
    """


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  run(values)
  return 0


def run(values: flags.FlagValues) -> dict[str, list[results_store.Score]]:
  """Evaluates the models, prints the tables and writes the report.

  Returns:
    Path of a model -> its scores; empty on processes other than 0.
  """
  arms = _check_flags(values)
  folders = [path for arm in arms for path in arm]
  plan = task_groups.Plan()
  if values.tasks or values.task_folder:
    plan = task_groups.plan(
      values.tasks.split(',') if values.tasks else [],
      values.task_folder,
      shots=values.shots,
      limit=values.limit,
      allow_code=values.allow_code,
      prefix=values.prefix if values.run_prefix else '',
    )
  with command.processes(values):
    evaluations = list(_evaluations(values, plan))
    if not evaluations:
      raise errors.UserError(
        'nothing to evaluate: give --records, --tasks, --task_folder, --pairs,'
        ' --preferences, --rewards, --embeddings or --retrieval.'
      )
    # Open all models first, to refuse bad input before hours of work.
    models = {path: model_on_disk.open_model(path) for path in folders}
    for stored in models.values():
      model_on_disk.require_head(stored)
      for evaluation in evaluations:
        evaluation.check(stored)
      if values.pairs or values.run_prefix:
        prompt_encoding.print_prefix(stored, values.prefix)
    # Int8 weights are a different model in the store.
    suffix = '-int8' if values.int8 else ''
    identities = {
      path: results_store.Model(path, x.step, x.fingerprint + suffix)
      for path, x in models.items()
    }
    with contextlib.ExitStack() as stack:
      store, options = None, [x.options() for x in evaluations]
      # Only the lead reads and writes the store, and broadcasts missing scores.
      if distributed.is_lead():
        stack.enter_context(lock.hold(values.output))
        store = stack.enter_context(results_store.Store(values.output))
        # Reports damaged files before hours of work.
        for model, x in itertools.product(identities.values(), options):
          predictions.read(values.output, model, x)
      scores = {
        path: evaluate(model, models[path], evaluations, options, store, values)
        for path, model in identities.items()
      }
      if store:
        answers = {
          path: [predictions.read(values.output, model, x) for x in options]
          for path, model in identities.items()
        }
        _report(values, plan, evaluations, models, arms, scores, answers)
    # Wait for the report, so that all processes end together.
    distributed.barrier('report')
  return scores


def _check_flags(values: flags.FlagValues) -> list[list[str]]:
  """Checks the flags, as far as possible without models.

  Returns:
    The model paths of every arm.

  Raises:
    UserError: a flag is missing, or flags are incompatible.
  """
  command.require(values, 'checkpoint', 'output')
  # A trailing slash from path completion would be another run in the store.
  arms = [
    [path.rstrip('/') for path in arm.split(',')] for arm in values.checkpoint
  ]
  folders = [path for arm in arms for path in arm]
  repeated = sorted(p for p in folders if folders.count(p) > 1)
  if repeated:
    raise errors.UserError(
      f'--checkpoint={repeated[0]} is given twice; give every model once.'
    )
  sizes = {len(arm) for arm in arms}
  if len(sizes) > 1:
    raise errors.UserError(
      f'--checkpoint names arms of {" and ".join(map(str, sorted(sizes)))}'
      ' runs; they are compared run by run, so give as many runs of each.'
    )
  # A rank correlation of two models is always 1 or -1.
  if values.correlate and (len(arms) < 3 or values.correlate.count(',') != 1):
    raise errors.UserError(
      f'--correlate={values.correlate} must be TASK,TASK, and needs at least 3'
      f' models; {len(arms)} are given.'
    )
  if values.tasks and paths.at(values.tasks).is_dir():
    raise errors.UserError(
      f'--tasks={values.tasks} is a folder and no name; give --task_folder='
      f'{values.tasks}.'
    )
  return arms


def _evaluations(
  values: flags.FlagValues, plan: task_groups.Plan
) -> Iterator[Evaluation]:
  if values.attention:
    command.require(values, 'records')
  if values.records:
    record_set = record_sets.RecordSet.open(values.records)
    yield held_out.HeldOutEvaluation(record_set)
    if values.attention:
      yield attention_analysis.AttentionEvaluation(record_set, values.attention)
  if plan.absent and distributed.is_lead():
    print(f'not evaluated, as they are not there: {", ".join(plan.absent)}')
  yield from plan.tasks
  if values.pairs:
    yield text_pairs.read(
      values.pairs,
      values.limit,
      values.tokenizers,
      **{name: values[name].value for name in text_pairs.OPTIONS},
    )
  if values.preferences:
    yield preference_tasks.read_preferences(values.preferences, values.limit)
  if values.rewards:
    yield preference_tasks.read_completions(values.rewards, values.limit)
  yield from map(embedding_tasks.read, values.embeddings)
  if values.retrieval:
    retrieval = retrieval_tasks.read(
      values.retrieval,
      values.retrieval_lengths,
      values.retrieval_tasks,
      values.limit,
    )
    prefix = values.prefix if values.run_prefix else ''
    yield retrieval_scores.RetrievalEvaluation(retrieval, prefix)
  if values.cost:
    lengths = _lengths(values.cost)
    yield inference_cost.CostEvaluation(
      *lengths, values.batch_size, values.int8
    )


def _lengths(value: str) -> tuple[int, int]:
  cost = option_strings.Part('--cost', value)
  lengths = [
    part.read(int, 'a number of tokens, as in 128,32.', lambda n: n > 0)
    for part in cost.divide(',')
  ]
  if len(lengths) != 2:
    raise cost.error('must be two numbers of tokens, as in 128,32.')
  return lengths[0], lengths[1]


def evaluate(
  model: results_store.Model,
  stored: model_on_disk.StoredModel,
  evaluations: Sequence[Evaluation],
  options: Sequence[results_store.Options],
  store: results_store.Store | None,
  values: flags.FlagValues,
) -> list[results_store.Score]:
  """Computes the scores of a model missing from the store.

  Args:
    model: identity of the model; `run` is the path as given.
    stored: the model; its parameters are read only if a score is missing.
    evaluations: the evaluations, all suitable for the model.
    options: options of each evaluation.
    store: the store to add scores to; None on processes other than 0.
    values: the flags of the command.

  Returns:
    All scores, on process 0.
  """
  log = print if store else lambda *_, **__: None
  path = model.run
  # The lead decides: all processes take part in each evaluation.
  missing = distributed.from_lead(
    lambda: [i for i, o in enumerate(options) if not store.find(model, o)]
  )
  reused = len(evaluations) - len(missing)
  log(f'{path}: {len(missing)} evaluations, {reused} done before')
  if missing:
    loaded = model_in_memory.read_as_trained(stored)
    if values.int8:
      loaded = dataclasses.replace(
        loaded, params=quantization.rounded(loaded.params, loaded.model.table)
      )
    rows = loaded.rows(values.batch_size)
  for number, i in enumerate(missing, 1):
    start, name = time.monotonic(), evaluations[i].name
    report = progress.CountProgress(name) if store else lambda *_: None
    results = list(evaluations[i].scores(loaded, rows, report))
    scores = [x for x in results if isinstance(x, results_store.Score)]
    # Store after each: an interrupted command loses at most one evaluation.
    if store:
      # Before the scores, which mark a complete evaluation.
      predictions.write(values.output, model, options[i], results)
      store.add(model, options[i], scores)
    duration = progress.format_seconds(time.monotonic() - start)
    text = ', '.join(f'{x.task} {x.metric} {x.value:.4g}' for x in scores[:4])
    log(
      f'{path} [{number}/{len(missing)}] {name} ({duration}):'
      f' {text}{" .." if len(scores) > 4 else ""}',
      flush=True,
    )
  if not store:
    return []
  return [score for o in options for score in store.find(model, o)]


def _report(
  values: flags.FlagValues,
  plan: task_groups.Plan,
  evaluations: Sequence[Evaluation],
  models: Mapping[str, model_on_disk.StoredModel],
  arms: Sequence[Sequence[str]],
  results: Mapping[str, Sequence[results_store.Score]],
  answers: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
) -> None:
  """Prints the tables and writes the report.

  `models`, `results` and each evaluation's `answers` are by model path; `arms`
  has the model paths of every arm.
  """
  names = score_tables.short_names(list(models))
  named_arms = {}
  for arm in arms:
    runs = [names[path] for path in arm]
    label = runs[0] if len(runs) == 1 else f'{runs[0]} ({len(runs)} runs)'
    named_arms[label] = runs
  # Group means are not stored, as they derive from the scores of tasks.
  scores = {
    names[path]: [*task_scores, *plan.group_scores(task_scores)]
    for path, task_scores in results.items()
  }
  notes = _notes(values, models, named_arms, scores)
  cells = retrieval_scores.rows(scores)
  needles = retrieval_scores.grids(scores)
  # Scores by length and depth would crowd out the others.
  scores = retrieval_scores.without_cells(scores)
  prompts = _prompts(values, evaluations, {names[k]: models[k] for k in names})
  tables = {
    'Scores': score_tables.score_rows(scores, prompts),
    'Comparisons': score_tables.comparison_rows(scores, named_arms, prompts),
    'Retrieval': cells,
    'Cost': score_tables.cost_rows(scores),
  }
  for title, rows in tables.items():
    if rows:
      print(f'\n{title}\n{score_tables.text(rows)}')
  # Texts are too wide for the terminal.
  tables['Predictions'] = predictions.table(
    {names[path]: lines for path, lines in answers.items()}
  )
  print('\n'.join(['', *notes]))
  # Only evaluations of answers: no losses, costs or attention.
  kinds = task_groups.Task | text_pairs.Pairs
  kinds |= preference_tasks.PreferenceEvaluation
  tasks = {x.name for x in evaluations if isinstance(x, kinds)}
  quality = score_tables.quality(scores, tasks | {*retrieval_tasks.FACTS})
  per_query = {}
  if values.cost and quality[1]:
    generated = _lengths(values.cost)[1]
    per_query = {
      name: inference_cost.per_query(x, generated)
      for name, x in score_tables.costs(scores).items()
    }
  html_report.write_evaluation(
    {
      'title': f'Evaluation of {", ".join(scores)}',
      'notes': notes,
      'tables': tables,
      'quality': quality,
      'per_query': per_query,
      'needles': needles,
      'calibration': preference_scores.curves(scores),
      'attention': attention_analysis.figures(scores),
      'environment': environment.report(),
    },
    values.output,
  )
  print(f'report: {paths.join(values.output, "report.html")}')


def _prompts(
  values: flags.FlagValues,
  evaluations: Sequence[Evaluation],
  models: Mapping[str, model_on_disk.StoredModel],
) -> dict[str, dict[str, str]]:
  prompts, kinds = {}, text_pairs.Pairs
  if values.run_prefix:
    kinds |= task_groups.Task | retrieval_scores.RetrievalEvaluation
  for x in evaluations:
    texts = {}
    for name, stored in models.items():
      if isinstance(x, kinds):
        prefix = prompt_encoding.task_prefix(stored, values.prefix)
        texts[name] = stored.framing.prompt(prefix)
      elif isinstance(x, task_groups.Task) and x.has_templates:
        texts[name] = stored.framing.prompt('')
      elif isinstance(x, preference_tasks.PreferenceEvaluation):
        texts[name] = stored.framing.describe()
      elif isinstance(x, embedding_tasks.EmbeddingEvaluation):
        texts[name] = str(dict(stored.prompts))
    if len({*texts.values()}) > 1:
      prompts[x.name] = texts
  return prompts


def _notes(
  values: flags.FlagValues,
  models: Mapping[str, model_on_disk.StoredModel],
  arms: Mapping[str, Sequence[str]],
  scores: score_tables.Scores,
) -> list[str]:
  notes = [
    'Values with 95 % intervals, and paired tests on the same examples (BLEU'
    ' and chrF: bootstrap of differences in corpus score; single values have no'
    ' interval); p is not'
    ' corrected for the number of comparisons. Intervals of held-out rows are'
    ' over the groups of documents that are held out as a whole; those of a'
    ' single run say nothing of other seeds.'
  ]
  notes += [
    f'{name}: {round(x.value * x.n):,} of {x.n:,} answers of {x.task} are cut'
    f' at --max_tokens={values["max_tokens"].value}.'
    for name, model_scores in scores.items()
    for x in model_scores
    if x.metric == text_pairs.CUT and x.value
  ]
  if values.correlate:
    # Also within size classes: over all sizes, size alone correlates tasks.
    sizes = [
      '+'.join(f'{s.layers}x{s.width}' for s in stored.model.stacks.values())
      for stored in models.values()
    ]
    notes.append(_correlation(values.correlate, sizes, arms, scores))
  if values.cost:
    notes.append(
      f'Cost is of {values.cost.replace(",", " prompt tokens and ")} generated'
      f' tokens; throughput and memory are of {values.batch_size} prompts.'
      f' Latencies are medians of {inference_cost.REPEATS} repeats, with'
      ' quartiles.'
    )
    costs, generated = score_tables.costs(scores), _lengths(values.cost)[1]
    notes += inference_cost.notes(costs, generated)
  return notes


def _correlation(
  spec: str,
  sizes: Sequence[str],
  arms: Mapping[str, Sequence[str]],
  scores: score_tables.Scores,
) -> str:
  """Describes the rank correlation of --correlate, `spec`.

  `sizes` has the layers and widths of each model, `arms` each arm's models.
  """
  names = spec.split(',')
  columns = [score_tables.column(scores, name) for name in names]
  labels = [arm for arm, runs in arms.items() for _ in runs]
  pooled, within = comparisons.correlations(
    zip(sizes, labels, *columns, strict=True)
  )
  mean = 'no size has three models' if within is None else _coefficient(within)
  return (
    f'Spearman correlation of {names[0]} with {names[1]}:'
    f' {_coefficient(pooled)}; within a size (mean): {mean}.'
  )


def _coefficient(correlation: comparisons.Correlation) -> str:
  text = f'{correlation.value:.2f} over {correlation.arms} models'
  if correlation.is_descriptive:
    text += ' (too few for more than a description)'
  return text


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
