"""The jitted training step: gradient accumulation, clipping, guarded update.

`phases` selects the trained parameters, and `losses` computes the loss: the
step is independent of architectures and objectives.
"""

from collections.abc import Callable, Mapping
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import optax

from encdec_adapt.models import base_model, build
from encdec_adapt.ops import partition
from encdec_adapt.sharding import compiler
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.training import offload, optimizers, schedules
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.recipes import recipe as recipe_lib

Batch = Mapping[str, Array]
Metrics = dict[str, Array]
_ADAPTERS = 1 << 16  # Folded into the key of adapters' dropout.
StepFunction = Callable[..., tuple[state_lib.TrainState, Metrics]]


def make_train_step(
  placement: state_lib.Placement,
  recipe: recipe_lib.Recipe,
  models: Mapping[str, build.Model],
  optimizer: optimizers.Optimizer,
  schedule: schedules.Schedule,
  trainable: state_lib.Groups,
  abstract: state_lib.TrainState,
  microbatches: int = 1,
  dropout: float = 0.0,
) -> StepFunction:
  """Builds `step(state, batch, references, base) -> (state, metrics)`.

  `references` are the parameters of the frozen models, by name, and `base` the
  parameters of the frozen base, {} without adapters. Gradients are computed
  only for parameters of trainable groups. The state is donated. The loss is
  divided by the divisors of the global batch, over microbatches and hosts.

  Args:
    placement: model, mesh and rules of the trained model.
    recipe: the kind of training.
    models: frozen models of the loss, by name.
    optimizer: the optimizer of every group.
    schedule: (step, group count) -> learning rate.
    trainable: parameter paths of the trainable groups.
    abstract: shapes and shardings of the state in this phase.
    microbatches: number of gradient accumulation steps.
    dropout: dropout rate; if above 0, the state has the key of the masks of
      every step and microbatch.

  Returns:
    The jitted function. Metrics are scalars, float32 except for int32 counts:
    metrics of the loss, `tokens` (of both sides, without padding), `padding`
    (fraction of the positions), `gradient_norm` (before clipping),
    `learning_rate/<group>`, `skipped` and `skipped_in_row`.
  """
  loss, axes = recipe.loss, recipe.rows.axes
  options = {}
  if recipe.rows.compared:  # The loss itself splits the batch.
    options, microbatches = {'parts': microbatches}, 1

  def step(state, batch, references, base):
    # Inside the traced function: constraints look up the mesh while tracing.
    with partition.use(placement.mesh, placement.rules.as_dict()):
      flat = state_lib.flatten(state.params)
      trained = {p: flat[p] for paths in trainable.values() for p in paths}
      frozen = {p: leaf for p, leaf in flat.items() if p not in trained}
      divisors = loss_lib.divisors_of(loss, batch)
      read = {
        name: loss_lib.Frozen(models[name], references[name])
        for name in loss.references
      }

      def loss_and_terms(trained, part, key):
        # With divisors of the global batch, gradients of microbatches of
        # unequal weight add up to the batch's gradient.
        params = state_lib.unflatten({**frozen, **trained})
        masks = base_model.Dropout(dropout, key) if dropout else None
        # Models fold in stack numbers, which are smaller.
        key = None if key is None else jax.random.fold_in(key, _ADAPTERS)
        params = placement.attach(base, params, key)
        terms = loss_lib.sums(
          loss, placement.model, params, part, read, masks, **options
        )
        return loss.objective(terms, divisors), terms

      keys = None
      if state.dropout_key is not None:
        # The state's key is constant, so resumed and uninterrupted jobs draw
        # the same masks.
        key = jax.random.fold_in(state.dropout_key, state.step)
        keys = jax.random.split(key, microbatches)
      shardings = {path: placement.parameters[path] for path in trained}
      gradients, terms = _accumulate(
        loss_and_terms, trained, batch, keys, microbatches, shardings, axes
      )
      gradients, norm = _clip(gradients, optimizer.config.clip_norm)
      new_state, rates = _apply(
        state,
        flat,
        gradients,
        norm,
        trainable,
        optimizer,
        schedule,
        placement,
      )
    tokens, positions = _tokens(batch)
    progress = {
      'tokens': tokens,
      'padding': 1 - tokens / positions,
      'gradient_norm': norm,
      'skipped': new_state.skipped,
      'skipped_in_row': new_state.skipped_in_row,
    }
    return new_state, {
      **loss_lib.averages(loss, terms, divisors),
      **progress,
      **rates,
    }

  # Explicit shardings: the output state is the next input, and must not cause
  # resharding or recompilation. Batches, references and base (None) keep
  # theirs. Metrics are replicated because every process reads them.
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  return jax.jit(
    step,
    in_shardings=(shardings, None, None, None),
    out_shardings=(shardings, placement_lib.replicated(placement.mesh)),
    donate_argnums=0,
    compiler_options=compiler.options(placement.mesh),
  )


def _clip(gradients, largest):
  """Clips gradients to a global norm; also returns the unclipped norm."""
  norm = optax.global_norm(gradients)
  if largest:
    # The floor avoids 0 / 0 for zero gradients.
    scale = jnp.minimum(1.0, largest / jnp.maximum(norm, 1e-12))
    gradients = jax.tree.map(lambda g: g * scale, gradients)
  return gradients, norm


def _tokens(batch):
  sides = ('encoder_segments', 'decoder_segments')
  segments = [batch[side] for side in sides if side in batch]
  return sum(jnp.sum(x > 0) for x in segments), sum(x.size for x in segments)


def _accumulate(
  loss_and_terms, trained, batch, keys, microbatches, shardings, axes
):
  """Accumulates gradients and losses over microbatches, in float32.

  `keys` is an array with one random key per microbatch, or None.

  The accumulator is sharded like the parameters: gradients of a microbatch are
  reduce-scattered before they are added.
  """
  grad = jax.grad(loss_and_terms, has_aux=True)
  if microbatches == 1:
    return grad(trained, batch, None if keys is None else keys[0])

  def place(gradients, sums):
    return jax.lax.with_sharding_constraint(gradients, shardings), sums

  def add(total, part_and_key):
    part, key = part_and_key
    names = placement_lib.batch_axes(part, axes)
    # The split may lose the sharding of the rows.
    part = {k: partition.shard(v, *names[k]) for k, v in part.items()}
    result = place(*grad(trained, part, key))
    return place(*jax.tree.map(jnp.add, total, result)), None

  split = functools.partial(partition.split_rows, parts=microbatches)
  parts = {name: split(value) for name, value in batch.items()}, keys
  first = jax.tree.map(lambda x: x[0], parts)
  # Start from zeros: starting from the first microbatch would compile the
  # forward and backward pass twice.
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(grad, trained, *first)
  )
  return jax.lax.scan(add, place(*zeros), parts)[0]


def _apply(
  state, flat, gradients, norm, trainable, optimizer, schedule, placement
):
  """Updates all trainable groups, or none if a gradient is not finite."""
  # The norm is global: it is non-finite if any gradient is, and equal on all
  # processes.
  finite = jnp.isfinite(norm)
  rates, groups, params = {}, {}, dict(flat)

  def update(rate, gradients, group, old):
    # Select inside the update: only here is offloaded state in device memory.
    # The count is kept too, so a skipped update is no step of the warm-up.
    new = optimizer.update(gradients, group, old, rate)
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (old, group))

  for name, paths in trainable.items():
    group = state.groups[name]
    rate = rates[f'learning_rate/{name}'] = schedule(state.step, group.count)
    arguments = (
      {path: gradients[path] for path in paths},
      group,
      {path: flat[path] for path in paths},
    )
    run = functools.partial(update, rate)
    if optimizer.config.offload:
      kind = optimizer.config.kind
      new, groups[name] = offload.update(run, *arguments, kind, placement)
    else:
      new, groups[name] = run(*arguments)
    params.update(new)
  bad = jnp.where(finite, 0, 1).astype(jnp.int32)
  new_state = state.replace(
    step=state.step + 1,
    params=state_lib.unflatten(params),
    groups={**state.groups, **groups},
    skipped=state.skipped + bad,
    skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
  )
  return new_state, rates


def place_batch(
  batch: Mapping[str, Any],
  placement: state_lib.Placement,
  axes: placement_lib.BatchAxes = types.MappingProxyType({}),
) -> dict[str, Array]:
  """Assembles global sharded arrays from each process's rows.

  Args:
    batch: rows of this process's devices for every field, in the order of
      `placement.RowShards.rows`.
    placement: mesh and rules.
    axes: logical axes of batch fields, see `placement.batch_axes`.

  Raises:
    ValueError: rows or length do not divide over the mesh.
  """
  mesh, rules = placement.mesh, placement.rules
  shards = placement_lib.row_shards(mesh, rules)
  sizes = {name: shards.shard_rows(len(x)) for name, x in batch.items()}
  shapes = {
    name: jax.ShapeDtypeStruct(
      (sizes[name] * shards.total, *value.shape[1:]), value.dtype
    )
    for name, value in batch.items()
  }
  shardings = placement_lib.batch_sharding(mesh, rules, shapes, axes)

  def read_shard(name, index):
    rows, *columns = index
    # The slice of an unsharded axis has no start. `batch` has only the rows of
    # this process's shards, so map the global start to a local start.
    start = shards.indices.index((rows.start or 0) // sizes[name]) * sizes[name]
    return batch[name][(slice(start, start + sizes[name]), *columns)]

  return {
    name: jax.make_array_from_callback(
      shape.shape, shardings[name], functools.partial(read_shard, name)
    )
    for name, shape in shapes.items()
  }
