"""What a program of a job works on, by shapes: which stacks read how much.

`planning.shapes` makes memory and time of it, `planning.exchanges` what
devices send.
"""

from collections.abc import Iterator
import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import Mesh

from encdec_adapt import config as config_lib
from encdec_adapt.models import model_config
from encdec_adapt.planning import programs


@dataclasses.dataclass(frozen=True)
class Read:
  """A stack that reads rows.

  Attributes:
    stack: its shape.
    length: positions of a row that it computes.
    keys: positions that its self-attention may see: more where a cache has
      the others.
    source_length: of what its cross-attention reads, or 0.
    trained: whether a backward pass follows.
  """

  stack: model_config.StackConfig
  length: int
  keys: int
  source_length: int
  trained: bool


@dataclasses.dataclass(frozen=True)
class Shares:
  """How many devices share what.

  Attributes:
    rows: a batch.
    length: a row.
    tensor: heads and feed-forward.
    vocabulary: the table.
    exchange: the table, of those that hold other tokens.
  """

  rows: int
  length: int
  tensor: int
  vocabulary: int
  exchange: int

  @classmethod
  def of(cls, settings: config_lib.Settings, mesh: Mesh) -> 'Shares':
    """Reads the rules."""
    rules = settings.rules.as_dict()

    def size(axes):
      """Devices along mesh axes."""
      return math.prod(mesh.shape[axis] for axis in axes)

    tokens = (*rules['batch'], *rules['length'])
    return cls(
      rows=size(rules['batch']),
      length=size(rules['length']),
      tensor=size(rules['mlp']),
      vocabulary=size(rules['vocab']),
      exchange=size(a for a in tokens if a in rules['vocab']),
    )


@dataclasses.dataclass(frozen=True)
class Workload:
  """One run of a program.

  Attributes:
    name: of the program, in `programs.PROGRAMS`.
    settings: of the job.
    shares: on its mesh.
    reads: every stack that reads, the teacher's last.
    rows: of the batch, on all devices.
    parts: microbatches.
    taught: whether there is a teacher.
  """

  name: str
  settings: config_lib.Settings
  shares: Shares
  reads: tuple[Read, ...]
  rows: int
  parts: int
  taught: bool

  @property
  def trains(self) -> bool:
    """Whether parameters move."""
    return self.name == 'train'

  @property
  def itemsize(self) -> int:
    """Bytes of a number of what is computed in."""
    return jnp.dtype(self.settings.compute.dtype).itemsize

  @property
  def logits(self) -> Read:
    """The stack of whose states logits are formed."""
    decoder = self.settings.model.decoder
    return next(read for read in self.reads if read.stack is decoder)

  def tokens(self, read: Read) -> float:
    """Positions of one microbatch on one device."""
    rows = self.rows / self.shares.rows / self.parts
    return rows * read.length / self.shares.length


def of(
  name: str, settings: config_lib.Settings, mesh: Mesh, taught: bool
) -> Workload:
  """The workload of a program.

  Args:
    name: in `programs.PROGRAMS`.
    settings: of the job.
    mesh: of its devices.
    taught: whether training has a teacher.
  """
  shares, train = Shares.of(settings, mesh), settings.train
  if name == 'decode':
    # One token of every row: there is no length to share.
    shares = dataclasses.replace(shares, length=1)
  taught &= name == 'train'
  return Workload(
    name=name,
    settings=settings,
    shares=shares,
    reads=tuple(_reads(name, settings, taught)),
    rows=train.batch_size if name == 'train' else train.eval_batch_size,
    parts=train.microbatches if name == 'train' else 1,
    taught=taught,
  )


def _reads(name, settings, taught: bool) -> Iterator[Read]:
  lengths, model = settings.data.train.lengths, settings.model
  trained, decoder = name == 'train', model.decoder
  if name == 'decode':
    source = lengths.encoder if 'encoder' in model.stacks else 0
    yield Read(decoder, 1, lengths.decoder, source, False)
    return
  if 'encoder' in model.stacks:
    source = lengths.encoder
    yield Read(model.encoder, source, source, 0, trained)
    yield Read(decoder, lengths.decoder, lengths.decoder, source, trained)
  else:
    length = lengths.teacher if lengths.encoder else lengths.decoder
    yield Read(decoder, length, length, 0, trained)
  if taught:
    alone = programs.alone(decoder).decoder
    yield Read(alone, lengths.teacher, lengths.teacher, 0, False)
