"""Batches of policy losses: sampled completions, their rewards, and metrics.

`rollouts.jsonl` has the completions of the first prompts of a batch, at the
steps that are printed, and of the first held-out prompts, at each evaluation: a
line for each completion with `step`, `split`, `row` (of the records), `greedy`,
`prompt`, `completion`, `ended`, `reward` (with weights and penalty), `rewards`
(each part) and `advantage`. Texts have special tokens by name. The advantage is
of the rewards alone: a KL in the reward (rloo) is computed with the update.
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
from encdec_adapt.training import rollouts, setup, train_section
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.losses import policy

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


class PolicyBatches:
  """Samples, scores and frames the batches of a policy loss."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    placement: state_lib.Placement,
    loss: policy.Policy,
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
      loss: the loss.
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
    self._loss, self._data = loss, data
    self._rewards, self._weights = score, weights
    self._sampler = rollouts.Sampler(
      placement,
      data.train,
      data.vocabularies.decoder,
      loss.rollouts,
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
    pairs = read_pairs(self._data.train, rows)
    with self._spent(step, 'sample'):
      samples = self._sampler(params, pairs, rows, step)
    with self._spent(step, 'reward'):
      parts, counts = self._score(pairs, samples)
    exists = np.array([pair is not None for pair in pairs])
    rewards = self._total(parts, samples)
    if (step + 1) % self._log_every == 0:
      self._write(step + 1, 'train', rows, pairs, samples, parts, rewards)
    metrics = _measure(rewards, parts, samples, exists)
    return self._frame(pairs, samples, rewards), metrics | counts

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
      rows = list(range(first, min(first + self._batch_size, len(held_out))))
      rows += [row_order.FILLER] * (self._batch_size - len(rows))
      pairs = read_pairs(held_out, rows)
      beat()
      samples = self._sampler(params, pairs, rows, step, greedy=True)
      parts, _ = self._score(pairs, samples)
      rewards = self._total(parts, samples)
      if not first:
        self._write(step, 'eval', rows, pairs, samples, parts, rewards)
      results.append(rewards[[pair is not None for pair in pairs]])
    rewards = np.concatenate(results)
    return {
      'reward': rewards[:, 0].tolist(),
      'sampled_reward': rewards[:, 1:].mean(axis=1).tolist(),
    }

  def _score(
    self, pairs: Sequence[framing.Pair | None], samples: rollouts.Samples
  ) -> tuple[dict[str, Float[np.ndarray, 'P G']], dict[str, int]]:
    """Returns each part of the rewards, 0 for filler rows, and counts."""
    exists = [i for i, pair in enumerate(pairs) if pair is not None]
    values, counts = self._rewards(
      [self._known(pairs[i], samples, i) for i in exists]
    )
    parts = {}
    for name, scores in values.items():
      parts[name] = np.zeros(samples.counts.shape, np.float32)
      parts[name][exists] = scores
    return parts, counts

  def _total(
    self,
    parts: Mapping[str, Float[np.ndarray, 'P G']],
    samples: rollouts.Samples,
  ) -> Float[np.ndarray, 'P G']:
    """Returns the weighted sum of the parts, with the penalty."""
    total = sum(self._weights[name] * x for name, x in parts.items())
    penalty = self._loss.rollouts.penalty * ~samples.ended
    return (total - penalty).astype(np.float32)

  def _known(
    self, pair: framing.Pair, samples: rollouts.Samples, prompt: int
  ) -> Completions:
    """Returns the completions of a prompt as rewards read them."""
    decode = self._data.vocabularies.decoder.decode_generated
    count = samples.counts.shape[1]
    tokens = [samples.completion(prompt, i) for i in range(count)]
    ended = samples.ended[prompt]
    return Completions(
      self._prompt(pair, self._data.train.spec.objectives[0].ends_turns),
      fields_of(pair) | {'target': decode(pair.targets)},
      [
        decode(x[: len(x) - has_end])
        for x, has_end in zip(tokens, ended, strict=True)
      ],
      pair,
      tokens,
    )

  def _prompt(self, pair: framing.Pair, show_special: bool) -> str:
    """Returns the text of a prompt."""
    side = self._sampler.prompt_side
    vocabulary = self._data.vocabularies.sides[side]
    tokens = self._sampler.prompt(pair)
    return vocabulary.decode_generated(tokens, show_special=show_special)

  def _frame(
    self,
    pairs: Sequence[framing.Pair | None],
    samples: rollouts.Samples,
    rewards: Float[np.ndarray, 'P G'],
  ) -> framing.Batch:
    """Returns this process's rows of the batch."""
    masks = self._loss.rollouts.cut == 'mask'
    groups = []
    for i in self._local:
      answers = [[]] * samples.counts.shape[1]
      if pairs[i] is not None:
        answers = []
        for j, ended in enumerate(samples.ended[i]):
          tokens = samples.completion(i, j)
          weights = np.full(len(tokens), ended or not masks, np.float32)
          pair = framing.Pair(
            pairs[i].inputs, tokens, pairs[i].prefix, weights=weights
          )
          answers.append([pair])
      groups.append(answers)
    local = list(self._local)
    return self._loss.make_batch(
      groups,
      self._data.train.spec.lengths,
      self._data.train.framing,
      teacher=self._teacher,
    ) | {
      'rewards': rewards[local],
      'sampler_log_probs': samples.log_probs[local],
    }

  def _write(self, step, split, rows, pairs, samples, parts, rewards) -> None:
    """Appends the completions of the first prompts."""
    if self._log is None:
      return
    form = self._loss.form
    advantages = np.asarray(form.advantages(rewards, np.zeros_like(rewards)))
    decode = self._data.vocabularies.decoder.decode_generated
    for i, pair in enumerate(pairs[:_SHOWN]):
      if pair is None:
        continue
      prompt = self._prompt(pair, show_special=True)
      self._log.write(
        *(
          {
            'step': step,
            'split': split,
            'row': int(rows[i]),
            'greedy': split == 'eval' and not j,
            'prompt': prompt,
            'completion': decode(samples.completion(i, j), show_special=True),
            'ended': bool(samples.ended[i, j]),
            'reward': float(rewards[i, j]),
            'rewards': {k: float(x[i, j]) for k, x in parts.items()},
            'advantage': float(advantages[i, j]),
          }
          for j in range(samples.counts.shape[1])
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


def _measure(
  rewards: Float[np.ndarray, 'P G'],
  parts: Mapping[str, Float[np.ndarray, 'P G']],
  samples: rollouts.Samples,
  exists: np.ndarray,
) -> dict[str, float]:
  """Returns the metrics of the completions of rows that exist, [P]."""
  rewards, ended = rewards[exists], samples.ended[exists]
  texts = {
    samples.completion(i, j).tobytes()
    for i, counts in enumerate(exists)
    for j in range(rewards.shape[1])
    if counts
  }
  values = {
    'reward': rewards.mean(),
    **{f'reward/{name}': x[exists].mean() for name, x in parts.items()},
    'sampled_tokens': samples.counts[exists].sum(),
    'length': samples.counts[exists].mean(),
    'cut_short': 1 - ended.mean(),
    'without_spread': (np.ptp(rewards, axis=1) == 0).mean(),
    'distinct': len(texts) / rewards.size,
  }
  return {name: float(value) for name, value in values.items()}
