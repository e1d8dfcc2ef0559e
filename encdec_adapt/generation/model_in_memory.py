"""`encdec_adapt.load`: a model as a Python object, for notebooks.

Evaluation, generation and serving also read models here (`read_as_trained`).
The functions of a model are in `models`, the engine in `inference`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import os
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.generation import prompt_encoding, text_generation
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.inference import log_likelihoods, row_batches
from encdec_adapt.inference import pooling as pooling_lib
from encdec_adapt.models import (
  build,
  execution,
  model_config,
  parameters,
)
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.stored import model_on_disk, pretrained_files
from encdec_adapt.tokenizers import vocabulary
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib

Tokens = Int[Array, 'B L']
Mask = Bool[Array, 'B L']
_RULES = 'fsdp'
_GENERATION = tuple(x.name for x in dataclasses.fields(text_generation.Options))
# Options of methods that encode texts without generating.
_READING = ('prefix', 'mode', 'max_prompt', 'batch_size')


class Score(NamedTuple):
  """Score of a target text.

  Attributes:
    log_prob: sum of the natural log-probabilities of its tokens, without EOS.
    tokens: number of tokens.
  """

  log_prob: float
  tokens: int


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model with its parameters.

  Masks are True at tokens and False at padding; None means all True. Positions
  count from the left, including padding, as in the forward pass of
  transformers.

  Attributes:
    model: functions of parameters (`models.build`).
    params: the parameters, nested, fp32.
    stored: the model on disk.
    rules: sharding rules of logical axes on the parameters' mesh.
  """

  model: build.Model
  params: Any
  stored: model_on_disk.StoredModel
  rules: rules_lib.Rules = rules_lib.RULES[_RULES]

  def __repr__(self) -> str:
    path = self.stored and str(self.stored.path)
    return (
      f'LoadedModel({path!r}, {self.config.architecture.name},'
      f' {parameters.count(self.config):,} parameters)'
    )

  @property
  def config(self) -> model_config.ModelConfig:
    """Config of the model."""
    return self.model.config

  @property
  def tokenizer(self) -> vocabulary.Vocabulary:
    """Vocabulary of the decoder; `stored.require_vocabularies` has both.

    Raises:
      UserError: the model has none.
    """
    return self.stored.require_vocabularies().decoder

  def generate(
    self, texts: Sequence[prompt_encoding.Prompt], **options: Any
  ) -> list[str]:
    """Continues texts, like the command `generate`.

    Args:
      texts: the prompts; with `chat`, a prompt may be a list of messages. For a
        model that reads passages, objects with `question` and `documents`.
      **options: fields of `text_generation.Options`, such as `max_tokens`,
        `temperature`, `stop` and `beams`; greedy by default.

    Returns:
      The continuations, without special tokens.

    Raises:
      UserError: an option is unknown, options are incompatible, the model is
        not generative, or a text is empty or too long.
    """
    chosen = _options(options, _GENERATION)
    encoder, encoded = self._encode(texts, chosen, chosen.max_tokens)
    completions = text_generation.complete(
      self, dict(enumerate(encoded)), encoder, chosen
    )
    return [x.text for x in row_batches.in_order(completions)]

  def score(
    self, inputs: Sequence[str], targets: Sequence[str], **options: Any
  ) -> list[Score]:
    """Returns the log-probability of each target after its input.

    Args:
      inputs: texts, encoded like the prompts of `generate`.
      targets: nonempty texts.
      **options: `prefix`, `mode`, `max_prompt` and `batch_size` of `generate`.

    Raises:
      UserError: the numbers of inputs and targets differ, or a text is empty or
        too long.
    """
    chosen = _options(options, _READING)
    if isinstance(targets, str) or len(inputs) != len(targets):
      raise errors.UserError(
        f'{len(inputs)} inputs and targets {targets!r:.60}; give a list with a'
        ' target for each input.'
      )
    writer = self.tokenizer
    tokens = list(map(writer.encode, targets))
    longest = max(map(len, tokens), default=0) + len(writer.ids.target_opening)
    _, encoded = self._encode(inputs, chosen, longest)
    pairs = list(map(log_likelihoods.Pair, encoded, tokens))
    scores = self.score_tokens(pairs, chosen.batch_size)
    counts = map(len, tokens)
    return [Score(x.log_prob, n) for x, n in zip(scores, counts, strict=True)]

  def embed(
    self, texts: Sequence[str], pooling: str | None = None, **options: Any
  ) -> Float[np.ndarray, 'B E']:
    """Returns the embeddings of texts: pooled encoder states.

    Args:
      texts: the texts; for queries, pass
        `prefix=model.stored.prompts['query']`.
      pooling: 'mean' over the tokens, or the state of the 'first' or 'last'
        token; None for the pooling of an embedding model, otherwise 'mean'.
      **options: see `score`.

    Raises:
      UserError: the model has no encoder, or a text is empty or too long.
    """
    chosen = _options(options, _READING)
    _, encoded = self._encode(texts, chosen, 0)
    return self._vectors(encoded, pooling, chosen.batch_size)

  def classify(self, texts: Sequence[str], **options: Any) -> list[str]:
    """Returns the label of each text, by a classifier of texts.

    Args:
      texts: the texts; several of an example are joined by line breaks.
      **options: see `score`.

    Raises:
      UserError: the model is no such classifier, or a text is empty or too
        long.
    """
    names = self.stored.labels
    if self.stored.labels_words:
      raise errors.UserError(
        f'{self.stored.path} labels words; read its `logits` at the first'
        ' token of each.'
      )
    chosen = _options(options, _READING)
    encoder, encoded = self._encode(texts, chosen, 0)
    _, tail = encoder.reader.ids.edges(self.stored.framing_side)
    numbers = pooling_lib.classify(
      self.model,
      self.params,
      encoded,
      mesh=self.placement.mesh,
      rules=self.rules,
      tail=len(tail),
      rows=self.rows(min(chosen.batch_size, max(len(texts), 1))),
    )
    return [names[i] for i in row_batches.in_order(numbers)]

  def embedding_model(self) -> 'LoadedModel':
    """Returns this model as an embedding model without a learned temperature.

    Other models give their prompt-reading stack, with mean pooling. A prefix
    decoder attends like an encoder.
    """
    config = model_config.embedding_model(self.config)
    paths = parameters.paths_in(self.config, config)
    flat = state_lib.flatten(self.params)
    params = {path: flat[source] for path, source in paths.items()}
    model = build.build(config, self.model.compute)
    return dataclasses.replace(
      self, model=model, params=state_lib.unflatten(params)
    )

  def embed_texts(
    self, texts: Sequence[str | Sequence[int]], role: str, rows: int
  ) -> Float[np.ndarray, 'n E']:
    """Embeds queries or documents, framed as in training.

    Args:
      texts: texts, or token ids with or without framing; longer ones are
        truncated to the model's context.
      role: 'query' or 'document'.
      rows: texts per batch.
    """
    stored = self.stored
    reader = stored.require_vocabularies().sides[stored.prompt_side]
    prefix, room = stored.prompts[role], pretrained_files.prompt_room(stored)
    room = room and room - reader.ids.frame_size
    side = self.config.architecture.framing_side
    tokens = [
      reader.encode(prefix + x)
      if isinstance(x, str)
      else [*reader.encode(prefix), *reader.ids.unframe(x, side)]
      for x in texts
    ]
    framed = [reader.ids.frame(x[:room], side) for x in tokens]
    return self._vectors(framed, None, rows)

  def _vectors(
    self, texts: Sequence[np.ndarray], pooling: str | None, rows: int
  ) -> Float[np.ndarray, 'n E']:
    vectors = self.embed_tokens(
      dict(enumerate(texts)), pooling=pooling, batch_size=rows
    )
    return np.array(row_batches.in_order(vectors))

  def _encode(
    self, texts: Sequence[str], options: text_generation.Options, generated: int
  ) -> tuple[prompt_encoding.PromptEncoder, list[np.ndarray]]:
    # A string would be read as a list of characters.
    if isinstance(texts, str):
      raise errors.UserError(f'{texts!r:.60} is a text; give a list of texts.')
    prompts = {f'text {i}': text for i, text in enumerate(texts)}
    text_generation.check(prompts, chat=options.chat)
    return text_generation.encode(prompts, self.stored, options, generated)

  @functools.cached_property
  def special_ids(self) -> engine_lib.SpecialIds:
    """Special ids of the decoder's vocabulary, or in the model's files.

    Raises:
      UserError: an id is missing in both.
    """
    folders = pretrained_files.folders(self.stored.path)
    opened = self.stored.open_vocabularies()
    ids = pretrained_files.special_ids(folders, opened)
    if missing := {'bos', 'eos', 'pad'} - ids.keys():
      raise errors.UserError(
        f'{self.stored.path} has no tokenizer and no config.json that state'
        f' {" and ".join(sorted(missing))}; give `ids` to the engine.'
      )
    return engine_lib.SpecialIds(**ids)

  @functools.cached_property
  def _decode(self) -> Callable[[np.ndarray], str] | None:
    opened = self.stored and self.stored.open_vocabularies()
    return opened.decoder.decode_generated if opened else None

  def encode(self, tokens: Tokens, mask: Mask | None = None) -> Array:
    """Returns the encoder's states after its final norm, [B, S, E].

    Raises:
      UserError: the model is decoder-only, or see `_framed`.
    """
    self.config.architecture.require_encoder()
    fields = self._framed(tokens, mask, self.config.architecture.prompt_stack)
    return _encode(self.model, self.params, fields)

  def logits(
    self,
    decoder_tokens: Tokens,
    encoder_tokens: Tokens | None = None,
    encoder_mask: Mask | None = None,
    decoder_mask: Mask | None = None,
  ) -> Float[Array, 'B T V']:
    """Returns the logits of the token after each decoder token, fp32.

    Classifiers of texts have those of the labels at each token. The decoder of
    a pair that classifies reads the encoder's tokens shifted right by one, the
    last first.

    Args:
      decoder_tokens: tokens fed to the decoder, [B, T].
      encoder_tokens: tokens fed to the encoder, [B, S]; None for a
        decoder-only model.
      encoder_mask: mask of the encoder's tokens.
      decoder_mask: mask of the decoder's tokens.

    Raises:
      UserError: encoder tokens are missing, or given without an encoder; see
        also `_framed`.
    """
    inputs = {'decoder': (decoder_tokens, decoder_mask)}
    if encoder_tokens is not None:
      inputs['encoder'] = encoder_tokens, encoder_mask
    if inputs.keys() != self.config.stacks.keys():
      raise errors.UserError(
        'a decoder-only model has no encoder.'
        if 'encoder' in inputs
        else 'an encoder-decoder needs encoder_tokens and decoder_tokens.'
      )
    fields = {side: self._framed(*x, side) for side, x in inputs.items()}
    return _logits(self.model, self.params, fields)

  def engine(
    self,
    *,
    decode: Callable[[np.ndarray], str] | None = None,
    ids: engine_lib.SpecialIds | None = None,
    **options: Any,
  ) -> engine_lib.Engine:
    """Makes an inference engine; see `inference.engine.Engine`.

    Args:
      decode: decodes token ids to text, for stop strings; by default with the
        model's tokenizer, if any.
      ids: special tokens; by default `special_ids`.
      **options: `rows`, `int8`, `steps`, `sizes` and `adapters` of `Engine`.

    Raises:
      UserError: see `Engine` and `special_ids`.
    """
    return engine_lib.Engine(
      self.model,
      self.params,
      ids or self.special_ids,
      decode=decode or self._decode,
      mesh=self.placement.mesh,
      rules=self.placement.rules,
      **options,
    )

  def score_tokens(
    self,
    pairs: Sequence[log_likelihoods.Pair],
    batch_size: int = 8,
    report: Callable[[int], Any] = lambda done: None,
  ) -> list[log_likelihoods.Scored]:
    """Scores continuations; see `inference.log_likelihoods.score`.

    Args:
      pairs: contexts, and continuations without the opening of targets.
      batch_size: pairs per batch, rounded up to divide over the devices.
      report: called with the number of scored pairs.
    """
    ids = self.tokenizer.ids
    scores = log_likelihoods.score(
      self.model,
      self.params,
      pairs,
      mesh=self.placement.mesh,
      rules=self.rules,
      rows=self.rows(batch_size),
      start=(ids.bos, *ids.target_opening),
    )
    return row_batches.in_order(scores, report)

  def embed_tokens(
    self,
    texts: Mapping[int, Int[np.ndarray, 'n']],
    *,
    pooling: str | None,
    batch_size: int = 8,
  ) -> Iterator[tuple[int, Float[np.ndarray, 'E']]]:
    """Yields index and embedding of texts; see `inference.pooling.embed`.

    Args:
      texts: index -> framed token ids.
      pooling: see `embed`.
      batch_size: texts per batch, rounded up to divide over the devices.
    """
    indices = list(texts)
    for number, states in pooling_lib.embed(
      self.model,
      self.params,
      list(texts.values()),
      mesh=self.placement.mesh,
      rules=self.rules,
      pooling=pooling,
      rows=self.rows(min(batch_size, max(len(texts), 1))),
    ):
      yield indices[number], states

  @functools.cached_property
  def placement(self) -> state_lib.Placement:
    """The placement: model, mesh and sharding rules of the parameters."""
    # Read from the arrays: `dataclasses.replace` may have replaced them, and
    # arrays on a single device have no mesh.
    mesh = getattr(jax.tree.leaves(self.params)[0].sharding, 'mesh', None)
    return state_lib.Placement(self.model, mesh or _one_device(), self.rules)

  def rows(self, least: int) -> int:
    """Rounds a number of rows up to a multiple that divides over the mesh."""
    shards = self.placement.rules.on(self.placement.mesh).size('batch')
    return -(-least // shards) * shards

  def _framed(
    self, tokens: Any, mask: Any, side: str
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, segments and positions for a stack, [B, L] each.

    Raises:
      UserError: tokens are not integers [B, L] below the stack's vocabulary
        size.
      ValueError: the mask has the wrong shape.
    """
    tokens = _tokens(tokens, self.config.stacks[side].vocab_size, side)
    model_config.check_positions(self.config, {side: tokens.shape[1]})
    for row in np.asarray(tokens):
      self.config.stacks[side].passages.require_fits(row)
    # Foreign masks are integers or floats; nonzero is True.
    mask = jnp.asarray(True if mask is None else mask) != 0
    segments = jnp.broadcast_to(mask, tokens.shape).astype(jnp.int32)
    # Positions count padding, to agree with transformers on left-padded rows.
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Except in RoBERTa, whose positions count tokens only. BART has an offset
    # too, but no token types.
    stack = self.config.stacks[side]
    if stack.positions.offset and stack.token_types:
      positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
    return tokens, segments, positions


def _options(
  values: Mapping[str, Any], names: Sequence[str]
) -> text_generation.Options:
  """Returns the options of a call.

  Args:
    values: keyword arguments.
    names: the supported options.

  Raises:
    UserError: an argument is unsupported or has a wrong value.
  """
  for name in values:
    if name not in names:
      raise errors.UserError(
        f'{name!r} is not an option of this call{errors.nearest(name, names)};'
        f' give {", ".join(names)}, or leave it out.'
      )
  return text_generation.Options(**values)


def read_as_trained(stored: model_on_disk.StoredModel) -> LoadedModel:
  """Reads a model over all devices, with the compute dtype of its run.

  Args:
    stored: the opened model; a folder computes in fp32.
  """
  # The run's dtype, so that scores agree with training; the dtype in a folder's
  # config.json is for storage.
  dtype = 'float32'
  mesh = inference_mesh(stored.model)
  if stored.step is not None:
    run = config_lib.load_run(str(stored.path))
    dtype = run.compute.on(mesh.devices.flat[0].platform).dtype
  return read(stored, dtype=jnp.dtype(dtype), mesh=mesh)


def inference_mesh(config: model_config.ModelConfig) -> Mesh:
  """Returns an inference mesh of all devices for a model.

  Prefers tensor parallelism over heads and MLPs, because a decode step would
  have to gather parameters sharded otherwise; shards rows over the remaining
  devices.
  """
  # Query heads are a multiple of kv_heads, so they divide as well.
  sizes = [
    size
    for stack in config.stacks.values()
    for size in (
      stack.kv_heads,
      stack.global_kv_heads,
      stack.mlp_width,
      stack.expert_width,
    )
  ]
  # gcd ignores widths of 0: of experts, and of heads that are alike.
  tensor = math.gcd(jax.device_count(), *sizes)
  groups = mesh_lib.in_groups(
    jax.device_count() // tensor, rules_lib.VOCABULARY_GROUP
  )
  return mesh_lib.make_mesh(dataclasses.replace(groups, tensor=tensor))


def load(
  path: str | os.PathLike[str],
  *,
  dtype=jnp.float32,
  mesh: Mesh | None = None,
  encoder_window: str | None = None,
) -> LoadedModel:
  """Loads a Hugging Face folder or a run (`model_on_disk.open_checkpoint`).

  Args:
    path: the folder.
    dtype: compute dtype of activations and matmuls.
    mesh: mesh to shard the parameters over (`sharding.mesh.make_mesh`); None
      for this process's first device. A folder's tables are padded to divide.
    encoder_window: window rule of the local layers of a bidirectional encoder,
      'exclusive' (the authors of T5Gemma) or 'inclusive' (transformers 5.23,
      eager). None for the rule of the run or of the folder's config.json; a
      T5Gemma without a rule is exclusive.

  Raises:
    UserError: the model is missing, damaged or unsupported, does not divide
      over the mesh, or has no such encoder; see also
      `model_on_disk.require_head`.
  """
  multiple = None
  # Tables must divide over the mesh; folders may have any number of rows.
  if mesh is not None:
    axes = rules_lib.RULES[_RULES].vocab
    multiple = math.prod(mesh.shape[axis] for axis in axes)
  stored = model_on_disk.open_model(
    path, encoder_window=encoder_window, vocab_multiple=multiple
  )
  model_on_disk.require_head(stored)
  return read(stored, dtype=dtype, mesh=mesh)


def read(
  stored: model_on_disk.StoredModel,
  *,
  dtype=jnp.float32,
  mesh: Mesh | None = None,
) -> LoadedModel:
  """Reads the parameters of an opened model.

  Args:
    stored: the opened model.
    dtype: see `load`.
    mesh: see `load`.

  Raises:
    UserError: the model does not divide over the mesh.
  """
  mesh = mesh or _one_device()
  compute = execution.ComputeConfig(jnp.dtype(dtype).name, 'none')
  rules = rules_lib.RULES[_RULES]
  placement = setup.place_model(stored.model, compute, mesh, rules)
  return LoadedModel(placement.model, stored.read(placement), stored)


def _one_device() -> Mesh:
  return mesh_lib.make_mesh(
    mesh_lib.MeshConfig(), devices=jax.local_devices()[:1]
  )


def _tokens(tokens: Any, size: int, side: str) -> jax.Array:
  """Checks token ids [B, L], except the values of traced arrays."""
  # NumPy keeps the caller's dtype for the message; jnp.asarray would make
  # float32 of float64.
  if not isinstance(tokens, jax.Array):
    tokens = np.asarray(tokens)
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise errors.UserError(
      f'tokens of the {side} are {tokens.dtype} of shape'
      f' {list(tokens.shape)}; give integers [rows, length].'
    )
  # Device lookups do not check ids: a wrong id gives wrong states silently.
  if tokens.size and not isinstance(tokens, jax.core.Tracer):
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= size:
      raise errors.UserError(
        f'tokens of the {side} are {lowest} to {highest}; its vocabulary has'
        f' the ids 0 to {size - 1}. Padding needs one too.'
      )
  return jnp.asarray(tokens, jnp.int32)


# Module-level functions with the model as a static argument, so that objects
# with equal models share compiled programs.
@jax.jit(static_argnames='model')
def _encode(model, params, fields):
  return model.architecture.encode(model, params, fields)


@jax.jit(static_argnames='model')
def _logits(model, params, fields):
  return model.logits(params, model.architecture.states(model, params, fields))
