"""Tasks and named groups of tasks: what to run, with which shots and metric.

A task is a YAML file in a folder of local tasks, in lm-eval's own format or
with prompt templates (`prompted_task`), or a task of lm-eval, whose data come
from the Hugging Face hub. Local tasks come before lm-eval's of the same name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import importlib.util
import json
import logging
import math
import statistics
from typing import Any

import jinja2
from jinja2 import meta
import yaml

from encdec_adapt.cli import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import loaded_model
from encdec_adapt.evaluation import code_execution, prompted_task, results
from encdec_adapt.files import paths


@dataclasses.dataclass(frozen=True)
class Member:
  """A task of a group.

  Attributes:
    task: name of the task in lm-eval or in the folder of local tasks.
    shots: examples in the context; None for the task's own number.
    metric: the metric that counts, with lm-eval's filter after a comma.
  """

  task: str
  shots: int | None
  metric: str


def _accuracies(tasks: str) -> list[Member]:
  """Returns tasks whose accuracy counts, without examples in the context."""
  return [Member(task, 0, 'acc') for task in tasks.split()]


# Encoder-Decoder Gemma (arXiv:2504.06225), section 4 and Table 3. Where the
# table has no number of shots the task's own is taken.
_PT = (
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
)
_IT = (
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
)
# Wang et al. 2022 (arXiv:2204.05832), section 3.3: zero-shot accuracy.
_EAI = (
  *_accuracies(
    'anli_r1 anli_r2 anli_r3 arc_challenge arc_easy boolq cb copa headqa_en'
    ' hellaswag lambada_openai logiqa mathqa mrpc multirc openbookqa piqa prost'
    ' pubmedqa qnli qqp race rte sciq sst2 wic winogrande wnli wsc'
  ),
  Member('triviaqa', 0, 'exact_match,remove_whitespace'),
  Member('webqs', 0, 'exact_match'),
)
# The same, section 3.3: rank classification over all prompts of P3; the mean
# of the medians. All are local tasks with templates, named like this.
_T0 = tuple(
  Member(task, None, 'median')
  for task in (
    'anli_r1 anli_r2 anli_r3 cb rte copa hellaswag story_cloze wic wsc'
    ' winogrande'
  ).split()
)
GROUPS: Mapping[str, tuple[Member, ...]] = {
  'pt': _PT,
  'it': _IT,
  'eai': _EAI,
  't0': _T0,
}
# Tasks of lm-eval that run generated programs.
RUN_CODE = frozenset({'humaneval', 'mbpp'})
_TEXTS = ('doc_to_text', 'doc_to_target', 'doc_to_choice')
_ADD_FOLDER = (
  'put a task file of that name and its JSONL into a folder and give it as'
  ' --task_folder (encdec_adapt/evaluation/README.md shows one)'
)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Tasks that were checked.

  Attributes:
    tasks: (name, content of its file, shots) of each; the content is None for
      tasks of the hub, and a `PromptedTask` for those with templates.
    groups: members of the groups that were asked for, by name.
    absent: members that neither the folder nor lm-eval has.
  """

  tasks: Sequence[tuple[str, Any, int | None]]
  groups: Mapping[str, tuple[Member, ...]]
  absent: Sequence[str]


def plan(
  names: Sequence[str],
  folder: str | None = None,
  *,
  shots: int | None = None,
  limit: int | None = None,
) -> Plan:
  """Finds tasks and checks local ones, before a model is read.

  Args:
    names: names of tasks and groups; none for all of the folder.
    folder: folder of local tasks, or None.
    shots: examples in the context; None for the group's or task's own.
    limit: most examples of a task.

  Raises:
    UserError: lm-eval is not installed, there is no such task, or a file of a
      local task is wrong; names the file and the line.
  """
  if importlib.util.find_spec('lm_eval') is None:
    raise errors.UserError(
      "tasks need lm-eval: pip install 'encdec_adapt[eval]'"
    )
  local = _read_folder(folder, limit) if folder else {}
  groups = {name: GROUPS[name] for name in names if name in GROUPS}
  members = [
    member
    for name in names or sorted(local)
    for member in GROUPS.get(name, (Member(name, None, ''),))
  ]
  known, absent = None, []
  found: dict[tuple[str, int | None], Any] = {}
  for member in members:
    count = member.shots if shots is None else shots
    if member.task in local:
      content = local[member.task]
      if shots and isinstance(content, prompted_task.PromptedTask):
        raise errors.UserError(
          f'--shots={shots}: {member.task} has templates without examples;'
          ' leave out --shots, or the task.'
        )
      found[member.task, count] = content
      continue
    is_prompted = member.metric == 'median'  # lm-eval has no such tasks.
    if known is None and not is_prompted:
      known = _hub_tasks()
    if not is_prompted and member.task in known:
      found[member.task, count] = None
    elif groups:
      absent.append(member.task)
    else:
      raise errors.UserError(
        f'there is no task {member.task!r}; {_ADD_FOLDER}.'
      )
  if not found:
    raise errors.UserError(f'none of {absent} is there; {_ADD_FOLDER}.')
  names = [name for name, _ in found]
  if twice := sorted({name for name in names if names.count(name) > 1}):
    raise errors.UserError(
      f'the groups ask for {", ".join(twice)} with different numbers of shots;'
      ' evaluate the groups one by one, or give --shots.'
    )
  tasks = [(name, content, count) for (name, count), content in found.items()]
  return Plan(tasks, groups, absent)


def options(
  name: str, content: Any, shots: int | None, limit: int | None
) -> dict[str, Any]:
  """Returns what decides the scores of a task of a plan.

  Args:
    name: name of the task.
    content: content of its file, see `Plan`.
    shots: examples in the context.
    limit: most examples.
  """
  digest = hashlib.blake2b(digest_size=8)
  if isinstance(content, prompted_task.PromptedTask):
    digest.update(repr(content).encode())
  elif content is not None:
    named = lambda x: getattr(x, '__name__', type(x).__name__)  # noqa: E731
    digest.update(json.dumps(content, sort_keys=True, default=named).encode())
    for file in content['dataset_kwargs']['data_files'].values():
      digest.update(paths.at(file).read_bytes())
      for code in sorted(paths.at(file).parent.glob('*.py')):
        digest.update(code.read_bytes())
  return {
    'task': name,
    'shots': shots,
    'limit': limit,
    'content': digest.hexdigest() if content is not None else 'lm-eval',
  }


def run(
  loaded: loaded_model.LoadedModel,
  planned: Plan,
  *,
  limit: int | None = None,
  batch_size: int = 8,
  allow_code: bool = False,
  report: Callable[[int, int], Any] | None = None,
) -> Iterator[results.Score]:
  """Evaluates a model; every process of a job takes part.

  Args:
    loaded: the model.
    planned: the tasks.
    limit: most examples of a task.
    batch_size: rows at a time.
    allow_code: whether generated programs may run.
    report: called with the number of a task's requests done and of all.

  Yields:
    Scores on process 0, nothing on others: of every task, and the mean of each
    group.

  Raises:
    UserError: the data of a task cannot be had.
  """
  from encdec_adapt.evaluation import lm_eval_adapter

  adapter = lm_eval_adapter.Adapter(
    loaded, batch_size=batch_size, report=report
  )
  if not distributed.is_lead():
    adapter.follow()
    return
  found = []
  try:
    with code_execution.allowed(allow_code):
      for name, content, shots in planned.tasks:
        if isinstance(content, prompted_task.PromptedTask):
          scores = _run_prompted(adapter, content)
        else:
          scores = _run_lm_eval(
            adapter, name, content, shots, limit, allow_code
          )
        for score in scores:
          found.append(score)
          yield score
  finally:
    adapter.stop()
  yield from group_scores(planned, found)


def group_scores(
  planned: Plan, scores: Iterable[results.Score]
) -> Iterator[results.Score]:
  """Returns the mean of each group.

  Args:
    planned: the tasks.
    scores: their scores; a group that lacks some says of how many it is.
  """
  found = {(score.task, score.metric): score for score in scores}
  for group, members in planned.groups.items():
    values = [
      found[key].value
      for member in members
      if (key := (member.task, member.metric)) in found
    ]
    if values:
      of = '' if len(values) == len(members) else f' of {len(values)}'
      yield results.Score(
        group, f'mean{of}', statistics.fmean(values), None, len(values)
      )


def _run_prompted(
  adapter: Any, task: prompted_task.PromptedTask
) -> Iterator[results.Score]:
  """Runs a task with templates."""
  from lm_eval.api import instance

  requests = [
    instance.Instance('loglikelihood', {}, pair, i)
    for i, pair in enumerate(task.pairs())
  ]
  scored = adapter.loglikelihood(requests, disable_tqdm=True)
  return task.score([log_prob for log_prob, _ in scored])


def _run_lm_eval(
  adapter: Any,
  name: str,
  content: Mapping[str, Any] | None,
  shots: int | None,
  limit: int | None,
  allow_code: bool,
) -> Iterator[results.Score]:
  """Runs a task of lm-eval."""
  import datasets
  import lm_eval
  from lm_eval import tasks as lm_eval_tasks

  datasets.disable_progress_bars()
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  manager = lm_eval_tasks.TaskManager(include_defaults=content is None)
  wanted = [name if content is None else dict(content)]
  try:
    manager.load(wanted)  # Reads the data.
  except Exception as error:
    what = 'the data of task'
    if content is not None:
      what = 'the file or the data of the local task'
    raise errors.UserError(
      f'{what} {name!r} cannot be read ({type(error).__name__}:'
      f' {error!s:.200}); tasks of the hub need the network and no data script.'
      f' Otherwise {_ADD_FOLDER}. Tasks that run programs need --allow_code.'
    ) from error
  answer = lm_eval.simple_evaluate(
    adapter,
    tasks=wanted,
    num_fewshot=shots,
    limit=limit,
    task_manager=manager,
    bootstrap_iters=0,
    # Seeding torch would import it.
    torch_random_seed=None,
    confirm_run_unsafe_code=allow_code,
  )
  yield from _scores(answer)


def _scores(answer: Mapping[str, Any]) -> Iterator[results.Score]:
  """Returns the scores in lm-eval's results."""
  found = {**answer['results'], **answer.get('groups', {})}
  for task, values in found.items():
    samples = answer.get('samples', {}).get(task, [])
    for key, value in values.items():
      metric, _, kept = key.partition(',')
      if not isinstance(value, int | float) or metric.endswith('_stderr'):
        continue
      if not kept:  # 'alias' and the like.
        continue
      own = sorted(
        (s for s in samples if s.get('filter', 'none') == kept),
        key=lambda sample: sample['doc_id'],
      )
      scores = tuple(
        float(sample[metric])
        for sample in own
        if isinstance(sample.get(metric), int | float)
      )
      # Of a perplexity the samples are log-likelihoods.
      if scores and not math.isclose(
        statistics.fmean(scores), value, rel_tol=1e-6, abs_tol=1e-6
      ):
        scores = ()
      error = None
      if len(scores) > 1:
        error = statistics.stdev(scores) / len(scores) ** 0.5
      counted = answer.get('n-samples', {})
      parts = answer.get('group_subtasks', {}).get(task) or [task]
      yield results.Score(
        task,
        metric if kept == 'none' else f'{metric},{kept}',
        float(value),
        error,
        len(own) or sum(counted.get(x, {}).get('effective', 0) for x in parts),
        scores,
      )


def _hub_tasks() -> frozenset[str]:
  """Returns the names of all tasks, groups and tags of lm-eval."""
  from lm_eval import tasks as lm_eval_tasks

  print('reading the list of tasks of lm-eval', flush=True)
  return frozenset(lm_eval_tasks.TaskManager().all_tasks)


def _read_folder(folder: str, limit: int | None) -> dict[str, Any]:
  """Reads and checks the local tasks of a folder, by name."""
  files = sorted(paths.at(folder).glob('*.yaml'))
  found: dict[str, Any] = {}
  for file in files:
    place = str(file)
    content = _read_yaml(place)
    if 'task' not in content:
      continue  # Prompt templates, or something else.
    name = content['task']
    if not isinstance(name, str):
      raise errors.UserError(f'{place}: task is {name!r}; it must be a name.')
    if name in found:
      raise errors.UserError(f'{place}: a second task is named {name!r}.')
    if 'templates' in content:
      found[name] = prompted_task.read(place, content, limit)
    else:
      found[name] = _check_lm_eval(place)
  if not found:
    raise errors.UserError(
      f'{folder} has no task: no YAML file with a field `task`'
      ' (encdec_adapt/evaluation/README.md shows one).'
    )
  return found


def _read_yaml(place: str) -> dict[str, Any]:
  """Reads a YAML file; functions and other tagged values stay text."""

  class Loader(yaml.SafeLoader):
    """Takes any tag."""

  Loader.add_multi_constructor(
    '!', lambda loader, suffix, node: f'!{suffix} {getattr(node, "value", "")}'
  )
  try:
    content = yaml.load(paths.at(place).read_text(), Loader)
  except (OSError, yaml.YAMLError) as error:
    raise errors.UserError(f'{place} is not YAML ({error}).') from error
  if not isinstance(content, dict):
    raise errors.UserError(f'{place} must have fields, `task` among them.')
  return content


def _check_lm_eval(place: str) -> dict[str, Any]:
  """Checks a task in lm-eval's format and makes its paths absolute."""
  from lm_eval.tasks import _yaml_loader

  # With what the file includes, and the functions that it names.
  content = _yaml_loader.load_yaml(place)
  needed = ('dataset_path', 'doc_to_text', 'doc_to_target', 'dataset_kwargs')
  missing = [name for name in needed if name not in content]
  files = (content.get('dataset_kwargs') or {}).get('data_files')
  files = {'test': files} if isinstance(files, str) else files
  is_local = isinstance(files, dict) and content.get('dataset_path') == 'json'
  if missing or not is_local or {str} != {*map(type, files.values())}:
    raise errors.UserError(
      f'{place}: fields {missing} are missing, or the data are not local; a'
      ' local task has `dataset_path: json`, `dataset_kwargs: {data_files:'
      ' {test: FILE.jsonl}}`, doc_to_text and doc_to_target.'
    )
  folder = paths.at(place).parent
  files = {split: str(folder / file) for split, file in files.items()}
  tested = content.get('test_split') or content.get('validation_split')
  if tested not in files:
    raise errors.UserError(
      f'{place}: test_split is {tested!r}; it must be one of {sorted(files)},'
      ' the names in data_files.'
    )
  for file in files.values():
    for where, row in prompted_task.read_rows(file):
      # A function may add fields to rows.
      for field in () if 'process_docs' in content else _TEXTS:
        _check_fields(f'{place}: {field}', content.get(field), where, row)
  kwargs = {**content['dataset_kwargs'], 'data_files': files}
  return {**content, 'dataset_kwargs': kwargs}


def _check_fields(
  what: str, template: Any, where: str, row: Mapping[str, Any]
) -> None:
  """Checks that a row has the fields that a template uses."""
  if not isinstance(template, str) or template.startswith('!'):
    return
  try:
    parsed = jinja2.Environment().parse(template)
  except jinja2.TemplateError as error:
    raise errors.UserError(f'{what} is not a template ({error}).') from error
  for name in sorted(meta.find_undeclared_variables(parsed)):
    if name not in row:
      raise errors.UserError(
        f'{where} has no field {name!r}, which {what} uses; its fields are'
        f' {sorted(row)}.'
      )
