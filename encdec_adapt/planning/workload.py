"""Work of a program of a job: passes of stacks over rows, shared by devices.

This module reads shapes and the mesh alone, and must not import `hlo` or
`plan_report`, which read compiled programs.
"""

from collections.abc import Callable, Iterator
import dataclasses

import jax.numpy as jnp

from encdec_adapt.models import model_config
from encdec_adapt.ops import partition
from encdec_adapt.planning import programs


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


class Workload:
  """Work of a single run of a program: the passes of its stacks.

  Attributes:
    job: the program, its configuration and its mesh.
    partition: partition of the job on its mesh.
    passes: passes of all stacks, those of references last.
    parts: number of microbatches.
    caches: whether they are computed again for the gradients of a loss over
      the whole batch (gradient caching, `training.losses.infonce`).
    references: shapes of the frozen models that it reads.
    item: bytes of a number in the compute dtype.
    by_rows: number of devices that share a batch by its rows.
    by_length: number of devices that share a row.
    by_tensor: number of devices that share heads and feed-forwards.
    exchange: mesh axes with devices that share the table and not the tokens.
  """

  def __init__(self, job: programs.Job):
    self.job, self.partition = job, job.program_rules.on(job.mesh)
    self.references = job.models[1:]
    self.parts = job.train.microbatches if job.trains else 1
    self.caches = job.loss.joins_rows and self.parts > 1
    self.item = jnp.dtype(job.compute.dtype).itemsize
    self.by_rows = self.partition.size('batch')
    self.by_tensor = self.partition.size('mlp')
    # Decoding computes a token of every row: there is no length to share.
    self.by_length = 1 if job.decodes else self.partition.size('length')
    self.exchange = self.partition.common(partition.TOKENS, ['vocab'])
    self.passes = tuple(self._passes())

  def _passes(self) -> Iterator[StackPass]:
    job, lengths = self.job, self.job.lengths
    if job.decodes:
      stack = job.model.decoder
      source = lengths.encoder * (stack.cross_width is not None)
      yield StackPass(stack, 1, lengths.decoder, source, False)
      return
    for model in job.models:
      trained = job.trains and model is job.model
      for name, side in model.architecture.sides(lengths.encoder > 0).items():
        stack, length = model.stacks[name], getattr(lengths, side)
        # An encoder reads the prompt of several answers once.
        answers = 1 if side == 'encoder' else job.answers
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
    return self.job.rows / self.by_rows / self.by_length

  def tokens(self, stack_pass: StackPass) -> float:
    """Returns the positions of a microbatch on a device."""
    rows = self.device_rows / self.parts * stack_pass.answers
    return rows * stack_pass.length
