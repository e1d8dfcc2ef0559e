"""Carries the optimizer state and step count of a source over to a new job.

If an adaptation copies all weights unchanged, the source's moments remain
valid, and the schedule continues from the source's step (Wang et al. 2022,
arXiv 2204.05832: LM adaptation, non-causal adaptation).
"""

from collections.abc import Mapping
from typing import Any

import jax

from encdec_adapt.adaptation import array_plans
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.stored import model_on_disk
from encdec_adapt.training import optimizers, phases
from encdec_adapt.training import state as state_lib

_KEY = "config.init.optimizer is 'source'"


def check(
  source: model_on_disk.StoredModel,
  placement: state_lib.Placement,
  coverage: coverage_lib.Coverage | None,
  job: phases.Phases,
) -> None:
  """Checks that the source's optimizer state fits the model; reads no array.

  Args:
    source: the only source.
    placement: the source on the job's mesh.
    coverage: how an adaptation fills every weight; None if source and model are
      the same.
    job: the phases of the job.

  Raises:
    UserError: the source is not a run, its optimizer differs, or it lacks the
      moments of a weight.
  """
  if source.checkpoint is None:
    raise errors.UserError(
      f'{_KEY}, and {source.name} is a folder of weights without an optimizer'
      " state; set it to 'fresh', or start from a run."
    )
  if coverage is None and job.placement.model.table != placement.model.table:
    raise errors.UserError(
      f'{_KEY}, and the model is a part of {source.name}, or gets a new head,'
      " which has no moments; set it to 'fresh'."
    )
  for name, fill in (coverage.filled if coverage else {}).items():
    if fill.how != 'copied' or fill.transforms:
      raise errors.UserError(
        f'{_KEY}, and {name} is {fill.describe()}: the source has no moments of'
        " it; set the key to 'fresh'."
      )
  try:
    source.checkpoint.require_same(_abstract(placement, job), partial=True)
  except errors.UserError as error:
    raise errors.UserError(
      f'{_KEY}, and the state of {source.name} is not that of config.optimizer'
      f' over all weights: {error}'
    ) from error


def read(
  source: model_on_disk.StoredModel,
  placement: state_lib.Placement,
  coverage: coverage_lib.Coverage | None,
  job: phases.Phases,
) -> Mapping[str, Any]:
  """Reads the state; arguments as for `check`.

  Returns:
    `step` and `groups` of the job's state before its first step.
  """
  abstract = job.abstract(0)
  # Both states use the name of the group of all weights.
  ((name, shape),) = abstract.groups.items()
  stored = source.checkpoint.restore(_abstract(placement, job), partial=True)
  if coverage is None:
    return stored
  plans = array_plans.make_plans(
    job.placement.model.config,
    coverage,
    dict.fromkeys(coverage.sources, source.model),
  )

  def carry(group: optimizers.GroupState) -> optimizers.GroupState:
    return jax.tree.map(
      lambda shapes, moments: (
        {path: plans[path].carry(moments, x) for path, x in shapes.items()}
        if isinstance(shapes, dict)
        else moments
      ),
      shape,
      group,
      is_leaf=lambda x: isinstance(x, dict),
    )

  shardings = jax.tree.map(lambda leaf: leaf.sharding, shape)
  group = jax.jit(carry, out_shardings=shardings)(stored['groups'][name])
  return {'step': stored['step'], 'groups': {name: group}}


def _abstract(
  placement: state_lib.Placement, job: phases.Phases
) -> dict[str, Any]:
  optimizer = optimizers.Optimizer(job.optimizer.config, placement.model.table)
  params = state_lib.flatten(placement.abstract_params())
  shape = jax.eval_shape(optimizer.init, params)
  group = jax.tree.map(
    lambda leaf, sharding: leaf.update(sharding=sharding),
    shape,
    placement.shardings(shape),
  )
  return {'step': job.abstract(0).step, 'groups': {job.groups[0].name: group}}
