"""Batches of policy losses: sampled completions, their rewards, and metrics.

`rollouts.jsonl` has one line per completion of the first prompts of a batch, at
logged steps, and of the first held-out prompts, at each evaluation: `step`,
`split`, `row` (of the records), `greedy`, `prompt`, `completion`, `ended`,
`reward` (with weights and penalty), `rewards` (each part) and `advantage`.
Prompts of conversations show special tokens by name. The advantage excludes the
KL in the reward (rloo), which is computed with the update.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
from typing import NamedTuple

import numpy as np

from encdec_adapt.cluster import distributed, watchdog
from encdec_adapt.data.records import row_order
from encdec_adapt.files import append_log, paths
from encdec_adapt.models import base_model
from encdec_adapt.objectives import framing
from encdec_adapt.training import job_telemetry, rollouts
from encdec_adapt.training.jobs import completion_rewards, record_batches
from encdec_adapt.training.jobs import job as job_lib
from encdec_adapt.training.metrics import token_metrics

FILE = 'rollouts.jsonl'
_SHOWN = 2  # Prompts of a batch written to the file.


class _Batch(NamedTuple):
  """Completions of a batch with their rewards.

  Attributes:
    rows: record row of each prompt.
    exists: indices of the prompts other than filler, [n].
    groups: completions of these prompts.
    samples: all completions, [P, G].
    values: parts of the rewards, [n, G].
    counts: counts to log.
    rewards: the rewards with weights and penalty, [P, G].
  """

  rows: Sequence[int]
  exists: list[int]
  groups: list[completion_rewards.Completions]
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


def _no_phase(name: str) -> contextlib.AbstractContextManager:
  """Returns a null context: an evaluation is itself a timed phase."""
  del name
  return contextlib.nullcontext()


class PolicyBatches(record_batches.SampledBatches):
  """Batches of sampled completions with their rewards."""

  def __init__(
    self,
    job: job_lib.Job,
    telemetry: job_telemetry.JobTelemetry,
    watch: watchdog.Watchdog,
  ):
    """Opens `rollouts.jsonl`, and drops completions of steps to be repeated.

    Args:
      job: the job.
      telemetry: telemetry of the job.
      watch: watchdog of the job.
    """
    super().__init__(job, telemetry, watch)
    train = job.settings.train
    self._rewards, self._cut = job.frozen.rewards, train.rollouts
    self._log_every, self._file = train.log_every, None
    self._microbatches = train.microbatches
    if distributed.is_lead():
      evaluated = self._telemetry.evaluated
      last = {
        'train': self._telemetry.start,
        'eval': -1 if evaluated is None else evaluated,
      }
      self._file = append_log.Log(paths.at(job.workdir) / FILE)
      self._file.keep(
        line
        for line, _ in self._file.lines
        if line and line['step'] <= last[line['split']]
      )

  def next(
    self, step: int, params: Callable[[], base_model.Params]
  ) -> tuple[framing.Batch, np.ndarray, dict[str, float]]:
    """Returns the batch of a step; see `record_batches.RecordBatches.next`.

    Raises:
      RewardError: a reward could not be computed.
    """
    local, rows = self._read_numbers()
    phase = functools.partial(self._telemetry.phase, self._watch, step)
    batch = self._sample(self._data.train, rows, step, params(), phase)
    if (step + 1) % self._log_every == 0:
      self._write(step + 1, 'train', batch)
    rows = self._frame(batch, masks=self._cut.cut == 'mask')
    return rows, local, batch.metrics()

  def evaluate(
    self, step: int, params: base_model.Params, beat: Callable[[], None]
  ) -> tuple[dict[str, list[float]], record_batches.Measured]:
    """Scores completions of all held-out prompts; all processes call it.

    Args:
      step: step of the parameters.
      params: parameters of the policy.
      beat: called before each batch of prompts, for the watchdog.

    Returns:
      For each prompt, `reward` of its greedy completion, and means over its
      other completions: `sampled_reward` and `length`; and metrics of the
      latter with this process's rows, of the size of a microbatch.

    Raises:
      RewardError: a reward could not be computed.
    """
    held_out, results, framed = self._data.evaluation, [], []
    for first in range(0, len(held_out), self._batch_size):
      beat()
      rows = range(first, first + self._batch_size)
      rows = [i if i < len(held_out) else row_order.FILLER for i in rows]
      batch = self._sample(held_out, rows, step, params, greedy=True)
      if not first:
        self._write(step, 'eval', batch)
      fields = self._frame(batch, masks=False)
      fields['weights'][:, 0] = 0.0  # Greedy.
      parts = (np.split(x, self._microbatches) for x in fields.values())
      framed += [
        dict(zip(fields, part, strict=True))
        for part in zip(*parts, strict=True)
      ]
      values = np.stack([batch.rewards, batch.samples.counts])
      results.append(values[:, batch.exists])
    rewards, counts = np.concatenate(results, axis=1)
    return {
      'reward': rewards[:, 0].tolist(),
      'sampled_reward': rewards[:, 1:].mean(axis=1).tolist(),
      'length': counts[:, 1:].mean(axis=1).tolist(),
    }, {token_metrics.Sampled(self._recipe.metrics.loss): framed}

  def _sample(
    self, records, rows, step, params, phase=_no_phase, greedy=False
  ) -> _Batch:
    pairs = record_batches.read_pairs(records, rows)
    with phase('sample'):
      samples = self._sampler(params, pairs, rows, step, greedy=greedy)
    exists = [i for i, pair in enumerate(pairs) if pair is not None]
    groups = [self._completions(pairs[i], samples, i) for i in exists]
    with phase('reward'):
      values, counts = self._rewards(groups)
    total = sum(self._rewards.weights[name] * x for name, x in values.items())
    rewards = np.zeros(samples.counts.shape, np.float32)
    penalty = self._cut.cut_penalty * ~samples.ended[exists]
    rewards[exists] = total - penalty
    return _Batch(rows, exists, groups, samples, values, counts, rewards)

  def _completions(
    self, pair: framing.Pair, samples: rollouts.Samples, prompt: int
  ) -> completion_rewards.Completions:
    sides = self._data.vocabularies.sides
    decode = self._data.vocabularies.decoder.decode_generated
    count = samples.counts.shape[1]
    tokens = [samples.completion(prompt, i) for i in range(count)]
    ends = samples.ended[prompt]
    return completion_rewards.Completions(
      sides[self._sampler.prompt_side].decode_generated(
        self._sampler.prompt(pair),
        show_special=any(
          x.rows.ends_turns for x in self._data.train.spec.objectives
        ),
      ),
      completion_rewards.fields_of(pair) | {'target': decode(pair.targets)},
      [decode(x[: len(x) - i]) for x, i in zip(tokens, ends, strict=True)],
      pair,
      tokens,
    )

  def _frame(self, batch: _Batch, masks: bool) -> framing.Batch:
    """Returns this process's rows; `masks` gives cut completions weight 0."""
    samples, ids = batch.samples, self._data.train.framing
    # The policy does not choose a forced token.
    first = 0 if ids.decoder.forced is None else 1
    framed = [[[]] * samples.counts.shape[1] for _ in batch.rows]
    for i, group in zip(batch.exists, batch.groups, strict=True):
      framed[i] = [
        [
          group.pair._replace(
            targets=tokens,
            weights=np.float32(
              (np.arange(len(tokens)) >= first) & (ended or not masks)
            ),
          )
        ]
        for tokens, ended in zip(group.tokens, samples.ended[i], strict=True)
      ]
    fields = self._recipe.rows.of_groups(
      [framed[i] for i in self._local],
      ids,
      teacher=self._teacher,
    )
    fields['rewards'] = batch.rewards[self._local]
    fields['sampler_log_probs'] = samples.log_probs[self._local]
    return fields

  def _write(self, step: int, split: str, batch: _Batch) -> None:
    if self._file is None:
      return
    rewards = batch.rewards[batch.exists[:_SHOWN]]
    advantages = np.asarray(
      self._recipe.loss.advantages(rewards, np.zeros_like(rewards))
    )
    for i, group in enumerate(batch.groups[:_SHOWN]):
      row = batch.exists[i]
      self._file.write(
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
    self._file.flush()
