"""Rewards of completions: the output of a reward model's head.

The head reads the state of a completion's last token. An encoder-decoder reads
the prompt with its encoder, once for all its completions, and BOS and the
completion with its decoder; a decoder-only model reads both in a row. Neither
engine nor cache is needed.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.inference import lengths
from encdec_adapt.models import base_model, build, layers, model_config
from encdec_adapt.ops import partition
from encdec_adapt.sharding import rules as rules_lib

Ids = Sequence[int] | np.ndarray


class _Batch(NamedTuple):
  """A padded batch of B = P * G completions, prompt by prompt.

  Attributes:
    encoder: tokens of the prompts and their number, where an encoder reads
      them.
    tokens: tokens that the decoder reads.
    counts: their number, at least 1.
    prefixes: number of them that are the prompt's.
  """

  encoder: tuple[Int[Array, 'P S'], Int[Array, 'P']] | None
  tokens: Int[Array, 'B T']
  counts: Int[Array, 'B']
  prefixes: Int[Array, 'B']


def score(
  model: build.Model,
  params: base_model.Params,
  prompts: Sequence[Ids],
  completions: Sequence[Sequence[Ids]],
  *,
  mesh: Mesh,
  rules: rules_lib.Rules,
  rows: int,
  bos: int,
  size: lengths.Size | None = None,
) -> Float[np.ndarray, 'P G']:
  """Computes the rewards of completions; every process calls it alike.

  Args:
    model: a reward model.
    params: its parameters.
    prompts: token ids of the P prompts, BOS first, as the stack that reads
      prompts has them (`Architecture.prompt_stack`).
    completions: token ids of the G completions of each prompt, with the token
      that ends them; without it for a completion that was cut short.
    mesh: mesh of the parameters.
    rules: meaning of logical axes on it.
    rows: prompts at a time; divides over the mesh.
    bos: first token of an encoder-decoder's decoder.
    size: most tokens that the decoder (prompt included where it reads it, else
      BOS) and the encoder read: all batches then have this one shape. By
      default batches of similar length are padded to a few lengths.

  Raises:
    UserError: the model is no reward model.
  """
  require_reward_model(model.config)
  # A position more than completions have is mostly no multiple of anything.
  rules = dataclasses.replace(rules, length=())
  order = list(range(len(prompts)))
  if size is None:  # The longest first, so that lack of memory shows at once.
    order.sort(key=lambda i: -len(prompts[i]) - max(map(len, completions[i])))
  rewards = np.zeros((len(prompts), len(completions[0])), np.float32)
  for start in range(0, len(order), rows):
    indices = order[start : start + rows]
    groups = [[(prompts[i], x) for x in completions[i]] for i in indices]
    batch = _frame(model, groups, rows, bos, size)
    scores = jax.device_get(_score(model, mesh, rules, params, batch))
    # The last batch is filled up with rows of padding.
    rewards[indices] = scores.reshape(rows, -1)[: len(indices)]
  return rewards


def require_reward_model(
  config: model_config.ModelConfig, name: str = 'the model'
) -> None:
  """Refuses a model without a reward head.

  Raises:
    UserError: names the model.
  """
  if config.decoder.classes != 1:
    raise errors.UserError(
      f'{name} is no reward model: its head has {config.decoder.outputs:,}'
      " outputs, not 1; give a run of config.loss.kind='reward', or a"
      ' folder that was exported from such a run.'
    )


def _frame(
  model: build.Model,
  groups: Sequence[Sequence[tuple[Ids, Ids]]],
  rows: int,
  bos: int,
  size: lengths.Size | None,
) -> _Batch:
  """Pads prompts with their completions to a batch."""
  # Framing leaves out the last token of a continuation, which predicts nothing.
  framed = [
    [model.architecture.frame(prompt, [*x, bos], bos) for prompt, x in group]
    for group in groups
  ]
  pairs = [pair for group in framed for pair in group]
  count = rows * len(framed[0])
  source, length = (size.source, size.length) if size else (None, None)
  encoder = None
  if model.architecture.encodes_prompt:
    sources = [group[0].source for group in framed]
    encoder = lengths.pad(sources, rows, width=source)
  tokens, counts = lengths.pad([x.tokens for x in pairs], count, width=length)
  prefixes = np.zeros(count, np.int32)
  prefixes[: len(pairs)] = [x.prefix for x in pairs]
  return _Batch(encoder, tokens, counts, prefixes)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
  model: build.Model,
  mesh: Mesh,
  rules: rules_lib.Rules,
  params: base_model.Params,
  batch: _Batch,
) -> Float[Array, 'B']:
  """Returns the reward of each row."""
  with partition.use(mesh, rules.as_dict()):
    positions, segments = lengths.frame(batch.tokens, batch.counts)
    fields, options = {'decoder': (batch.tokens, segments, positions)}, {}
    if batch.encoder:
      tokens, counts = batch.encoder
      positions, segments = lengths.frame(tokens, counts)
      fields['encoder'] = tokens, segments, positions
    else:
      options['prefix'] = lengths.frame(batch.tokens, batch.prefixes)[1]
    hidden = model.architecture.states(model, params, fields, **options)
    last = (batch.counts - 1)[:, None, None]
    states = jnp.take_along_axis(hidden, last, axis=1)[:, 0]  # [B, D]
    rewards = layers.rewards(model.head(params), states)
    return partition.shard(rewards, None)  # Every process reads it.
