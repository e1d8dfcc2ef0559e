r"""Rewards of completions, one per key of `config.train.rewards`.

| key         | reward of a completion                                        |
|-------------|---------------------------------------------------------------|
| `answers`   | 1 if its last number (without commas, currency and full stop) |
|             | equals the target's (after `####`, if present); for targets   |
|             | without a number, 1 if the stripped texts are equal           |
| `code`      | 1 if the completion followed by the field `tests` of its row  |
|             | (a text, or a list of lines) runs to the end                  |
| `functions` | the result of the function                                    |
| `models`    | the output of the reward model                                |

Rows hold tokens, so targets are decoded with the vocabulary; see
`config.data.lossy_targets` for targets that do not round-trip.

`FUNCTION(prompts, completions, fields)` gets lists with one entry per
completion, and returns a list of numbers. `fields` are dictionaries of the
fields listed after the answer or the messages in `config.data.source`, and
`target`, the row's answer. It should be deterministic: a resumed job calls it
again. Programs run under the limits of `cluster.code_limits`, which is not a
sandbox.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import decimal
import functools
import importlib.util
import json
import math
import os
import re
import sys
from typing import Any, NamedTuple
import zlib

from jaxtyping import Float
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cluster import code_limits, distributed
from encdec_adapt.data.records import record_sets
from encdec_adapt.inference import rewards as reward_scores
from encdec_adapt.models import base_model, execution
from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import job_models
from encdec_adapt.training.sections import rewards_section

_TESTS = 'tests'  # Field of the tests of a program.
_CURRENCY = re.compile('[$€£¥]')
_NUMBER = re.compile(r'(?:(?<!\w)-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)')


class Completions(NamedTuple):
  """Completions of a prompt: the input of rewards.

  Attributes:
    prompt: text of the prompt; conversations show special tokens by name.
    fields: further fields of the row, and `target`, its answer.
    texts: the completions without end tokens.
    pair: tokens of the prompt in both vocabularies, and of the row's answer.
    tokens: tokens of each completion, with its end token unless truncated.
  """

  prompt: str
  fields: Mapping[str, Any]
  texts: list[str]
  pair: framing.Pair
  tokens: list[np.ndarray]


Groups = Sequence[Completions]
Model = Callable[[Groups, special_ids.Framing], Float[np.ndarray, 'n G']]
# Prompts, completions and fields -> rewards.
Function = Callable[[list[str], list[str], list[dict[str, Any]]], list[float]]


class RewardError(errors.UserError):
  """A reward failed; raised on all processes together."""


class Rewards:
  """The rewards of a job.

  Attributes:
    weights: weight of each part of the reward, by name.
    models: the reward models, by path.
  """

  def __init__(
    self,
    config: rewards_section.RewardsConfig,
    open_model: Callable[[str], Model],
    label: str = rewards_section.LABEL,
  ):
    """Opens the rewards.

    Args:
      config: the rewards.
      open_model: opens a reward model by path; returns its scoring function.
      label: name of the rewards in messages.

    Raises:
      UserError: a file or function is missing, or running code is not allowed.
    """
    self.weights = config.weights
    self._ids: special_ids.Framing | None = None
    self._functions: dict[str, Function] = {}
    self._label, self._runs_programs = label, config.code > 0
    self._programs = 0  # Timed-out programs.
    if config.answers:
      self._functions['answers'] = _answers
    if config.code:
      code_limits.require_allowed()
      self._functions['code'] = self._run
    for text in config.functions:
      self._functions[rewards_section.name_of(text)] = _load(text, label)
    self.models = {path: open_model(path) for path in config.models}

  def check(self, records: record_sets.RecordSet) -> None:
    """Checks that rows have the fields of the rewards; stores special ids.

    Args:
      records: the rows with the prompts.

    Raises:
      UserError: a field is missing.
    """
    self._ids = records.framing
    fields = fields_of(records.read([0])[0][0])
    if self._runs_programs and _TESTS not in fields:
      raise errors.UserError(
        f'{self._label}.code is set and reads the field {_TESTS!r}; rows of'
        f' config.data.source={records.spec.source!r} have'
        f' {", ".join(fields) or "no further fields"}. Name it behind the'
        ' answer, as in pairs:GLOB#PROMPT,ANSWER,tests.'
      )

  def __call__(
    self, groups: Groups
  ) -> tuple[dict[str, Float[np.ndarray, 'n G']], dict[str, int]]:
    """Scores completions; every process calls it with the same groups.

    Each process runs the functions on its share of the prompts.

    Args:
      groups: the completions of each prompt.

    Returns:
      Values of each part by name, and with `code` the number of `timeouts`.

    Raises:
      RewardError: a function raises, or returns a wrong number of values or a
        non-finite value; names the example.
    """
    processes, process = distributed.count_and_index()
    self._programs, values, error = 0, {}, ''
    try:
      for name, function in self._functions.items():
        title = f'{self._label}: {name}'
        values[name] = _call(title, function, groups[process::processes])
    except RewardError as problem:
      error = str(problem)
    # Errors are gathered too: all processes raise and save the step before.
    shares = distributed.gather('rewards', [values, self._programs, error])
    if failed := [error for _, _, error in shares if error]:
      raise RewardError(failed[0])
    shape = len(groups), len(groups[0].texts) if groups else 0
    results = {name: np.zeros(shape, np.float32) for name in self._functions}
    for i, (values, _, _) in enumerate(shares):
      for name, scores in values.items():
        share = results[name][i::processes]
        share[:] = np.reshape(scores, share.shape)
    for path, model in self.models.items():
      name = rewards_section.name_of(path)
      results[name] = model(groups, self._ids)
    timeouts = sum(count for _, count, _ in shares)
    ordered = {name: results[name] for name in self.weights}
    return ordered, {'timeouts': timeouts} if self._runs_programs else {}

  def _run(self, prompts, completions, fields) -> list[float]:
    del prompts
    programs = []
    for completion, known in zip(completions, fields, strict=True):
      tests = known[_TESTS]
      tests = tests if isinstance(tests, str) else '\n'.join(tests)
      programs.append(f'{completion}\n{tests}\n')
    # Threads wait for the processes of the programs.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      results = list(pool.map(code_limits.run, programs))
    self._programs += results.count(None)
    return [float(bool(result)) for result in results]


@dataclasses.dataclass(frozen=True)
class RewardModel:
  """A reward model of a job; reads its parameters on the first call.

  Attributes:
    reference: the opened model.
    rows: prompts of a batch.
    lengths: largest numbers of tokens of a prompt and a completion.
  """

  reference: job_models.OpenedModel
  rows: int
  lengths: framing.Lengths

  @functools.cached_property
  def _params(self) -> base_model.Params:
    return self.reference.read()

  def __call__(
    self, groups: Groups, ids: special_ids.Framing
  ) -> Float[np.ndarray, 'n G']:
    """Scores groups of completions."""
    placement = self.reference.placement
    return reward_scores.score(
      placement.model,
      self._params,
      [[g.pair._replace(targets=x) for x in g.tokens] for g in groups],
      mesh=placement.mesh,
      rules=placement.rules,
      rows=self.rows,
      ids=ids,
      # The decoder also reads BOS.
      lengths=framing.Lengths(self.lengths.encoder, self.lengths.decoder + 1),
    )


def open_rewards(
  settings: config_lib.Settings,
  compute: execution.ComputeConfig,
  placement: state_lib.Placement,
) -> Rewards | None:
  """Opens the rewards of a job; None if its recipe has none.

  Args:
    settings: the validated configuration.
    compute: section `compute`, resolved for the devices.
    placement: the trained model and its mesh.

  Raises:
    UserError: see `Rewards`.
  """
  recipe = settings.recipe
  if recipe.rewards is None:
    return None
  lengths = framing.Lengths(
    settings.data.encoder_length, recipe.sampling.tokens
  )

  def open_model(path: str) -> RewardModel:
    reference = job_models.open_reward_model(
      path, placement, compute, settings.data.vocabularies, lengths
    )
    return RewardModel(reference, settings.train.batch_size, lengths)

  return Rewards(recipe.rewards, open_model)


def last_number(text: str) -> decimal.Decimal | None:
  """Returns the last number of a text, None without numbers."""
  numbers = _NUMBER.findall(_CURRENCY.sub('', text))
  return decimal.Decimal(numbers[-1].replace(',', '')) if numbers else None


def is_right(completion: str, target: str) -> bool:
  """Returns whether a completion matches a target; see `answers`."""
  wanted = last_number(target.rpartition('####')[2])
  if wanted is None:
    return completion.strip() == target.strip()
  return last_number(completion) == wanted


def _answers(prompts, completions, fields) -> list[float]:
  del prompts
  return [
    float(is_right(completion, known['target']))
    for completion, known in zip(completions, fields, strict=True)
  ]


def _load(text: str, label: str) -> Function:
  """Loads FUNCTION of a Python file, from FILE#FUNCTION."""
  path, _, name = text.rpartition('#')
  # Dataclasses and pickle look modules up by name, so names must be unique.
  title = f'rewards_{zlib.crc32(path.encode()):x}'
  try:
    spec = importlib.util.spec_from_file_location(title, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    spec.loader.exec_module(module)
    # TypeError if it is not callable.
    return functools.partial(getattr(module, name))
  except (Exception, SystemExit) as error:  # Any error: the file is the user's.
    raise errors.UserError(
      f'{label} has the function {text!r}; it must be FILE.py#FUNCTION of a'
      f' Python file that can be run ({type(error).__name__}: {error}).'
    ) from error


def _call(title: str, function: Function, groups: Groups) -> list[float]:
  """Returns the values of a reward function for all completions.

  Raises:
    RewardError: see `Rewards.__call__`.
  """
  examples = [(x.prompt, text, x.fields) for x in groups for text in x.texts]
  values, problem = _try(function, examples)
  if not problem:
    return values
  # Call again, one example at a time, to name the failing example.
  failures = ((x, _try(function, [x])[1]) for x in examples)
  failures = ((x, alone) for x, alone in failures if alone)
  (prompt, completion, _), problem = next(failures, (examples[0], problem))
  raise RewardError(
    f'{title} {problem} for the prompt {prompt[-200:]!r} with the completion'
    f' {completion[:200]!r}. Correct the reward; training resumes at the step'
    ' before.'
  )


def _try(
  function: Function, examples: Sequence[tuple[str, str, dict[str, Any]]]
) -> tuple[list[float], str]:
  """Calls a function; returns its values, and an error text or ''."""
  if not examples:  # More processes than prompts.
    return [], ''
  try:
    columns = map(list, zip(*examples, strict=True))
    values = [float(x) for x in function(*columns)]
  except (Exception, SystemExit) as error:  # Any: the function is the user's.
    return [], f'raises {type(error).__name__}: {error},'
  if len(values) != len(examples):
    return [], f'returns {len(values)} values for {len(examples)} completions,'
  wrong = [x for x in values if not math.isfinite(x)]
  return values, f'returns {wrong[0]}' if wrong else ''


def fields_of(pair: framing.Pair) -> dict[str, Any]:
  """Returns the further fields of a pair as a dictionary."""
  return json.loads(pair.fields) if pair.fields else {}
