"""Batches of policy losses: sampled completions, their rewards, and metrics.

`rollouts.jsonl` has the completions of the first prompts of a batch, at the
steps that are printed, and of the first held-out prompts, at each evaluation: a
line for each completion with `step`, `split`, `row` (of the records), `greedy`,
`prompt`, `completion`, `ended`, `reward` (with weights and penalty), `rewards`
(each part) and `advantage`. Prompts of conversations have special tokens by
name. The advantage is of the rewards alone: a KL in the reward (rloo) is
computed with the update.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import json
import os
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from encdec_adapt.cluster import distributed
from encdec_adapt.data.records import record_sets, row_order
from encdec_adapt.files import append_log, paths
from encdec_adapt.models import base_model
from encdec_adapt.objectives import framing
from encdec_adapt.training import rollouts, setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.recipes import policy_recipe
from encdec_adapt.training.sections import train_section

FILE = 'rollouts.jsonl'
_SHOWN = 2  # Prompts of a batch whose completions are written.


class Completions(NamedTuple):
  """Completions of a prompt, as rewards read them.

  Attributes:
    prompt: text of the prompt; of a conversation with special tokens by name.
    fields: further fields of the row, and `target`, its given answer.
    texts: the completions without their ends.
    pair: tokens of the prompt in both vocabularies, and the given answer.
    tokens: tokens of each completion, with its end unless it is cut short.
  """

  prompt: str
  fields: Mapping[str, Any]
  texts: list[str]
  pair: framing.Pair
  tokens: list[np.ndarray]


# Completions of each prompt -> values of each part of the reward by its name,
# and counts to be logged. Every process calls it with the same completions.
Score = Callable[
  [Sequence[Completions]],
  tuple[dict[str, Float[np.ndarray, 'n G']], dict[str, int]],
]


class _Batch(NamedTuple):
  """Completions of a batch with their rewards.

  Attributes:
    rows: record row of each prompt.
    exists: indices of the prompts that do not only fill the batch, [n].
    groups: completions of these.
    samples: all completions, [P, G].
    values: parts of the rewards, [n, G].
    counts: counts to be logged.
    rewards: the rewards with weights and penalty, [P, G].
  """

  rows: Sequence[int]
  exists: list[int]
  groups: list[Completions]
  samples: rollouts.Samples
  values: dict[str, np.ndarray]
  counts: dict[str, int]
  rewards: np.ndarray

  def metrics(self) -> dict[str, float]:
    """Returns the metrics of the completions."""
    rewards, lengths = (
      x[self.exists] for x in (self.rewards, self.samples.counts)
    )
    texts = {x.tobytes() for group in self.groups for x in group.tokens}
    values = {
      'reward': rewards.mean(),
      **{f'reward/{name}': x.mean() for name, x in self.values.items()},
      'sampled_tokens': lengths.sum(),
      'length': lengths.mean(),
      'cut_short': 1 - self.samples.ended[self.exists].mean(),
      'without_spread': (np.ptp(rewards, axis=1) == 0).mean(),
      'distinct': len(texts) / rewards.size,
    }
    return {k: float(x) for k, x in values.items()} | self.counts


def _no_phase(step: int, name: str) -> contextlib.AbstractContextManager:
  """Times no phase: an evaluation is a phase itself."""
  del step, name
  return contextlib.nullcontext()


class PolicyBatches:
  """Samples, scores and frames the batches of a policy loss."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    placement: state_lib.Placement,
    recipe: policy_recipe.Policies,
    data: setup.Data,
    score: Score,
    weights: Mapping[str, float],
    spent: Callable[[int, str], contextlib.AbstractContextManager],
    train: train_section.TrainConfig,
    *,
    seed: int,
    teacher: bool,
    start: int,
    evaluated: int | None,
  ):
    """Opens `rollouts.jsonl`, without completions of steps that are repeated.

    Args:
      workdir: work directory of the job.
      placement: the model in training, and its mesh.
      recipe: the kind of training.
      data: vocabularies and records.
      score: computes the rewards of completions.
      weights: weight of each part of the reward.
      spent: context of a phase of a step: 'sample' or 'reward'.
      train: section `train` of the configuration.
      seed: seed of the job.
      teacher: whether to make the teacher's fields.
      start: step that the job starts from.
      evaluated: the last step that was evaluated, None for none.
    """
    self._recipe, self._data = recipe, data
    self._cut = train.rollouts
    self._score, self._weights = score, weights
    self._sampler = rollouts.Sampler(
      placement,
      data.train,
      data.vocabularies.decoder,
      recipe.sampling,
      seed,
    )
    self._spent, self._teacher = spent, teacher
    self._log_every, self._batch_size = train.log_every, train.batch_size
    self._local = setup.local_rows(train.batch_size, placement)
    self._log = None
    if distributed.is_lead():
      last = {'train': start, 'eval': -1 if evaluated is None else evaluated}
      self._log = append_log.Log(paths.at(workdir) / FILE)
      self._log.keep(
        line
        for line, _ in self._log.lines
        if line and line['step'] <= last[line['split']]
      )

  def __call__(
    self,
    step: int,
    params: base_model.Params,
    order: row_order.Order,
    position: int,
  ) -> tuple[framing.Batch, dict[str, float]]:
    """Makes the batch of a step; every process calls it together.

    Args:
      step: step of the parameters, from 0.
      params: parameters of the policy.
      order: order of the rows.
      position: position of the first row of the batch in it.

    Returns:
      This process's rows of the batch, and metrics of all completions.

    Raises:
      RewardError: a reward could not be computed.
    """
    rows = [order.row(position + i) for i in range(self._batch_size)]
    batch = self._sample(self._data.train, rows, step, params, self._spent)
    if (step + 1) % self._log_every == 0:
      self._write(step + 1, 'train', batch)
    return self._frame(batch), batch.metrics()

  def evaluate(
    self, step: int, params: base_model.Params, beat: Callable[[], None]
  ) -> dict[str, list[float]]:
    """Continues all held-out prompts; every process calls it together.

    Args:
      step: step of the parameters.
      params: parameters of the policy.
      beat: called before each batch of prompts, for the watchdog.

    Returns:
      For each prompt `reward`, that of its greedy completion, and
      `sampled_reward`, the mean of its other completions.

    Raises:
      RewardError: a reward could not be computed.
    """
    held_out, results = self._data.evaluation, []
    for first in range(0, len(held_out), self._batch_size):
      beat()
      rows = range(first, first + self._batch_size)
      rows = [i if i < len(held_out) else row_order.FILLER for i in rows]
      batch = self._sample(held_out, rows, step, params, greedy=True)
      if not first:
        self._write(step, 'eval', batch)
      results.append(batch.rewards[batch.exists])
    rewards = np.concatenate(results)
    return {
      'reward': rewards[:, 0].tolist(),
      'sampled_reward': rewards[:, 1:].mean(axis=1).tolist(),
    }

  def _sample(
    self, records, rows, step, params, spent=_no_phase, greedy=False
  ) -> _Batch:
    pairs = read_pairs(records, rows)
    with spent(step, 'sample'):
      samples = self._sampler(params, pairs, rows, step, greedy=greedy)
    exists = [i for i, pair in enumerate(pairs) if pair is not None]
    groups = [self._completions(pairs[i], samples, i) for i in exists]
    with spent(step, 'reward'):
      values, counts = self._score(groups)
    total = sum(self._weights[name] * x for name, x in values.items())
    rewards = np.zeros(samples.counts.shape, np.float32)
    penalty = self._cut.cut_penalty * ~samples.ended[exists]
    rewards[exists] = total - penalty
    return _Batch(rows, exists, groups, samples, values, counts, rewards)

  def _completions(
    self, pair: framing.Pair, samples: rollouts.Samples, prompt: int
  ) -> Completions:
    sides = self._data.vocabularies.sides
    decode = self._data.vocabularies.decoder.decode_generated
    count = samples.counts.shape[1]
    tokens = [samples.completion(prompt, i) for i in range(count)]
    ends = samples.ended[prompt]
    return Completions(
      sides[self._sampler.prompt_side].decode_generated(
        self._sampler.prompt(pair),
        show_special=any(
          x.rows.ends_turns for x in self._data.train.spec.objectives
        ),
      ),
      fields_of(pair) | {'target': decode(pair.targets)},
      [decode(x[: len(x) - i]) for x, i in zip(tokens, ends, strict=True)],
      pair,
      tokens,
    )

  def _frame(self, batch: _Batch) -> framing.Batch:
    """Returns this process's rows of the batch."""
    masks, samples = self._cut.cut == 'mask', batch.samples
    framed = [[[]] * samples.counts.shape[1] for _ in batch.rows]
    for i, group in zip(batch.exists, batch.groups, strict=True):
      framed[i] = [
        [
          group.pair._replace(
            targets=tokens,
            weights=np.full(len(tokens), ended or not masks, np.float32),
          )
        ]
        for tokens, ended in zip(group.tokens, samples.ended[i], strict=True)
      ]
    fields = self._recipe.rows.of_groups(
      [framed[i] for i in self._local],
      self._data.train.framing,
      teacher=self._teacher,
    )
    fields['rewards'] = batch.rewards[self._local]
    fields['sampler_log_probs'] = samples.log_probs[self._local]
    return fields

  def _write(self, step: int, split: str, batch: _Batch) -> None:
    if self._log is None:
      return
    rewards = batch.rewards[batch.exists[:_SHOWN]]
    advantages = np.asarray(
      self._recipe.loss.advantages(rewards, np.zeros_like(rewards))
    )
    for i, group in enumerate(batch.groups[:_SHOWN]):
      row = batch.exists[i]
      self._log.write(
        *(
          {
            'step': step,
            'split': split,
            'row': int(batch.rows[row]),
            'sample': j,
            'greedy': split == 'eval' and not j,
            'prompt': group.prompt,
            'completion': text,
            'ended': bool(batch.samples.ended[row, j]),
            'reward': float(rewards[i, j]),
            'rewards': {k: float(x[i, j]) for k, x in batch.values.items()},
            'advantage': float(advantages[i, j]),
          }
          for j, text in enumerate(group.texts)
        )
      )
    self._log.flush()


def fields_of(pair: framing.Pair) -> dict[str, Any]:
  """Returns the further fields of a pair."""
  return json.loads(pair.fields) if pair.fields else {}


def read_pairs(
  records: record_sets.RecordSet, rows: Sequence[int]
) -> list[framing.Pair | None]:
  """Reads rows of a single pair; None for those that fill the batch."""
  content = iter(records.read([row for row in rows if row != row_order.FILLER]))
  return [None if row == row_order.FILLER else next(content)[0] for row in rows]
