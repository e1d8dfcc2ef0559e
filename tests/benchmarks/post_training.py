"""Post-training against TRL on torch: the same decoder, tokens and settings.

A step of DPO; sampling completions, `--samples` of each prompt; and a step of
GRPO that samples them, reads a reference, and updates. fp32, AdamW, `--pairs`
preferences or `--prompts` prompts. Prompts and given answers have the most
tokens; compiling is left out. Both take turns. `last` is the last loss, equal
for DPO, or the number of tokens. Ratios are times as fast as TRL. Needs
`pip install -e .[peer]`.
"""

from collections.abc import Callable, Sequence
import functools
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

import encdec_adapt
from encdec_adapt.data.records import record_sets
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import model_config as configs
from encdec_adapt.objectives import framing, preferences, row_fields
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import optimizers, rollouts, schedules
from encdec_adapt.training.recipes import policy_recipe, recipe
from tests import gemma_ids
from tests.benchmarks import generation, results
from tests.training import conftest

RATE = 1e-5
GRPO = 'grpo:beta=0.04,divisor=token,kl=k3_ratio'  # TRL's default with a KL.


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__,
    **generation.SIZES,
    pairs=16,
    prompts=16,
    samples=8,
    prompt_tokens=48,
    tokens=32,
    steps=3,
  ).parse_args(argv)
  import torch
  import transformers

  from tests.parity import trl_trainers

  sizes = {name: getattr(arguments, name) for name in generation.SIZES}
  stack = configs.StackConfig(**sizes, query_scale=float(arguments.head_dim))
  raw, _ = config_json.raw_from_model(configs.DecoderOnlyConfig(stack))
  rng = np.random.default_rng(0)
  shape = {'pairs': arguments.pairs, 'prompts': arguments.prompts}
  prompts = {
    name: rng.integers(
      5, stack.vocab_size, (n, arguments.prompt_tokens - 1), np.int32
    )
    for name, n in shape.items()
  }
  answers = rng.integers(
    5, stack.vocab_size, (arguments.pairs, 2, arguments.tokens), np.int32
  )
  rewards = rng.random((arguments.prompts, arguments.samples), np.float32)
  torch.manual_seed(0)
  with tempfile.TemporaryDirectory() as folder:
    transformers.AutoModelForCausalLM.from_config(
      transformers.AutoConfig.for_model(**raw)
    ).save_pretrained(folder)
    ours = _Ours(encdec_adapt.load(folder), arguments, prompts['prompts'])
    make = functools.partial(trl_trainers.make, folder=pathlib.Path(folder))
    dpo = make(
      trl_trainers.Dpo, groups=_with_bos(prompts['pairs'], answers.tolist())
    )
    grpo = make(
      trl_trainers.SamplingGrpo,
      groups=_with_bos(
        prompts['prompts'], [[[]] * arguments.samples] * arguments.prompts
      ),
      rewards=rewards.reshape(-1).tolist(),
      beta=0.04,
      num_generations=arguments.samples,
      max_completion_length=arguments.tokens,
    )
  for trainer in (dpo, grpo):
    trainer.optimizer = torch.optim.AdamW(
      trainer.model.parameters(), RATE, (0.9, 0.95), weight_decay=0, fused=True
    )
  repeated = [ids for ids, group in grpo.groups for _ in group]

  def sample() -> int:
    completions, _ = grpo._generate_single_turn(
      repeated, None, {}, arguments.samples
    )
    return sum(map(len, completions))

  row = functools.partial(_row, steps=arguments.steps)
  rows = [
    row('DPO step, s', ours.dpo(prompts['pairs'], answers), dpo.step),
    row('rollout, tokens/s', ours.count, sample, rate=True),
    row('GRPO step, s', ours.grpo(rewards), grpo.step),
  ]
  return results.report('post_training', rows, arguments)


def _with_bos(prompts: np.ndarray, answers: list) -> list:
  """Returns the groups of `trl_trainers`."""
  bos = gemma_ids.BOS
  rows = zip(prompts.tolist(), answers, strict=True)
  return [([bos, *prompt], group) for prompt, group in rows]


def _row(
  task: str,
  ours: Callable[[], float],
  theirs: Callable[[], float],
  steps: int,
  rate: bool = False,
) -> dict[str, Any]:
  """Measures a task; its calls return losses or numbers of tokens.

  Args:
    task: name of the row.
    ours: runs the task.
    theirs: runs the task with TRL.
    steps: measured calls of each.
    rate: whether to count tokens per second, and not seconds.
  """
  runs, values = {'ours': ours, 'TRL': theirs}, {}

  def timed(side: str) -> float:
    def run() -> None:
      values[side] = float(runs[side]())

    return results.rested_seconds(run)

  turns = {side: functools.partial(timed, side) for side in runs}
  row = {'task': task}
  for side, seconds in results.take_turns(turns, steps).items():
    measured = float(np.median(seconds[1:]))
    row[side] = values[side] / measured if rate else measured
  ratio = row['ours'] / row['TRL']
  row['ratio'] = ratio if rate else 1 / ratio
  return row | {f'{side}, last': value for side, value in values.items()}


class _Ours:
  """Our steps, as `train.py` runs them."""

  def __init__(self, loaded: Any, arguments: Any, prompts: np.ndarray):
    # Copied for each job, as the first step of one donates them.
    self._model, self._params = loaded.model, jax.device_get(loaded.params)
    empty = np.zeros(0, np.int32)
    self._pairs = [framing.Pair(prompt, empty) for prompt in prompts]
    self._sampling = recipe.Sampling(arguments.samples, arguments.tokens, 1.0)
    records = record_sets.RecordSet.__new__(record_sets.RecordSet)
    records.framing = gemma_ids.FRAMING
    records.spec = record_sets.RecordSpec(
      '', 'train', 'pairs', arguments.prompt_tokens, arguments.tokens
    )
    self._lengths = records.spec.lengths
    self._trainer = self._start(conftest.make_loss('dpo'))
    self._sampler = rollouts.Sampler(
      self._trainer.where,
      records,
      vocabulary_pair.open_vocabulary('bytes'),  # Not read.
      self._sampling,
      seed=0,
    )

  def _start(self, loss: Any) -> conftest.Trainer:
    """Starts a job; its model then samples."""
    schedule = schedules.ScheduleConfig('constant', RATE, 0)
    trainer = conftest.Trainer(
      loss=loss,
      models=dict.fromkeys(loss.references, self._model),
      optimizer=optimizers.OptimizerConfig('adamw', schedule),
      model=self._model,
      axes=policy_recipe.AXES,
    )
    place = functools.partial(trainer.where.place, lambda x: x, self._params)
    self._state = trainer.init(place())
    self._references = {name: place() for name in loss.references}
    return trainer

  def _update(self, trainer: conftest.Trainer, batch: framing.Batch) -> float:
    """Updates the model; returns the loss."""
    self._state, metrics = trainer.step(self._state, batch, self._references)
    return float(metrics['loss'])

  def dpo(
    self, prompts: np.ndarray, answers: np.ndarray
  ) -> Callable[[], float]:
    """Returns a step of DPO on prompts [P, S] and answers [P, 2, T]."""
    rows = [
      preferences.ROWS.frame(
        [preferences.Preference(prompt, *pair)],
        self._lengths,
        gemma_ids.FRAMING,
        teacher=True,
      )
      for prompt, pair in zip(prompts, answers, strict=True)
    ]
    batch = framing.stack_rows(rows)
    return functools.partial(self._update, self._trainer, batch)

  def _sample(self) -> rollouts.Samples:
    rows = range(len(self._pairs))
    return self._sampler(self._state.params, self._pairs, rows, 0)

  def count(self) -> int:
    """Samples completions; returns the number of tokens."""
    return int(self._sample().counts.sum())

  def grpo(self, rewards: np.ndarray) -> Callable[[], float]:
    """Returns a step of GRPO with rewards [P, G]."""
    trainer = self._start(conftest.make_loss(GRPO))
    rows = policy_recipe.CompletionRows(
      row_fields.PAIRS,
      self._lengths,
      self._sampling.samples,
      self._sampling.tokens,
      policy_recipe.AXES,
    )

    def run() -> float:
      samples = self._sample()
      groups = [
        [
          [pair._replace(targets=samples.completion(i, j))]
          for j in range(self._sampling.samples)
        ]
        for i, pair in enumerate(self._pairs)
      ]
      batch = rows.of_groups(groups, gemma_ids.FRAMING, teacher=True)
      batch |= {'rewards': rewards, 'sampler_log_probs': samples.log_probs}
      return self._update(trainer, batch)

    return run


if __name__ == '__main__':
  main()
