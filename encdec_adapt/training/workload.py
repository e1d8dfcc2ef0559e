"""Work of a program: passes of stacks over rows, divided over devices."""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools

import jax.numpy as jnp

from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import execution, model_config
from encdec_adapt.objectives import framing
from encdec_adapt.ops import partition
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.recipes import recipe as recipe_lib
from encdec_adapt.training.sections import train_section


@dataclasses.dataclass(frozen=True)
class StackPass:
  """A pass of a stack over rows.

  Attributes:
    stack: configuration of the stack.
    length: computed positions of a row.
    keys: positions visible to self-attention; more than `length` with a cache.
    inputs: positions of the inputs, read by cross-attention or as the prefix
      of the row (prefix decoder); or 0.
    trained: whether a backward pass follows.
    answers: computed rows per row of the batch.
  """

  stack: model_config.StackConfig
  length: int
  keys: int
  inputs: int
  trained: bool
  answers: int = 1

  @property
  def source_length(self) -> int:
    """Positions read by cross-attention, or 0."""
    return self.inputs * (self.stack.cross_width is not None)

  def flops(self, formula: Callable[..., int]) -> int:
    """Returns FLOPs per row of the batch with a `forward_flops` function."""
    row = formula(self.stack, self.length, source_length=self.inputs)
    return self.answers * row


@dataclasses.dataclass(frozen=True)
class Workload:
  """Work of one execution of a program: the passes of its stacks.

  Attributes:
    partition: partition of the program on its mesh.
    models: shapes of the models: the job's model, then the frozen models.
    compute: section `compute` of the configuration.
    lengths: tokens of a row; for decoding, cache positions.
    rows: rows of the global batch.
    answers: answers per row.
    chunk: tokens per chunk of logits.
    trains: whether it is a training step.
    decodes: whether it is a decoding step.
    parts: number of microbatches.
    caches: whether microbatches are recomputed for the gradients of a loss over
      the whole batch (gradient caching, `training.losses.infonce`).
    texts: texts per row of an embedding model.
    adapters: adapters over a frozen base; None for full training.
  """

  partition: partition.Partition
  models: tuple[model_config.ModelConfig, ...]
  compute: execution.ComputeConfig
  lengths: framing.Lengths
  rows: int
  answers: int
  chunk: int
  trains: bool = False
  decodes: bool = False
  parts: int = 1
  caches: bool = False
  texts: int = 0
  adapters: adapters_lib.Adapters | None = None

  @property
  def references(self) -> tuple[model_config.ModelConfig, ...]:
    """Shapes of the frozen models."""
    return self.models[1:]

  @property
  def item(self) -> int:
    """Bytes of a number in the compute dtype."""
    return jnp.dtype(self.compute.dtype).itemsize

  @property
  def by_rows(self) -> int:
    """Number of shards of the batch axis."""
    return self.partition.size('batch')

  @property
  def by_length(self) -> int:
    """Number of shards of the length axis."""
    # Decoding computes one token per row: there is no length to shard.
    return 1 if self.decodes else self.partition.size('length')

  @property
  def by_tensor(self) -> int:
    """Number of shards of heads and feed-forward layers."""
    return self.partition.size('mlp')

  @property
  def exchange(self) -> tuple[str, ...]:
    """Mesh axes that shard both the table and the tokens."""
    return self.partition.common(partition.TOKENS, ['vocab'])

  @functools.cached_property
  def passes(self) -> tuple[StackPass, ...]:
    """Passes of all stacks, references last."""
    return tuple(self._passes())

  def _passes(self) -> Iterator[StackPass]:
    lengths = self.lengths
    if self.decodes:
      stack = self.models[0].decoder
      source = lengths.encoder * (stack.cross_width is not None)
      yield StackPass(stack, 1, lengths.decoder, source, False)
      return
    for i, model in enumerate(self.models):
      trained = self.trains and not i
      for name, side in model.architecture.sides(lengths.encoder > 0).items():
        stack, length = model.stacks[name], getattr(lengths, side)
        # The encoder reads the prompt once for all answers.
        answers = 1 if side == 'encoder' else self.answers
        yield StackPass(
          stack, length, length, lengths.encoder, trained, answers
        )

  @property
  def trained(self) -> list[StackPass]:
    """Passes with a backward pass."""
    return [p for p in self.passes if p.trained]

  @property
  def busy(self) -> int:
    """Number of devices with distinct work; others replicate it."""
    return self.by_rows * self.by_length * self.by_tensor

  @property
  def device_rows(self) -> float:
    """Rows of the batch per device."""
    return self.rows / self.by_rows / self.by_length

  def tokens(self, stack_pass: StackPass) -> float:
    """Returns the positions of a microbatch per device."""
    rows = self.device_rows / self.parts * stack_pass.answers
    return rows * stack_pass.length


def of_step(
  placement: state_lib.Placement,
  recipe: recipe_lib.Recipe,
  train: train_section.TrainConfig,
  references: Iterable[model_config.ModelConfig],
) -> Workload:
  """Returns the work of a training step.

  Args:
    placement: the trained model and its mesh.
    recipe: the kind of training.
    train: section `train` of the configuration.
    references: shapes of the frozen models.
  """
  model, rows = placement.model, recipe.rows
  return Workload(
    partition=placement.rules.on(placement.mesh),
    models=(model.config, *references),
    compute=model.compute,
    lengths=rows.lengths,
    rows=train.batch_size,
    answers=rows.answers,
    chunk=recipe.loss.chunk,
    trains=True,
    parts=train.microbatches,
    caches=rows.compared and train.microbatches > 1,
    texts=rows.fields.texts,
    adapters=placement.adapters,
  )
