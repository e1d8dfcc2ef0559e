"""The frozen base of a job that trains adapters, and what they start from.

The base is a model on disk, or that of a run of adapters, which are trained
further. It is read parameter by parameter: of a quantised base a device holds
a single one in float32 at a time.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from encdec_adapt.base import errors, keys
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.stored import model_on_disk
from encdec_adapt.training import state as state_lib


@dataclasses.dataclass(frozen=True)
class FrozenBase:
  """The base of adapters.

  Attributes:
    source: the opened base, or the part of it that the model starts from.
    placement: the trained model and its mesh, with the adapters.
  """

  source: model_on_disk.StoredModel
  placement: state_lib.Placement

  def describe(self) -> dict[str, str]:
    """Returns the base's name and digest, for checkpoints."""
    return {'name': self.source.full_name, 'digest': self.source.digest}

  def read(self) -> dict[str, Any]:
    """Reads the frozen parameters as they are held, nested and sharded."""
    placement, arrays, base = self.placement, self.source.arrays(), {}
    dtype = placement.model.compute.dtype
    shardings = dataclasses.replace(placement, adapters=None).parameters
    for path, shape in state_lib.flatten(placement.abstract_base()).items():
      # Without a float32 copy, unless it is quantised from it.
      stored = getattr(shape, 'dtype', np.float32)
      array = model_on_disk.place(arrays[path], shardings[path], stored)
      base[path] = jax.jit(
        functools.partial(placement.adapters.freeze, path, dtype=dtype),
        out_shardings=jax.tree.map(lambda x: x.sharding, shape),
      )(array)
    return state_lib.unflatten(base)

  def start(
    self, source: model_on_disk.StoredModel, seed: int | None = None
  ) -> dict[str, Any]:
    """Returns what the adapters start from, nested.

    Args:
      source: the stored model, or a run of adapters over it.
      seed: seed of new adapters and of a new head; None to leave out adapters
        whose update is zero.
    """
    placement, rng, params = self.placement, jax.random.key(seed or 0), {}
    arrays = source.trained() if source.adapters else self.source.arrays()
    if seed is not None and not source.adapters:
      params = state_lib.flatten(placement.place(placement.adapters.init, rng))
    params |= model_on_disk.read_or_draw(arrays, placement, rng)
    return state_lib.unflatten(params)

  def shares(self, source: model_on_disk.StoredModel) -> bool:
    """Returns whether a model is the base, or adapters like these over it."""
    theirs, ours = source.adapters, self.placement.adapters
    if (source.base or source).digest != self.source.digest:
      return False
    return theirs is None or _are_alike(theirs, ours)


def open_base(
  source: model_on_disk.StoredModel, placement: state_lib.Placement
) -> FrozenBase:
  """Returns the base of the adapters that start from a source.

  Raises:
    UserError: adapters of the source differ from those of the job.
  """
  if source.adapters and not _are_alike(source.adapters, placement.adapters):
    raise errors.UserError(
      f'{adapters_lib.LABEL} is {placement.adapters.options}, and the'
      f' adapters {source.name} are {source.adapters.options}; give their'
      ' options, or start from what `convert merge-lora` makes of them.'
    )
  target = placement.model.config
  base = model_on_disk.view_for(source.base or source, target)
  return FrozenBase(base, placement)


def reopen(
  saved: Mapping[str, Any], moved: str, placement: state_lib.Placement
) -> FrozenBase:
  """Opens the base that a checkpoint of adapters was trained over.

  Args:
    saved: metadata of the checkpoint.
    moved: `config.init.encoder`, which names the base if it was moved.
    placement: the trained model and its mesh, with the adapters.

  Raises:
    UserError: it is missing or was changed, or the adapters would have another
      meaning in steps from here on.
  """
  ours, target = placement.adapters, placement.model.config
  options = keys.make(adapters_lib.Options, saved['config']['train']['lora'])
  theirs = adapters_lib.Adapters(ours.model, options)
  if not _are_alike(theirs, ours) or options.base != ours.options.base:
    raise errors.UserError(
      f'{adapters_lib.LABEL} is {ours.options}, and the checkpoint was'
      f' trained with {options}; set it back, or start in another'
      ' --workdir.'
    )
  return FrozenBase(
    model_on_disk.open_base(saved['base'], moved, target), placement
  )


def _are_alike(a: adapters_lib.Adapters, b: adapters_lib.Adapters) -> bool:
  return a.table == b.table and a.options.scale == b.options.scale
