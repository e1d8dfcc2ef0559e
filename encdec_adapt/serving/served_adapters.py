"""Runs of adapters over the model that a server has loaded.

Must not import the HTTP application.
"""

from collections import Counter
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax.numpy as jnp

from encdec_adapt.base import errors
from encdec_adapt.conversion import model_in_memory, model_on_disk
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.training import state as state_lib


def read(
  loaded: model_in_memory.LoadedModel, runs: Sequence[str]
) -> dict[str, Any]:
  """Reads adapters over a loaded model, for `LoadedModel.engine`.

  Args:
    loaded: the base.
    runs: runs of adapters, or RUN@STEP.

  Returns:
    The name of each run (`model_on_disk.title`) -> parameters of
    `decoding.with_adapters`.

  Raises:
    UserError: a run has no adapters or adapters of another base or shape, or
      two names are equal.
  """
  names = [model_on_disk.title(run) for run in runs]
  counts = Counter([model_on_disk.title(loaded.stored.name), *names])
  for run, name in zip(runs, names, strict=True):
    if counts[name] > 1:
      raise errors.UserError(
        f'--adapters has {run}, and requests name it {name!r}, as they name'
        ' the checkpoint or another run; rename its folder.'
      )
  return {
    name: _read_run(loaded, run) for run, name in zip(runs, names, strict=True)
  }


def _read_run(loaded: model_in_memory.LoadedModel, run: str) -> Any:
  """Reads the adapters of a run."""
  stored = model_on_disk.open_model(run)
  if not stored.adapters or stored.base.digest != loaded.stored.digest:
    raise errors.UserError(
      f'--adapters has {run}, which is not a run of adapters over'
      f' {loaded.stored.path}; give runs with config.train.lora that have that'
      ' base.'
    )
  adapters = adapters_lib.Adapters(loaded.config, stored.adapters.options)
  # A reward model has a head; tables may be padded to another multiple.
  if differing := dict(adapters.table.items() ^ stored.adapters.table.items()):
    raise errors.UserError(
      f'--adapters has {run}, whose {min(differing)} differs from that of'
      f' adapters over {loaded.stored.path}; serve the run as --checkpoint.'
    )
  placement = dataclasses.replace(loaded.where, adapters=adapters)
  trained = {
    path: model_on_disk.place(array, placement.parameters[path], jnp.float32)
    for path, array in stored.trained().items()
  }
  base = state_lib.unflatten(dict.fromkeys(adapters.frozen))
  return placement.attach(base, state_lib.unflatten(trained))
