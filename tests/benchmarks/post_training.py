"""Post-training against TRL on torch: the same decoder, tokens and settings.

A step of DPO; sampling completions, `--samples` of each prompt; and a step of
GRPO that samples them, reads a reference, and updates. fp32, AdamW, `--pairs`
preferences or `--prompts` prompts. Prompts and given answers have the most
tokens; compiling is left out. Both take turns. `last` is the last loss, equal
for DPO, or the number of tokens. Ratios are times as fast as TRL. Needs
`pip install -e .[peer]`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

import encdec_adapt
from encdec_adapt.data.records import record_sets
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import execution
from encdec_adapt.models import model_config as configs
from encdec_adapt.objectives import framing, preferences
from encdec_adapt.sharding import mesh, rules
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import (
  optimizers,
  phases,
  rollouts,
  schedules,
  setup,
  step,
  train_section,
)
from encdec_adapt.training.losses import policy, preference
from tests import gemma_ids
from tests.benchmarks import generation, results

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
  torch.manual_seed(0)
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    transformers.AutoModelForCausalLM.from_config(
      transformers.AutoConfig.for_model(**raw)
    ).save_pretrained(folder)
    ours = _Ours(encdec_adapt.load(folder), arguments)
    theirs = functools.partial(_theirs, trl_trainers, folder, arguments)
    dpo = theirs(trl_trainers.Dpo, ours.preferences)
    grpo = theirs(trl_trainers.SamplingGrpo, ours.prompts)
  prompts = [ids for ids, group in grpo.groups for _ in group]

  def sample() -> int:
    completions, _ = grpo._generate_single_turn(
      prompts, None, {}, arguments.samples
    )
    return sum(map(len, completions))

  rows = [
    _row('DPO step, s', ours.dpo(), dpo.step, arguments.steps),
    _row('rollout, tokens/s', ours.sample, sample, arguments.steps, rate=True),
    _row('GRPO step, s', ours.grpo(), grpo.step, arguments.steps),
  ]
  return results.report('post_training', rows, arguments)


def _row(
  task: str,
  ours: Callable[[], float],
  theirs: Callable[[], float],
  steps: int,
  rate: bool = False,
) -> dict[str, Any]:
  """Measures a task, whose calls return losses or numbers of tokens.

  Args:
    task: name of the row.
    ours: runs the task.
    theirs: the same by TRL.
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


def _theirs(trainers, folder, arguments, kind, groups) -> Any:
  """Makes a trainer of TRL's with AdamW."""
  import torch

  options = {}
  if kind is not trainers.Dpo:
    options = {
      'beta': 0.04,
      'num_generations': arguments.samples,
      'max_completion_length': arguments.tokens,
    }
  groups = [([gemma_ids.BOS, *prompt], answers) for prompt, answers in groups]
  rewards = _rewards(arguments).reshape(-1).tolist()
  trainer = trainers.make(kind, folder, groups, rewards, **options)
  trainer.optimizer = torch.optim.AdamW(
    trainer.model.parameters(),
    lr=RATE,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    fused=True,
  )
  return trainer


def _rewards(arguments) -> np.ndarray:
  """Returns rewards of completions, [P, G]."""
  shape = arguments.prompts, arguments.samples
  return np.random.default_rng(1).random(shape, np.float32)


class _Ours:
  """Our steps, as `train.py` runs them."""

  def __init__(self, loaded: Any, arguments: Any):
    self._arguments = arguments
    self._placement = setup.place_model(
      loaded.config,
      execution.ComputeConfig('float32', 'none'),
      mesh.make_mesh(mesh.MeshConfig(), jax.devices()[:1]),
      rules.RULES['fsdp'],
    )
    # Placed for each job, as the first step of one donates them.
    self._params = jax.device_get(loaded.params)
    self._lengths = framing.Lengths(arguments.prompt_tokens, arguments.tokens)
    self._sampling = train_section.TrainConfig(
      rollouts=f'samples={arguments.samples},tokens={arguments.tokens}'
    ).sampling
    records = record_sets.RecordSet.__new__(record_sets.RecordSet)
    records.framing = gemma_ids.FRAMING
    records.spec = record_sets.RecordSpec(
      '', 'train', 'pairs', arguments.prompt_tokens, arguments.tokens
    )
    vocabulary = vocabulary_pair.open_vocabulary('bytes')  # Not read.
    self._sampler = rollouts.Sampler(
      self._placement, records, vocabulary, self._sampling, seed=0
    )
    rng = np.random.default_rng(0)

    def draw(tokens: int) -> list[int]:
      return rng.integers(5, arguments.vocab_size, tokens).tolist()

    prompt, tokens = arguments.prompt_tokens - 1, arguments.tokens
    self.preferences = [
      (draw(prompt), [draw(tokens), draw(tokens)])
      for _ in range(arguments.pairs)
    ]
    group = [[]] * arguments.samples
    self.prompts = [(draw(prompt), group) for _ in range(arguments.prompts)]
    empty = np.zeros(0, np.int32)
    self._pairs = [
      framing.Pair(np.int32(ids), empty) for ids, _ in self.prompts
    ]

  def _make_step(self, loss: Any) -> Callable[[framing.Batch], float]:
    """Starts a job; returns a function that updates the model by a batch."""
    optimizer = optimizers.OptimizerConfig(
      'adamw', schedules.ScheduleConfig('constant', RATE, 0, 1000)
    )
    models = dict.fromkeys(loss.references, self._placement.model)
    loss = dataclasses.replace(loss, models=models)
    config = train_section.TrainConfig()
    axes = framing.GROUP_AXES | loss.axes
    job = phases.Phases(self._placement, loss, optimizer, config, axes)
    place = functools.partial(self._placement.place, lambda x: x, self._params)
    references = {name: place() for name in loss.references}
    self._state, train = job.create(place()), job.make_step()

    def run(rows: framing.Batch) -> float:
      batch = step.place_batch(rows, self._placement, axes)
      self._state, metrics = train(self._state, batch, references)
      return float(metrics['loss'])

    return run

  def dpo(self) -> Callable[[], float]:
    """Returns a step of DPO."""
    rows = [
      preferences.Preferences.frame(
        [preferences.Preference(*map(np.int32, (prompt, *answers)))],
        self._lengths,
        gemma_ids.FRAMING,
        teacher=True,
      )
      for prompt, answers in self.preferences
    ]
    run = self._make_step(preference.Preference(kind='dpo'))
    return functools.partial(run, framing.stack_rows(rows))

  def _sample(self) -> rollouts.Samples:
    """Samples completions of the prompts by the model of the last job."""
    rows = range(len(self._pairs))
    return self._sampler(self._state.params, self._pairs, rows, 0)

  def sample(self) -> int:
    """Samples completions; returns the number of tokens."""
    return int(self._sample().counts.sum())

  def grpo(self) -> Callable[[], float]:
    """Returns a step of GRPO."""
    loss = policy.Policy(kind=GRPO, rollouts=self._sampling)
    update, rewards = self._make_step(loss), _rewards(self._arguments)

    def run() -> float:
      samples = self._sample()
      groups = [
        [
          [framing.Pair(pair.inputs, samples.completion(i, j))]
          for j in range(self._arguments.samples)
        ]
        for i, pair in enumerate(self._pairs)
      ]
      rows = loss.make_batch(
        groups, self._lengths, gemma_ids.FRAMING, teacher=True
      )
      rows |= {'rewards': rewards, 'sampler_log_probs': samples.log_probs}
      return update(rows)

    return run


if __name__ == '__main__':
  main()
