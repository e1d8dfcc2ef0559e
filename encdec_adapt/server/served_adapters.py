"""Opens and reads adapters over the served model.

Must not import the HTTP application.
"""

from collections import Counter
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax.numpy as jnp

from encdec_adapt.base import errors
from encdec_adapt.generation import model_in_memory
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import model_config
from encdec_adapt.stored import model_on_disk
from encdec_adapt.training import state as state_lib


def open_runs(
  base: model_on_disk.StoredModel, runs: Sequence[str]
) -> dict[str, model_on_disk.StoredModel]:
  """Opens runs of adapters over a model.

  Args:
    base: the model.
    runs: runs of adapters, or RUN@STEP.

  Returns:
    The name of each run (`model_on_disk.title`) -> the run.

  Raises:
    UserError: a run has no adapters or another base, or two names are equal.
  """
  names = [model_on_disk.title(run) for run in runs]
  counts = Counter([model_on_disk.title(base.name), *names])
  for run, name in zip(runs, names, strict=True):
    if counts[name] > 1:
      raise errors.UserError(
        f'--adapters has {run}, and requests name it {name!r}, as they name'
        ' the checkpoint or another run; rename its folder.'
      )
  opened = {}
  for run, name in zip(runs, names, strict=True):
    opened[name] = stored = model_on_disk.open_model(run)
    if not stored.adapters or stored.base.digest != base.digest:
      raise errors.UserError(
        f'--adapters has {run}, which is not a run of adapters over'
        f' {base.path}; give runs with config.train.lora.rank above 0 that have'
        ' that base.'
      )
  return opened


def read(
  loaded: model_in_memory.LoadedModel, stored: model_on_disk.StoredModel
) -> Any:
  """Reads adapters over a loaded model; see `decoding.with_adapters`.

  Args:
    loaded: the base.
    stored: the run of adapters, see `open_runs`.

  Returns:
    The parameters, for `LoadedModel.engine`.

  Raises:
    UserError: a parameter has another shape.
  """
  adapters = adapters_lib.Adapters(loaded.config, stored.adapters.options)
  # Reward models have another head; tables may have other padding.
  if differing := dict(adapters.table.items() ^ stored.adapters.table.items()):
    raise errors.UserError(
      f'--adapters has {stored.name}, whose {min(differing)} differs from that'
      f' of adapters over {loaded.stored.path}; serve the run as --checkpoint.'
    )
  if differing := model_config.differences(stored.model, loaded.config):
    raise errors.UserError(
      f'--adapters has {stored.name}, which was trained with other settings'
      f' than {loaded.stored.path}: {"; ".join(differing)}; serve the run as'
      ' --checkpoint.'
    )
  placement = dataclasses.replace(loaded.placement, adapters=adapters)
  trained = {
    path: model_on_disk.place(array, placement.parameters[path], jnp.float32)
    for path, array in stored.trained().items()
  }
  base = state_lib.unflatten(dict.fromkeys(adapters.frozen))
  return placement.attach(base, state_lib.unflatten(trained))
