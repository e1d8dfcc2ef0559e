"""Work of a program of a job: passes of stacks over rows, shared by devices."""

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
    length: positions of a row that it computes.
    keys: positions that its self-attention may see; more than `length` if a
      cache has the others.
    inputs: positions of the inputs that it reads beside its row
      (cross-attention) or first in it (a prefix decoder), or 0.
    trained: whether a backward pass follows.
    answers: rows that it computes for a row of the batch.
  """

  stack: model_config.StackConfig
  length: int
  keys: int
  inputs: int
  trained: bool
  answers: int = 1

  @property
  def source_length(self) -> int:
    """Positions that its cross-attention reads, or 0."""
    return self.inputs * (self.stack.cross_width is not None)

  def flops(self, formula: Callable[..., int]) -> int:
    """Returns FLOPs of a batch's row by a function of `forward_flops`."""
    row = formula(self.stack, self.length, source_length=self.inputs)
    return self.answers * row


@dataclasses.dataclass(frozen=True)
class Workload:
  """Work of a single run of a program: the passes of its stacks.

  Attributes:
    partition: partition of the program on its mesh.
    models: shapes of the models that read a batch: that of the job, then the
      frozen ones.
    compute: section `compute` of the configuration.
    lengths: tokens of a row; of decoding, its positions.
    rows: rows of a batch on all devices.
    answers: answers of a row.
    chunk: tokens whose logits are computed at a time.
    trains: whether it is a training step.
    decodes: whether it is a step of decoding.
    parts: number of microbatches.
    caches: whether they are computed again for the gradients of a loss over
      the whole batch (gradient caching, `training.losses.infonce`).
    texts: texts of a row that an embedding model compares.
    adapters: adapters that train over a frozen base; None where the model does.
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
    """Shapes of the frozen models that it reads."""
    return self.models[1:]

  @property
  def item(self) -> int:
    """Bytes of a number in the compute dtype."""
    return jnp.dtype(self.compute.dtype).itemsize

  @property
  def by_rows(self) -> int:
    """Number of devices that share a batch by its rows."""
    return self.partition.size('batch')

  @property
  def by_length(self) -> int:
    """Number of devices that share a row."""
    # Decoding computes a token of every row: there is no length to share.
    return 1 if self.decodes else self.partition.size('length')

  @property
  def by_tensor(self) -> int:
    """Number of devices that share heads and feed-forwards."""
    return self.partition.size('mlp')

  @property
  def exchange(self) -> tuple[str, ...]:
    """Mesh axes with devices that share the table and not the tokens."""
    return self.partition.common(partition.TOKENS, ['vocab'])

  @functools.cached_property
  def passes(self) -> tuple[StackPass, ...]:
    """Passes of all stacks, those of references last."""
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
        # An encoder reads the prompt of several answers once.
        answers = 1 if side == 'encoder' else self.answers
        yield StackPass(
          stack, length, length, lengths.encoder, trained, answers
        )

  @property
  def trained(self) -> list[StackPass]:
    """Passes that a backward pass follows."""
    return [p for p in self.passes if p.trained]

  @property
  def busy(self) -> int:
    """Number of devices that share the work; others repeat it."""
    return self.by_rows * self.by_length * self.by_tensor

  @property
  def device_rows(self) -> float:
    """Rows of the batch on a device."""
    return self.rows / self.by_rows / self.by_length

  def tokens(self, stack_pass: StackPass) -> float:
    """Returns the positions of a microbatch on a device."""
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
    references: shapes of the frozen models that it reads.
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
