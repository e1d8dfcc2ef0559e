"""Rewards of completions: the output of a reward model's head.

The head reads the state of a completion's last token; an encoder reads the
prompt once for all its completions. Uses neither engine nor KV cache.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.inference import lengths as lengths_lib
from encdec_adapt.inference import row_batches
from encdec_adapt.models import (
  architecture,
  base_model,
  build,
  layers,
  model_config,
)
from encdec_adapt.objectives import framing
from encdec_adapt.ops import partition
from encdec_adapt.sharding import compiler
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.tokenizers import special_ids


def score(
  model: build.Model,
  params: base_model.Params,
  groups: Sequence[Sequence[framing.Pair]],
  *,
  mesh: Mesh,
  rules: rules_lib.Rules,
  rows: int,
  ids: special_ids.Framing,
  lengths: framing.Lengths | None = None,
) -> Float[np.ndarray, 'P G']:
  """Computes the rewards of completions; all processes must call it together.

  Args:
    model: a reward model.
    params: parameters of the model.
    groups: for each of P prompts, the prompt with each of G completions: inputs
      without BOS, and targets with their end token (without it if truncated).
    mesh: mesh of the parameters.
    rules: logical axis rules.
    rows: prompts per batch, divisible by the batch shards.
    ids: special ids that frame the rows.
    lengths: fixed row lengths, so only one program is compiled: maximum prompt
      with BOS, maximum completion with BOS. By default each batch is padded to
      one of a few lengths.

  Raises:
    UserError: the model is not a reward model.
    ValueError: an example is longer than `lengths`.
  """
  require_reward_model(model.config)
  # The length of a completion with BOS is rarely divisible by a sequence axis.
  rules = dataclasses.replace(rules, length=())
  teacher = 'teacher' in model.architecture.sides(True).values()

  def run(chosen: Sequence[int]) -> np.ndarray:
    chunk = [groups[i] for i in chosen]
    sizes = zip(*(size(x, ids) for group in chunk for x in group), strict=True)
    shape = framing.Lengths(*(lengths_lib.bucket(max(n)) for n in sizes))
    # The last batch is padded with empty rows.
    filled = [[[pair] for pair in group] for group in chunk]
    filled += [[[]] * len(chunk[0])] * (rows - len(chunk))
    batch = framing.stack_rows(
      [
        framing.frame_group(x, lengths or shape, ids, teacher=teacher)
        for x in filled
      ]
    )
    scores = scorer(mesh)(model, mesh, rules, params, batch)
    return jax.device_get(scores).reshape(rows, -1)

  results = row_batches.outputs(run, range(len(groups)), rows)
  return np.array(row_batches.in_order(results))


def require_reward_model(
  config: model_config.ModelConfig, name: str = 'the model'
) -> None:
  """Checks that a model has a reward head.

  Raises:
    UserError: it has none; names the model.
  """
  if config.decoder.outputs != 1:
    raise errors.UserError(
      f'{name} is not a reward model: its head has {config.decoder.outputs:,}'
      " outputs, not 1; give a run of config.loss.kind='reward', or a folder"
      ' that was exported from such a run.'
    )


def size(pair: framing.Pair, ids: special_ids.Framing) -> tuple[int, int]:
  """Returns the framed lengths of a prompt and its completion."""
  row = framing.Lengths(1, 1, ids.encoder.frame_size)
  encoder, decoder = pair.positions(row)
  return encoder, decoder + 1


@functools.cache
def scorer(mesh: Mesh) -> Callable[..., Float[Array, 'B']]:
  """Returns the jitted scoring function for a mesh."""
  return jax.jit(
    _score,
    static_argnums=(0, 1, 2),
    compiler_options=compiler.options(mesh),
  )


def _score(
  model: build.Model,
  mesh: Mesh,
  rules: rules_lib.Rules,
  params: base_model.Params,
  batch: architecture.Batch,
) -> Float[Array, 'B']:
  with partition.use(mesh, rules.as_dict()):
    states = model.architecture.read_answers(model, params, batch)
    rewards = layers.rewards(model.head(params), states)
    return partition.shard(rewards, None)  # Every process reads it.
