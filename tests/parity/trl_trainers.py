"""TRL's trainers on stored tokens: a CPU, fp32, a step at a time.

Needs torch, transformers and trl.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

# A prompt and its completions, as token ids with BOS and ends.
Group = tuple[list[int], list[list[int]]]


class _Steps:
  """What makes a trainer run single steps."""

  rows: list[dict[str, Any]]  # A batch.
  optimizer: torch.optim.Optimizer

  def step(self) -> float:
    """Updates the model by a batch; returns the loss."""
    self.current_gradient_accumulation_steps = 1
    inputs = self.data_collator(self.rows)
    loss = self.training_step(self.model, inputs, None)
    if self.args.max_grad_norm:
      parameters = self.model.parameters()
      torch.nn.utils.clip_grad_norm_(parameters, self.args.max_grad_norm)
    self.optimizer.step()
    self.optimizer.zero_grad(set_to_none=True)
    return float(loss)


class Dpo(_Steps, trl.DPOTrainer):
  """Direct preference optimisation of tokens."""

  config = trl.DPOConfig

  def _prepare_dataset(self, dataset, *_):
    return dataset


class _Policy(_Steps):
  """A trainer of prompts that are tokens."""

  groups: Sequence[Group]

  def _tokenize_prompts(self, prompts):
    return [self.groups[int(prompt)][0] for prompt in prompts], None, {}


class SamplingGrpo(_Policy, trl.GRPOTrainer):
  """Group-relative policy optimisation."""

  config = trl.GRPOConfig


class Grpo(SamplingGrpo):
  """The same on stored completions."""

  def _generate_single_turn(self, *_):
    return [ids for _, group in self.groups for ids in group], None


class Rloo(_Policy, trl.RLOOTrainer):
  """REINFORCE leave-one-out on stored completions."""

  config = trl.RLOOConfig

  def _generate_single_turn(self, *_):
    return [ids for _, group in self.groups for ids in group]


def make(
  kind: type,
  folder: pathlib.Path,
  groups: Sequence[Group],
  rewards: Sequence[float] = (),
  **options: Any,
) -> Any:
  """Makes a trainer of one of the classes, without an optimizer.

  Args:
    kind: the class.
    folder: folder of policy and reference.
    groups: prompts with chosen and rejected answer, or with completions,
      which are not read where they are sampled.
    rewards: rewards of the completions.
    **options: options of the trainer's config.
  """
  completions = sum(len(group) for _, group in groups)
  arguments = {
    'model': str(folder),
    'processing_class': _tokenizer(folder),
    'args': kind.config(
      output_dir=str(folder / 'trl'),
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      disable_dropout=True,
      report_to='none',
      model_init_kwargs={'attn_implementation': 'eager', 'dtype': 'float32'},
      per_device_train_batch_size=completions,
      **options,
    ),
  }
  if kind is Dpo:
    names = ('prompt_ids', 'chosen_ids', 'rejected_ids')
    rows = [dict(zip(names, (x, *y), strict=True)) for x, y in groups]
  else:
    rows = [{'prompt': str(i)} for i, x in enumerate(groups) for _ in x[1]]
    arguments['reward_funcs'] = lambda **_: list(rewards)
  trainer = kind(train_dataset=datasets.Dataset.from_list(rows), **arguments)
  trainer.rows, trainer.groups = rows, groups
  return trainer


def _tokenizer(folder: pathlib.Path) -> Any:
  """Returns a tokenizer of names of ids, of which no text is read."""
  size = transformers.AutoConfig.from_pretrained(folder).vocab_size
  names = {f't{i}': i for i in range(size)}
  model = tokenizers.models.WordLevel(names, unk_token='t3')
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(model),
    pad_token='t0',
    eos_token='t1',
    bos_token='t2',
    unk_token='t3',
  )
