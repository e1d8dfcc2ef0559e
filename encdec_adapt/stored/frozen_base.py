"""The frozen base of an adapter job, and the initial adapters.

The base is a model on disk, or the base of a run with adapters to train
further. Parameters are read in sequence, so that a device holds at most one
parameter of a quantized base in float32.
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
    source: the opened base, or the part of it used by the model.
    placement: the trained model and its mesh, with the adapters.
  """

  source: model_on_disk.StoredModel
  placement: state_lib.Placement

  def describe(self) -> dict[str, str]:
    """Returns the base's name and digest, for checkpoints."""
    return {'name': self.source.full_name, 'digest': self.source.digest}

  def read(self) -> dict[str, Any]:
    """Reads the frozen parameters, nested, sharded and possibly quantized."""
    placement, arrays, base = self.placement, self.source.arrays(), {}
    dtype = placement.model.compute.dtype
    shardings = dataclasses.replace(placement, adapters=None).parameters
    for path, shape in state_lib.flatten(placement.abstract_base()).items():
      # Only quantization needs a float32 copy.
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
    """Returns the initial adapters, nested.

    Args:
      source: the stored model, or a run of adapters over it.
      seed: seed of new adapters and of a new head; None to omit adapters with
        a zero update.
    """
    placement, rng, params = self.placement, jax.random.key(seed or 0), {}
    arrays = source.trained() if source.adapters else self.source.arrays()
    if seed is not None and not source.adapters:
      params = state_lib.flatten(placement.place(placement.adapters.init, rng))
    params |= model_on_disk.read_or_draw(arrays, placement, rng)
    return state_lib.unflatten(params)

  def shares(self, source: model_on_disk.StoredModel) -> bool:
    """Returns whether a model is the base, or has similar adapters over it."""
    theirs, ours = source.adapters, self.placement.adapters
    if (source.base or source).digest != self.source.digest:
      return False
    return theirs is None or _are_alike(theirs, ours)


def open_base(
  source: model_on_disk.StoredModel, placement: state_lib.Placement
) -> FrozenBase:
  """Returns the base of adapters initialized from a source.

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
  """Opens the base of a checkpoint of adapters.

  Args:
    saved: metadata of the checkpoint.
    moved: `config.init.encoder`, the new name of a moved base.
    placement: the trained model and its mesh, with the adapters.

  Raises:
    UserError: the base is missing or has changed, or further steps would
      interpret the adapters differently.
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
