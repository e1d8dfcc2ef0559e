"""`encdec_adapt.load`: a model as a Python object, for notebooks."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import os
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.conversion import kept_files, stored_model
from encdec_adapt.inference import generation, sampling
from encdec_adapt.models import build, model_config
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.tokenizers import vocabularies
from encdec_adapt.training import state as state_lib

Tokens = Int[Array, 'B L']
Mask = Bool[Array, 'B L']


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model with its parameters.

  Masks are True at tokens and False at padding; None is all True. Positions
  are 0, 1, .. from the left, padding included, as in transformers' forward
  pass.

  Attributes:
    model: functions of parameters (`models.build`).
    params: the parameters, nested, fp32.
    vocabularies: of its sides; None where there are none beside it.
    find_special_ids: finds what `special_ids` is.
  """

  model: build.Model
  params: Any
  vocabularies: vocabularies.Choice | None
  find_special_ids: Callable[[], Mapping[str, Any]]

  @property
  def config(self) -> model_config.ModelConfig:
    """Shape of the model."""
    return self.model.config

  @property
  def special_ids(self) -> Mapping[str, Any]:
    """`bos` and `pad` of the decoder, ids, and `eos`, a tuple of ids.

    As far as its vocabulary, or the config.json or generation config that it
    came with, says them.
    """
    return self.find_special_ids()

  def encode(self, tokens: Tokens, mask: Mask | None = None) -> Array:
    """The encoder's states after its final norm, [B, S, E].

    Raises:
      UserError: a decoder-only model; or as `_framed`.
    """
    self._require_encoder()
    return _encode(self.model, self.params, *self._framed(tokens, mask))

  def logits(
    self,
    decoder_tokens: Tokens,
    encoder_tokens: Tokens | None = None,
    encoder_mask: Mask | None = None,
    decoder_mask: Mask | None = None,
  ) -> Float[Array, 'B T V']:
    """Logits of the token after each decoder token, fp32.

    Args:
      decoder_tokens: as fed to the decoder, BOS first, [B, T].
      encoder_tokens: of an encoder-decoder, [B, S].
      encoder_mask: their mask.
      decoder_mask: mask of the decoder's tokens.

    Raises:
      UserError: encoder tokens are missing, there is no encoder, or both
        have not as many rows; or as `_framed`.
    """
    decoder = self._framed(decoder_tokens, decoder_mask, 'decoder')
    encoder = None
    if isinstance(self.config, model_config.EncoderDecoderConfig):
      if encoder_tokens is None:
        raise errors.UserError(
          'an encoder-decoder needs encoder_tokens beside decoder_tokens.'
        )
      encoder = self._framed(encoder_tokens, encoder_mask)
      rows = len(encoder[0]), len(decoder[0])
      if rows[0] != rows[1]:
        raise errors.UserError(
          f'encoder_tokens have {rows[0]} rows and decoder_tokens {rows[1]};'
          ' row by row they belong together.'
        )
    elif encoder_tokens is not None:
      self._require_encoder()
    return _logits(self.model, self.params, decoder, encoder)

  def generate(
    self,
    tokens: Tokens,
    mask: Mask | None = None,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    bos: int | None = None,
    eos: int | Sequence[int] | None = None,
    pad: int | None = None,
  ) -> generation.Generated:
    """Continues prompts, as `inference.generation.generate`.

    Args:
      tokens: prompts, BOS first, [B, S].
      mask: of the prompts, padded on either side.
      max_tokens: most tokens generated.
      temperature: 0 is greedy.
      top_k: only the k likeliest.
      top_p: only the likeliest that reach this probability.
      seed: of all draws.
      bos: first token of an encoder-decoder's decoder. These three are
        `special_ids` unless they are given.
      eos: token that ends a row, or several of them, any of which does.
      pad: token after the end.

    Raises:
      UserError: one of the last three is neither given nor known; or as
        `_framed`.
    """
    given = {'bos': bos, 'eos': eos, 'pad': pad}
    ids = {name: i for name, i in given.items() if i is not None}
    if len(ids) < len(given):
      ids = {**self.special_ids, **ids}
    if missing := given.keys() - ids:
      raise errors.UserError(
        'generate: there is no tokenizer beside the model that says its'
        f' special ids; give {" and ".join(sorted(missing))}.'
      )
    return generation.generate(
      self.model,
      self.params,
      *self._framed(tokens, mask, next(iter(self.config.stacks))),
      rng=jax.random.key(seed),
      max_tokens=max_tokens,
      sampling=sampling.SamplingConfig(temperature, top_k, top_p),
      bos=ids['bos'],
      eos=np.atleast_1d(ids['eos']),
      pad=ids['pad'],
    )

  def _framed(
    self, tokens: Any, mask: Any, side: str = 'encoder'
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, segments and positions of what a stack reads, [B, L] each.

    Raises:
      UserError: tokens are no integers [B, L] below the stack's vocabulary, or
        the mask is of another shape.
    """
    tokens = _tokens(tokens, self.config.stacks[side].vocab_size, side)
    if mask is None:
      mask = np.ones(tokens.shape, bool)
    mask = _array(mask, f'the mask of the {side}')
    if mask.shape != tokens.shape:
      raise errors.UserError(
        f'the mask of the {side} has the shape {list(mask.shape)}, its tokens'
        f' {list(tokens.shape)}; give one value for each token.'
      )
    segments = (jnp.asarray(mask) != 0).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return tokens, segments, positions

  def _require_encoder(self) -> None:
    if not isinstance(self.config, model_config.EncoderDecoderConfig):
      raise errors.UserError('a decoder-only model has no encoder.')


def load(
  path: str | os.PathLike[str],
  *,
  dtype=jnp.float32,
  mesh: Mesh | None = None,
  encoder_window: str | None = None,
) -> LoadedModel:
  """Loads a Hugging Face folder or the newest checkpoint of a run.

  Args:
    path: the folder.
    dtype: of activations and products.
    mesh: where parameters are sharded (`sharding.mesh.make_mesh`); None for
      this process's first device. A folder's tables are padded to divide.
    encoder_window: of the local layers of a bidirectional encoder,
      'exclusive' (the authors of T5Gemma) or 'inclusive' (transformers 5.23,
      eager). None for the rule of the run, or of a folder's config.json; a
      T5Gemma's that says none is exclusive.

  Raises:
    UserError: there is no model, it is damaged or unsupported, it does not
      divide over the mesh, or it has no such encoder.
  """
  if mesh is None:
    mesh = mesh_lib.make_mesh(
      mesh_lib.MeshConfig(), devices=jax.local_devices()[:1]
    )
  rules = rules_lib.named('fsdp')
  shards = math.prod(mesh.shape[axis] for axis in rules.vocab)
  source = stored_model.open_model(
    path,
    encoder_window=encoder_window,
    vocab_multiple=shards if shards > 1 else None,
  )
  where = state_lib.Placement(
    build.build(source.model, dtype=dtype), mesh, rules
  )
  try:
    where.parameters  # noqa: B018  Checks divisibility.
  except ValueError as error:
    raise errors.UserError(
      f'{path} cannot be loaded on this mesh: {error} Give another mesh'
      ' (`sharding.mesh.make_mesh`), or None for one device.'
    ) from error
  return LoadedModel(
    where.model,
    source.read(where),
    source.vocabularies,
    functools.partial(_special_ids, source),
  )


def _special_ids(source: stored_model.StoredModel) -> dict[str, Any]:
  opened = source.vocabularies.open() if source.vocabularies else None
  return kept_files.special_ids(kept_files.folders(source.path), opened)


def _array(values: Any, what: str) -> np.ndarray | jax.Array:
  """An array; refuses rows of different lengths."""
  if isinstance(values, jax.Array):
    return values
  try:
    return np.asarray(values)
  except ValueError as error:
    raise errors.UserError(
      f'{what} have rows of several lengths; pad them, and give a mask.'
    ) from error


def _tokens(tokens: Any, size: int, side: str) -> jax.Array:
  """Ids [B, L] below `size`; those of a traced array are taken as they are.

  Raises:
    UserError: they are not that.
  """
  tokens = _array(tokens, f'tokens of the {side}')
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise errors.UserError(
      f'tokens of the {side} are {tokens.dtype} of shape'
      f' {list(tokens.shape)}; give integers [rows, length].'
    )
  if tokens.size and not isinstance(tokens, jax.core.Tracer):
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= size:
      raise errors.UserError(
        f'tokens of the {side} are {least} to {most}; its vocabulary has the'
        f' ids 0 to {size - 1}. Padding needs one too.'
      )
  return jnp.asarray(tokens, jnp.int32)


@jax.jit(static_argnames='model')
def _encode(model, params, tokens, segments, positions):
  return model.encode(params, tokens, segments, positions)


@jax.jit(static_argnames='model')
def _logits(model, params, decoder, encoder):
  if encoder is None:
    return model.logits(params, model.decode(params, *decoder))
  encoded = model.encode(params, *encoder)
  return model.logits(
    params, model.decode(params, *decoder, encoded, encoder[1])
  )
