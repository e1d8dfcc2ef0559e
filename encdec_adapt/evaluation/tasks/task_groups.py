"""Tasks and named groups of tasks, with their shots and metrics.

A task is a YAML file in a folder of local tasks (`task_files`), or an lm-eval
task with data from the Hugging Face Hub. Local tasks override lm-eval tasks of
the same name. lm-eval and `datasets` are imported only to plan or run a task:
training with other evaluators must not need them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
import logging
import math
import statistics
from typing import Any

from encdec_adapt.base import errors, packages
from encdec_adapt.cluster import code_limits, distributed
from encdec_adapt.evaluation.results import predictions, results_store
from encdec_adapt.evaluation.tasks import prompted_task, task_files
from encdec_adapt.files import paths
from encdec_adapt.generation import model_in_memory, prompt_encoding
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import progress

# Field of an example: its document group.
GROUP = 'document_group'


@dataclasses.dataclass(frozen=True)
class Member:
  """A task of a group.

  Attributes:
    task: name of the task in lm-eval or in the folder of local tasks.
    shots: examples in the context; None for the task's default.
    metric: main metric, with lm-eval's filter after a comma.
  """

  task: str
  shots: int | None
  metric: str


def _accuracies(tasks: str) -> list[Member]:
  return [Member(task, 0, 'acc') for task in tasks.split()]


GROUPS: Mapping[str, tuple[Member, ...]] = {
  # Encoder-Decoder Gemma (arXiv:2504.06225), section 4 and Table 3. None where
  # the table has no number of shots: the task's default.
  'pt': (
    *_accuracies(
      'boolq social_iqa piqa arc_easy truthfulqa_mc2 gpqa_main_zeroshot'
      ' lambada_openai'
    ),
    Member('arc_challenge', 25, 'acc_norm'),
    Member('mmlu', 5, 'acc'),
    Member('mmlu_pro', 5, 'exact_match,custom-extract'),
    Member('hellaswag', 10, 'acc_norm'),
    Member('winogrande', 5, 'acc'),
    Member('agieval_en', 3, 'acc'),
    Member('bbh_cot_fewshot', 3, 'exact_match,get-answer'),
    Member('drop', 3, 'f1'),
    Member('gsm8k', 5, 'exact_match,strict-match'),
    Member('humaneval', 0, 'pass@1,create_test'),
    Member('minerva_math500', 4, 'exact_match'),
    Member('mbpp', 3, 'pass_at_1'),
    Member('nq_open', 5, 'exact_match,remove_whitespace'),
    Member('triviaqa', 5, 'exact_match,remove_whitespace'),
    Member('wmt23', None, 'bleurt'),
  ),
  'it': (
    Member('gsm8k', 11, 'exact_match,strict-match'),
    Member('mmlu', 5, 'acc'),
    Member('mmlu_pro', 5, 'exact_match,custom-extract'),
    Member('mbpp', 3, 'pass_at_1'),
    Member('humaneval', 0, 'pass@1,create_test'),
    Member('minerva_math500', 0, 'exact_match'),
    Member('bbh_cot_fewshot', 3, 'exact_match,get-answer'),
    Member('gpqa_diamond_zeroshot', 0, 'acc'),
    Member('wmt23', 5, 'bleurt'),
    Member('mgsm_direct_en', 8, 'exact_match,remove_whitespace'),
  ),
  # Wang et al. 2022 (arXiv:2204.05832), section 3.3: zero-shot accuracy.
  'eai': (
    *_accuracies(
      'anli_r1 anli_r2 anli_r3 arc_challenge arc_easy boolq cb copa headqa_en'
      ' hellaswag lambada_openai logiqa mathqa mrpc multirc openbookqa piqa'
      ' prost pubmedqa qnli qqp race rte sciq sst2 wic winogrande wnli wsc'
    ),
    Member('triviaqa', 0, 'exact_match,remove_whitespace'),
    Member('webqs', 0, 'exact_match'),
  ),
  # The same, section 3.3: rank classification over all prompts of P3; the mean
  # of the medians. All are local tasks with templates of these names.
  't0': tuple(
    Member(task, None, 'median')
    for task in (
      'anli_r1 anli_r2 anli_r3 cb rte copa hellaswag story_cloze wic wsc'
      ' winogrande'
    ).split()
  ),
}
# lm-eval tasks that run generated programs. Rejected by name before a model is
# read: lm-eval rejects them only when the evaluation starts.
_RUN_CODE = frozenset({'humaneval', 'mbpp'})
_ADD_FOLDER = (
  'put a task file of that name and its JSONL into a folder and give it as'
  ' --task_folder (encdec_adapt/evaluation/README.md shows one)'
)


@dataclasses.dataclass(frozen=True)
class Task:
  """Evaluates models on a checked task.

  Attributes:
    name: name of the task.
    content: content of its file; None for hub tasks, a `PromptedTask` for tasks
      with templates.
    shots: examples in the context; None for the task's default.
    limit: maximum number of examples.
    allow_code: whether generated programs may run.
    prefix: text before every context; None for the run's task prefix.
  """

  name: str
  content: Any
  shots: int | None = None
  limit: int | None = None
  allow_code: bool = False
  prefix: str | None = ''

  @property
  def has_templates(self) -> bool:
    """Whether the task has templates, which use the run's separator."""
    return isinstance(self.content, prompted_task.PromptedTask)

  def options(self) -> results_store.Options:
    """Returns all inputs of the scores."""
    content, digest = self.content, hashlib.blake2b(digest_size=8)
    if self.has_templates:
      digest.update(repr(content).encode())
    elif content is not None:
      # Functions by name: a repr contains a memory address.
      named = lambda x: getattr(x, '__name__', type(x).__name__)  # noqa: E731
      digest.update(json.dumps(content, sort_keys=True, default=named).encode())
      for file in content['dataset_kwargs']['data_files'].values():
        digest.update(paths.at(file).read_bytes())
        # The functions may be defined in any of these.
        for code in sorted(paths.at(file).parent.glob('*.py')):
          digest.update(code.read_bytes())
    return {
      'task': self.name,
      'shots': self.shots,
      'limit': self.limit,
      'content': 'lm-eval' if content is None else digest.hexdigest(),
      # Omitted if empty, as in results of earlier versions.
      **({} if self.prefix == '' else {'prefix': self.prefix}),
    }

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model has vocabularies, and a single task prefix."""
    stored.require_vocabularies()
    prompt_encoding.task_prefix(stored, self.prefix)

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[predictions.Result]:
    """Measures a model; every process of a job takes part.

    Args:
      model: the model.
      rows: rows at a time.
      report: progress callback (requests done, all requests).

    Returns:
      Scores and generated answers on process 0, empty elsewhere.

    Raises:
      UserError: the data of the task cannot be read.
    """
    from encdec_adapt.evaluation.tasks import lm_eval_adapter

    prefix = prompt_encoding.task_prefix(model.stored, self.prefix)
    adapter = lm_eval_adapter.Adapter(
      model, batch_size=rows, report=report, prefix=prefix
    )
    if not distributed.is_lead():
      adapter.follow()
      return []
    try:
      with code_limits.allowed(self.allow_code):
        task = self.content
        if self.has_templates:
          scored = adapter.score_choices(list(task.pairs()), task.separator)
          return list(task.score([log_prob for log_prob, _ in scored]))
        return self._run_lm_eval(adapter)
    finally:
      # Also after an error: the other processes would wait in `follow`.
      adapter.stop()

  def _run_lm_eval(self, adapter: Any) -> list[predictions.Result]:
    import datasets
    import lm_eval
    from lm_eval import tasks as lm_eval_tasks

    # Their output would break the command's progress lines.
    datasets.disable_progress_bars()
    logging.getLogger('lm_eval').setLevel(logging.ERROR)
    is_local = self.content is not None
    # Indexing lm-eval's built-in tasks takes 14 s.
    manager = lm_eval_tasks.TaskManager(include_defaults=not is_local)
    specs = [dict(self.content) if is_local else self.name]
    try:
      manager.load(specs)  # Reads the data.
    # Data set scripts, templates and the hub raise many types of errors.
    except Exception as error:
      subject = 'file or the data of the local' if is_local else 'data of'
      raise errors.UserError(
        f'the {subject} task {self.name!r} cannot be read'
        f' ({type(error).__name__}: {error!s:.200}); tasks of the hub need the'
        f' network and no data script. Otherwise {_ADD_FOLDER}. Tasks that run'
        ' programs need --allow_code.'
      ) from error
    results = lm_eval.simple_evaluate(
      adapter,
      tasks=specs,
      num_fewshot=self.shots,
      limit=self.limit,
      task_manager=manager,
      # `_scores` computes errors from the samples, without a bootstrap.
      bootstrap_iters=0,
      # Seeding torch would import it.
      torch_random_seed=None,
      confirm_run_unsafe_code=self.allow_code,
    )
    return [*_scores(results), *_predictions(results)]


@dataclasses.dataclass(frozen=True)
class Plan:
  """Tasks to evaluate.

  Attributes:
    tasks: the tasks.
    groups: members of the requested groups, by name.
    absent: tasks of the groups missing in both the folder and lm-eval.
  """

  tasks: Sequence[Task] = ()
  groups: Mapping[str, tuple[Member, ...]] = dataclasses.field(
    default_factory=dict
  )
  absent: Sequence[str] = ()

  def group_scores(
    self, scores: Iterable[results_store.Score]
  ) -> Iterator[results_store.Score]:
    """Returns the mean of each group.

    Args:
      scores: scores of the tasks. If some are absent, the name of the mean
        states the number of present tasks.
    """
    by_name = {(score.task, score.metric): score.value for score in scores}
    for group, members in self.groups.items():
      keys = [(member.task, member.metric) for member in members]
      values = [by_name[key] for key in keys if key in by_name]
      if values:
        # A mean over other tasks must not be mistaken for the paper's.
        of = '' if len(values) == len(members) else f' of {len(values)}'
        yield results_store.Score(
          group, f'mean{of}', statistics.fmean(values), None, len(values)
        )


def plan(
  names: Sequence[str],
  folder: str | None = None,
  *,
  shots: int | None = None,
  limit: int | None = None,
  allow_code: bool = False,
  prefix: str | None = '',
) -> Plan:
  """Finds tasks and checks local tasks, before a model is read.

  Args:
    names: names of tasks and groups; empty for all tasks of the folder.
    folder: folder of local tasks, or None.
    shots: examples in the context; None for the default of the group or task.
    limit: maximum number of examples per task.
    allow_code: whether generated programs may run.
    prefix: text before every context; None for the run's task prefix.

  Raises:
    UserError: lm-eval is not installed, a task does not exist or runs programs
      without `allow_code`, or a file of a local task is invalid; names the file
      and the line.
  """
  packages.require('--tasks', 'eval', 'lm_eval')
  local = task_files.read_folder(folder, limit) if folder else {}
  groups = {name: GROUPS[name] for name in names if name in GROUPS}
  members = [
    member
    for name in names or sorted(local)
    for member in GROUPS.get(name, (Member(name, None, ''),))
  ]
  # lm-eval has no tasks with templates, only others of the same names. Its
  # index takes seconds to load, so it is loaded only for non-local tasks.
  hub = {x.task for x in members if x.metric != 'median'} - local.keys()
  hub = hub & _hub_tasks() if hub else set()
  present = [
    member
    for member in members
    if member.task in local
    or (member.metric != 'median' and member.task in hub)
  ]
  absent = sorted({x.task for x in members if x not in present})
  # Groups are evaluated without their missing tasks; a missing task requested
  # by name is an error.
  if absent and not (groups and present):
    raise errors.UserError(
      f'there is no task {", ".join(map(repr, absent))}; {_ADD_FOLDER}.'
    )
  if not allow_code and (programs := hub & _RUN_CODE):
    raise errors.UserError(
      f'{", ".join(sorted(programs))} run programs that the model generates;'
      ' name other tasks, or give `evaluate` --allow_code, in a container best.'
    )
  tasks: dict[str, Task] = {}
  for member in present:
    content = local.get(member.task)
    count = member.shots if shots is None else shots
    if shots and isinstance(content, prompted_task.PromptedTask):
      raise errors.UserError(
        f'--shots={shots}: {member.task} has templates without examples;'
        ' leave out --shots, or the task.'
      )
    task = Task(member.task, content, count, limit, allow_code, prefix)
    # A task in two groups runs once.
    if tasks.setdefault(member.task, task).shots != count:
      raise errors.UserError(
        f'the groups ask for {member.task} with different numbers of shots;'
        ' evaluate the groups one by one, or give --shots.'
      )
  return Plan(list(tasks.values()), groups, absent)


def _predictions(
  results: Mapping[str, Any],
) -> Iterator[predictions.Prediction]:
  for task, samples in results['samples'].items():
    # Other tasks compare likelihoods.
    if results['configs'][task]['output_type'] != 'generate_until':
      continue
    examples: dict[int, predictions.Prediction] = {}
    for sample in samples:
      target = sample['target']
      # Each answer filter yields a sample: one example, several scores.
      example = examples.setdefault(
        sample['doc_id'],
        predictions.Prediction(
          task,
          sample['arguments'][0][0],
          list(map(str, target if isinstance(target, list) else [target])),
          sample['resps'][0][0],
          {},
        ),
      )
      for metric in sample['metrics']:
        if isinstance(sample[metric], int | float):
          name = _metric_name(metric, sample.get('filter', 'none'))
          example.scores[name] = sample[metric]
    yield from examples.values()


def _metric_name(metric: str, filter_name: str) -> str:
  return metric if filter_name == 'none' else f'{metric},{filter_name}'


def _scores(results: Mapping[str, Any]) -> Iterator[results_store.Score]:
  by_task = {**results['results'], **results.get('groups', {})}
  for task, values in by_task.items():
    samples = results.get('samples', {}).get(task, [])
    for key, value in values.items():
      # Keys are 'METRIC,FILTER', but for 'alias' and the like.
      metric, _, filter_name = key.partition(',')
      is_number = isinstance(value, int | float)
      if not (filter_name and is_number) or metric.endswith('_stderr'):
        continue
      # In the order of the examples, for paired tests.
      rows = sorted(
        (s for s in samples if s.get('filter', 'none') == filter_name),
        key=lambda sample: sample['doc_id'],
      )
      scores = [
        row[metric] for row in rows if isinstance(row.get(metric), int | float)
      ]
      name = _metric_name(metric, filter_name)
      # Samples of a perplexity are log-likelihoods: their mean differs from the
      # metric, and gives no standard error for it.
      if scores and math.isclose(
        statistics.fmean(scores), value, rel_tol=1e-6, abs_tol=1e-6
      ):
        groups = [row.get('doc', {}).get(GROUP, '') for row in rows]
        is_grouped = all(groups) and len(groups) == len(scores)
        groups = groups if is_grouped else ()
        yield results_store.mean_score(task, name, scores, groups)
        continue
      # lm-eval groups have no samples, only their tasks do.
      counts = results.get('n-samples', {})
      parts = results.get('group_subtasks', {}).get(task) or [task]
      n = sum(counts.get(x, {}).get('effective', 0) for x in parts)
      yield results_store.Score(task, name, float(value), None, len(rows) or n)


def _hub_tasks() -> frozenset[str]:
  from lm_eval import tasks as lm_eval_tasks

  print('reading the list of tasks of lm-eval', flush=True)
  return frozenset(lm_eval_tasks.TaskManager().all_tasks)
