"""The conversion of decoder-only models into an encoder-decoder.

Planned from configs alone; then each array of the new model is made when it
is written, so that host memory grows with the largest of them alone.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

from absl import flags
import jax
import numpy as np

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import recipes, weight_plan
from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import (
  conversions,
  kept_files,
  stored_model,
  work_directory,
)
from encdec_adapt.huggingface import config_json, folder
from encdec_adapt.models import model_config, parameters
from encdec_adapt.telemetry import progress
from encdec_adapt.tokenizers import vocabularies

# Flags that are fields of the pair, and those that are fields of a stack.
_OF_THE_PAIR = ('shared_table', 'cross_merged', 'cross_layers')
_OF_A_STACK = {
  'encoder_kv_heads': ('encoder', 'kv_heads'),
  'encoder_vocab_size': ('encoder', 'vocab_size'),
  'decoder_vocab_size': ('decoder', 'vocab_size'),
  'tied_head': ('decoder', 'tied_head'),
}


def adapt_models(values: flags.FlagValues, _: list[str]) -> int:
  """Makes an encoder-decoder of one or two decoder-only models."""
  command.require(values, 'encoder', *(() if values.dry_run else ('output',)))
  if not values.dry_run:
    work_directory.require(values.output)
  paths = [values.encoder] + ([values.decoder] if values.decoder else [])
  sources = [_open_decoder_only(path, values) for path in paths]
  encoder, decoder = sources[0], sources[-1]
  target = _target(encoder.model.decoder, decoder.model.decoder, values)
  report = weight_plan.make_plan(
    target,
    encoder.model,
    decoder.model,
    cross_attention=values.cross_attention,
    post_norm_gain=values.post_norm_gain,
  )
  report = stored_model.with_outside(report, encoder, decoder)
  choice = stored_model.vocabularies_of_pair(encoder, decoder)
  _check_vocabularies(choice, encoder, decoder, shared=target.shared_table)
  print(report.table())
  if encoder.model.decoder.width != decoder.model.decoder.width:
    print(
      'the pair is unbalanced: its cross-attention is fresh. Let it warm up'
      ' alone, with --config.train.cross_attention_warmup=1000 (arXiv'
      ' 2504.06225) or about 5 % of the steps.'
    )
  count = parameters.count(target)
  if values.dry_run:
    print(f'{count:,} parameters; no weights were read, nothing was written')
    return 0
  contents = work_directory.Contents(
    target,
    {'command': 'adapt', 'sources': list(dict.fromkeys(paths))},
    kept_files.of_pair(encoder.path, decoder.path),
    choice,
    report,
    can_extend=True,
  )
  arrays = _arrays(target, report, encoder, decoder, values.seed)
  lazy = work_directory.lazy_params(arrays, progress.ByteProgress('made'))
  work_directory.write(values.output, contents, lazy)
  print(f'{values.output}: {count:,} parameters, step 0')
  return 0


def _open_decoder_only(
  path: str, values: flags.FlagValues
) -> stored_model.StoredModel:
  source = conversions.open_source(path, values)
  stored_model.require_decoder_only(source)
  return source


def _target(
  encoder: model_config.StackConfig,
  decoder: model_config.StackConfig,
  values: flags.FlagValues,
) -> model_config.EncoderDecoderConfig:
  """The model that the flags ask for.

  Raises:
    UserError: there is no such model, or it is not of --target's family.
  """
  given = {
    name: values[name].value
    for name in (*_OF_THE_PAIR, *_OF_A_STACK)
    if values[name].value is not None
  }
  stacks = {'encoder': encoder, 'decoder': decoder}
  for name in _OF_A_STACK.keys() & given.keys():
    stack, field = _OF_A_STACK[name]
    changed = {field: given.pop(name)}
    stacks[stack] = dataclasses.replace(stacks[stack], **changed)
  options: dict[str, Any] = {'causal_encoder': values.causal_encoder, **given}
  if values.target != 't5gemma2':
    if values.eoi_token is not None:
      raise errors.UserError(
        f'--eoi_token is {values.eoi_token}, and only a t5gemma2 has one; give'
        ' --target=t5gemma2, or leave it out.'
      )
    return config_json.pair_of(**stacks, target=values.target or '', **options)
  # The family fixes these; what contradicts it is named.
  fixed = {k: options.pop(k) for k in _OF_THE_PAIR if k in options}
  if values.eoi_token is not None:
    options['eoi_token'] = values.eoi_token
  target = config_json.pair_of(**stacks, target=values.target, **options)
  _refuse_contradictions(target, fixed)
  return target


def _refuse_contradictions(
  target: model_config.EncoderDecoderConfig, given: Mapping[str, Any]
) -> None:
  """Refuses flags that say otherwise than --target."""
  found = {
    'shared_table': target.shared_table,
    'cross_merged': target.decoder.cross_merged,
    'cross_layers': target.decoder.cross_layers,
  }
  for name, value in given.items():
    if value != found[name]:
      raise errors.UserError(
        f'--{name} is {value!r}, and a t5gemma2 has {found[name]!r}; leave out'
        ' one of --target and the flag.'
      )


def _arrays(
  target: model_config.EncoderDecoderConfig,
  report: coverage_lib.Coverage,
  encoder: stored_model.StoredModel,
  decoder: stored_model.StoredModel,
  seed: int,
) -> Iterator[folder.LazyArray]:
  """Every array of the target, made when it is read."""
  # One mapping for one source, of which a part of the last read stays.
  of_encoder = {array.path: array for array in encoder.arrays()}
  of_decoder = of_encoder
  if decoder is not encoder:
    of_decoder = {array.path: array for array in decoder.arrays()}
  rng = jax.random.key(seed)
  trees = {
    'encoder_source': of_encoder,
    'decoder_source': of_decoder,
    recipes.FRESH: {
      path: _drawn(target, path, info, rng)
      for path, info in parameters.parameter_table(target).items()
    },
  }
  models = {'encoder_source': encoder.model, 'decoder_source': decoder.model}
  for path, recipe in recipes.make_recipes(target, report, models).items():

    def read(index, recipe=recipe):
      return recipe.make(trees, np)[index]

    info = recipe.info
    yield folder.LazyArray(path, tuple(info.shape), np.dtype(info.dtype), read)


def _drawn(
  target: model_config.EncoderDecoderConfig,
  path: str,
  info: parameters.ParamInfo,
  rng: jax.Array,
) -> folder.LazyArray:
  """An array as initialisation draws it."""

  def read(index):
    return np.asarray(parameters.init_one(target, rng, path))[index]

  return folder.LazyArray(path, tuple(info.shape), np.dtype(info.dtype), read)


def _check_vocabularies(
  choice: vocabularies.Choice | None,
  encoder: stored_model.StoredModel,
  decoder: stored_model.StoredModel,
  *,
  shared: bool,
) -> None:
  """Says it where the stacks mean other text by the same id.

  Raises:
    UserError: they do, and share a table.
  """
  if choice is None or not choice.encoder:
    return
  if shared:
    raise errors.UserError(
      f'{encoder.path} and {decoder.path} have tokenizers of their own: a table'
      ' that both stacks share (--shared_table, --target=t5gemma2) would mean'
      ' other text by the same id. Choose sources with one vocabulary, or let'
      ' each stack have its own table.'
    )
  print(
    f'note: {encoder.path} and {decoder.path} have tokenizers of their own;'
    ' the two sides of an example are tokenised apart.'
  )
