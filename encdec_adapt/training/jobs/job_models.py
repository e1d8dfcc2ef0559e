"""Stored models of a job: references, teachers and reward models.

Opening reads configs and headers and checks them before any long work; `read`
then reads the weights.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp

from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.inference import rewards
from encdec_adapt.models import (
  architecture,
  base_model,
  execution,
  model_config,
)
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.stored import (
  frozen_base,
  model_on_disk,
  pretrained_files,
  source_vocabularies,
)
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.recipes import recipe
from encdec_adapt.training.sections import rollout_options


@dataclasses.dataclass(frozen=True)
class OpenedModel:
  """An opened frozen model.

  Attributes:
    source: the opened model.
    placement: the model on the job's mesh.
  """

  source: model_on_disk.StoredModel
  placement: state_lib.Placement

  def read(self) -> base_model.Params:
    """Reads the parameters."""
    return self.source.read(self.placement)

  def digest(self, params: base_model.Params) -> str:
    """Returns a digest of the parameters returned by `read`.

    It is independent of the mesh, since integer sums are exact in any order,
    and of the files, which may differ in time stamps between hosts.
    """

    def total(leaf: jax.Array) -> jax.Array:
      dtype = f'uint{8 * leaf.dtype.itemsize}'
      bits = jax.lax.bitcast_convert_type(leaf, dtype).astype(jnp.uint32)
      return jnp.sum(bits * bits + bits, dtype=jnp.uint32)

    everywhere = placement_lib.replicated(self.placement.mesh)
    sums = jax.jit(
      lambda params: jax.tree.map(total, params), out_shardings=everywhere
    )(params)
    leaves = jax.tree_util.tree_leaves_with_path(sums)
    text = {placement_lib.path_string(path): int(x) for path, x in leaves}
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


def read_frozen(
  references: Mapping[str, OpenedModel],
  frozen: frozen_base.FrozenBase | None = None,
  base: base_model.Params | None = None,
) -> tuple[dict[str, base_model.Params], dict[str, str]]:
  """Reads the parameters of references; returns them and their digests.

  Args:
    references: the references by name.
    frozen: frozen base of adapters. It shares its arrays with references that
      are the base, or adapters over it.
    base: parameters of the base, as returned by `FrozenBase.read`.
  """

  def read(reference: OpenedModel) -> base_model.Params:
    shares = frozen and shares_base(reference.placement, frozen.placement)
    if shares and frozen.shares(reference.source):
      start = frozen.start(reference.source)
      return frozen.placement.attach(base, start)
    return reference.read()

  params = {name: read(r) for name, r in references.items()}
  digests = {name: r.digest(params[name]) for name, r in references.items()}
  return params, digests


def shares_base(
  reference: state_lib.Placement, placement: state_lib.Placement
) -> bool:
  """Returns whether a reference can share the arrays of the frozen base.

  Model and dtype (`config.teacher.dtype`) must be equal.

  Args:
    reference: placement of the reference.
    placement: placement of the trained model, with its adapters.
  """
  dtype = jnp.dtype(placement.model.compute.dtype)
  same = reference.model == placement.model
  return same and jnp.dtype(reference.dtype) == dtype


def open_frozen(
  frozen: Mapping[str, recipe.FrozenModel],
  dtype: str,
  placement: state_lib.Placement,
  compute: execution.ComputeConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
) -> dict[str, OpenedModel]:
  """Opens the frozen models of a recipe, by name.

  Args:
    frozen: frozen models of the recipe.
    dtype: `config.teacher.dtype`.
    placement: the trained model and its mesh.
    compute: section `compute` of the configuration.
    choice: the vocabularies of the job.
    lengths: tokens of a row.

  Raises:
    UserError: see `open_frozen_model`.
  """
  sources = {
    name: open_frozen_model(
      frozen_model, placement.model.config, choice, lengths
    )
    for name, frozen_model in frozen.items()
  }
  return {
    name: OpenedModel(x, place_frozen_model(x.model, dtype, placement, compute))
    for name, x in sources.items()
  }


def open_frozen_model(
  frozen_model: recipe.FrozenModel,
  model: model_config.ModelConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
) -> model_on_disk.StoredModel:
  """Opens a frozen model.

  Args:
    frozen_model: the model as declared by the recipe.
    model: shape of the trained model.
    choice: the vocabularies of the job.
    lengths: tokens of a row.

  Raises:
    UserError: the recipe does not accept its architecture, its vocabulary
      differs, it has too few positions, or a teacher of uncorrupted text has
      sentinels that also encode text (bytes).
  """
  if frozen_model.reads_windows and vocabulary_pair.exists(choice.decoder):
    vocabulary = choice.open().decoder
    if {*vocabulary.sentinels} & {*vocabulary.text_ids.tolist()}:
      raise errors.UserError(
        'a teacher of span corruption reads the text without its sentinels, and'
        f' those of the vocabulary {choice.decoder} are bytes that text has,'
        ' too; distil prefix_lm or pairs (config.data.objective).'
      )
  source = open_source(frozen_model.path, model)
  if source.model.architecture not in frozen_model.accepts:
    raise errors.UserError(
      f'config.teacher.checkpoint is {frozen_model.path!r}, a model of kind'
      f' {source.model.architecture.name} with'
      f' {source.model.decoder.outputs:,} outputs; the loss reads models of'
      f' kind {architecture.names(frozen_model.accepts)}.'
    )
  _check_reads(source, model, choice, lengths, 'teacher')
  return source


def open_reward_model(
  path: str,
  placement: state_lib.Placement,
  compute: execution.ComputeConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
) -> OpenedModel:
  """Opens a reward model for the trained model's completions.

  `inference.rewards.score` takes its parameters (`OpenedModel.read`).

  Args:
    path: a run or a folder.
    placement: the trained model and its mesh.
    compute: section `compute` of the configuration.
    choice: the vocabularies of the job.
    lengths: largest numbers of tokens of a prompt (with BOS) and a completion.

  Raises:
    UserError: it is not a reward model, or it has another vocabulary or too few
      positions.
  """
  model = placement.model.config
  source = open_source(path, model)
  rewards.require_reward_model(source.model, path)
  # The decoder of a pair also reads BOS.
  decoder = lengths.decoder + source.model.architecture.encodes_prompt
  read = framing.Lengths(lengths.encoder, decoder)
  _check_reads(source, model, choice, read, 'reward model')
  placed = place_reward_model(source.model, placement, compute)
  return OpenedModel(source, placed)


def place_reward_model(
  model: model_config.ModelConfig,
  placement: state_lib.Placement,
  compute: execution.ComputeConfig,
) -> state_lib.Placement:
  """Places a reward model on the mesh of the job."""
  return place_frozen_model(model, '', placement, scoring_compute(compute))


def scoring_compute(
  compute: execution.ComputeConfig,
) -> execution.ComputeConfig:
  """Returns the section `compute` of reward models."""
  # Kernels need lengths that are multiples of their block size.
  return dataclasses.replace(compute, attention='chunked', remat='none')


def _check_reads(
  source: model_on_disk.StoredModel,
  model: model_config.ModelConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
  title: str,
) -> None:
  """Checks the vocabularies and context length of a frozen model.

  Raises:
    UserError: the vocabularies differ, or rows exceed its context length.
  """
  for side, stack in source.model.stacks.items():
    # A stack missing in the trained model is compared with its decoder.
    size = model.stacks.get(side, model.decoder).vocab_size
    if stack.vocab_size != size:
      raise errors.UserError(
        f'the {side} of the {title} {source.path} has {stack.vocab_size} tokens'
        f' and that of the model {size}; both need one vocabulary.'
      )
    check_vocabulary(source, choice, side)
  check_positions(source, source.model.architecture, lengths, title)


def check_positions(
  source: model_on_disk.StoredModel,
  reader: architecture.Architecture,
  lengths: framing.Lengths,
  title: str,
) -> None:
  """Checks the context length of a model that reads or samples rows.

  Args:
    source: the opened model.
    reader: architecture that determines the positions of each stack.
    lengths: largest numbers of tokens of a prompt and a completion.
    title: description of the model, for the message.

  Raises:
    UserError: a stack has fewer positions.
  """
  positions = reader.positions(lengths.encoder, lengths.decoder)
  for side, limit in pretrained_files.stack_positions(source).items():
    if positions.get(side, 0) > limit:
      raise errors.UserError(
        f'the {title} {source.path} has {limit} positions in its {side}'
        f' ({pretrained_files.positions_key(source, side)}), and has to read'
        f' {positions[side]}: lower config.data.encoder_length'
        f' ({lengths.encoder}), decoder_length or tokens of'
        f' {rollout_options.LABEL}.tokens ({lengths.decoder}).'
      )


def place_frozen_model(
  model: model_config.ModelConfig,
  dtype: str,
  placement: state_lib.Placement,
  compute: execution.ComputeConfig,
) -> state_lib.Placement:
  """Places a frozen model on the mesh of the job.

  Args:
    model: its shape.
    dtype: dtype of its parameters; '' for the compute dtype.
    placement: the trained model and its mesh.
    compute: section `compute` of the configuration.
  """
  placed = setup.place_model(model, compute, placement.mesh, placement.rules)
  # Only trained parameters need float32, for small updates.
  return dataclasses.replace(placed, dtype=dtype or compute.dtype)


def open_source(
  path: str, target: model_config.ModelConfig
) -> model_on_disk.StoredModel:
  """Opens a model, its tables padded like those of the trained model."""
  multiple = target.decoder.vocab_multiple
  return model_on_disk.open_model(path, vocab_multiple=multiple)


def check_vocabulary(
  source: model_on_disk.StoredModel, choice: vocabulary_pair.Choice, side: str
) -> None:
  """Checks that a source or teacher was trained with the job's vocabulary.

  `side` is its stack, 'encoder' or 'decoder'.

  Raises:
    UserError: the token ids encode different text.
  """
  path = choice.path(side)
  if source.vocabularies is not None:
    source_vocabularies.require_same_tokens(source, side, path, 'this job')
  else:
    distributed.log(
      f'note: {source.path} has no tokenizer, so its ids are assumed to mean'
      f' what they mean in {path}.'
    )
