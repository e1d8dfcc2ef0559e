"""`convert adapt`: decoder-only models -> an encoder-decoder at step 0.

The adaptation is planned from configs alone. Arrays of the new model are
computed lazily, so that host memory is bounded by the largest array. The copy
rules are in `adaptation`; of training, this module imports only the checkpoint
format.
"""

from collections.abc import Callable
import functools
from typing import Any

from absl import flags
from flax import traverse_util
import jax
import ml_collections
from ml_collections import config_dict, config_flags
import numpy as np

from encdec_adapt.adaptation import array_plans, weight_plan
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.exchange import importing
from encdec_adapt.files import lazy_array
from encdec_adapt.huggingface import config_json, new_folder
from encdec_adapt.models import model_config, model_section, parameters
from encdec_adapt.stored import (
  model_on_disk,
  pretrained_files,
  source_vocabularies,
  work_directory,
)


def define_model(values: flags.FlagValues) -> None:
  """Defines --model.KEY=VALUE flags for the keys of config.model, unset."""
  keys = traverse_util.flatten_dict(model_section.defaults(), sep='.')
  # No --model.kind: adaptation only makes encoder-decoders.
  del keys['kind']
  # Typed placeholders instead of defaults: only given keys override the shapes
  # of the sources.
  unset = {k: config_dict.placeholder(type(v)) for k, v in keys.items()}
  config_flags.DEFINE_config_dict(
    'model',
    ml_collections.ConfigDict(traverse_util.unflatten_dict(unset, sep='.')),
    'Keys of config.model (configs/keys.md) in which the new model differs'
    ' from its sources, such as --model.encoder.kv_heads=8 (each head is'
    ' repeated), --model.decoder.vocab_size=256100 (a new token gets the mean'
    ' embedding) or --model.shared_table.',
    flag_values=values,
  )
  values['model'].default_as_str = 'as in the sources'  # For --help.


def adapt_models(values: flags.FlagValues, _: list[str]) -> int:
  """Runs `convert adapt`: adapts decoder-only models to an encoder-decoder.

  Raises:
    UserError: the output exists, a source is damaged or not decoder-only, or
      the sources do not fit the model described by the flags.
  """
  command.require(values, 'encoder', *(() if values.dry_run else ('output',)))
  if not values.dry_run:
    # First: opening the sources reads all of their tensor headers.
    new_folder.require_free(values.output)
  names = [values.encoder] + ([values.decoder] if values.decoder else [])
  sources = [importing.open_model(name, values) for name in names]
  encoder, decoder = sources[0], sources[-1]
  model_on_disk.require_sources(encoder, decoder)
  target = _target(encoder.model.decoder, decoder.model.decoder, values)
  coverage = weight_plan.make_plan(
    target,
    encoder.model,
    decoder.model,
    cross_attention=values.cross_attention,
    post_norm_gain=values.post_norm_gain,
  )
  # make_plan sees only configs; these tensors are found in the files.
  coverage = model_on_disk.with_outside(coverage, encoder, decoder)
  choice = source_vocabularies.vocabularies_of_pair(encoder, decoder)
  if choice is not None and choice.encoder:
    _report_two_tokenizers(sources, shared=bool(target.shared_parts))
  print(coverage.table() if values.dry_run else coverage.summary())
  # Cross-attention keys and values have the encoder's width, so that the
  # decoder's self-attention cannot be copied into them.
  if target.encoder.width != target.decoder.width:
    print(
      'the pair is unbalanced: its cross-attention is fresh. Warm it up alone,'
      ' with --config.train.cross_attention_warmup=1000 (arXiv 2504.06225) or'
      ' about 5 % of the steps.'
    )
  if values.dry_run:
    print(
      f'{parameters.count(target):,} parameters; no weights were read, nothing'
      ' was written'
    )
    return 0
  # Name a source of both stacks once.
  names = list(dict.fromkeys(source.name for source in sources))
  contents = work_directory.Contents(
    target,
    {'command': 'adapt', 'sources': names},
    pretrained_files.folders_of_pair(encoder.path, decoder.path),
    choice,
    coverage,
    can_extend=True,
    framing=encoder.framing,
  )
  arrays = _arrays(target, coverage, encoder, decoder, values.seed)
  work_directory.write(values.output, contents, arrays, verb='made')
  return 0


def _target(
  encoder: model_config.StackConfig,
  decoder: model_config.StackConfig,
  values: flags.FlagValues,
) -> model_config.EncoderDecoderConfig:
  overrides = traverse_util.flatten_dict(values.model.to_dict(), sep='.')
  overrides = {k: v for k, v in overrides.items() if v is not None}
  options = {}
  # pair_of checks that the token is below vocab_size; the default, 256000, may
  # exceed a small model's vocabulary.
  if values.target == 't5gemma2' and 'eoi_token' in overrides:
    options['eoi_token'] = overrides['eoi_token']
  pair = config_json.pair_of(encoder, decoder, values.target or '', **options)
  section = ml_collections.ConfigDict(model_section.section_from_model(pair))
  section.update_from_flattened_dict(overrides)
  target = model_section.model_from_section(section.to_dict())
  if values.target:
    config_json.raw_from_model(target)  # Raises if outside the family.
  return target


def _report_two_tokenizers(
  sources: list[model_on_disk.StoredModel], *, shared: bool
) -> None:
  """Notes that the stacks have different tokenizers.

  Raises:
    UserError: the stacks share a table.
  """
  paths = ' and '.join(str(source.path) for source in sources)
  difference = f'{paths} have different tokenizers'
  if shared:
    raise errors.UserError(
      f'{difference}: in a table that both stacks share (--model.shared_table,'
      ' --target=t5gemma2, the second table of Gemma 4) an id would mean other'
      ' text to each. Choose sources with one vocabulary, or a table for each'
      ' stack.'
    )
  print(f'note: {difference}; the two sides of an example are tokenised apart.')


def _arrays(
  target: model_config.EncoderDecoderConfig,
  coverage: coverage_lib.Coverage,
  encoder: model_on_disk.StoredModel,
  decoder: model_on_disk.StoredModel,
  seed: int,
) -> dict[str, lazy_array.LazyArray]:
  # Stacks with the same source share the mapping, and so a run's cache of the
  # last restored group of arrays.
  arrays = encoder.arrays()
  rng = jax.random.key(seed)
  trees = {
    'encoder_source': arrays,
    'decoder_source': arrays if decoder is encoder else decoder.arrays(),
    # Initializes only the fresh parameters, to the values of a random model
    # with this seed.
    array_plans.FRESH: {
      path: _lazy(info, parameters.init_one, target, rng, path)
      for path, info in parameters.parameter_table(target).items()
    },
  }
  models = {'encoder_source': encoder.model, 'decoder_source': decoder.model}
  return {
    path: _lazy(plan.info, plan.make, trees, np)
    for path, plan in array_plans.make_plans(target, coverage, models).items()
  }


def _lazy(
  info: parameters.ParamInfo, make: Callable[..., Any], *args: Any
) -> lazy_array.LazyArray:
  # Checkpoints are written in full arrays.
  return lazy_array.LazyArray.in_full(
    tuple(info.shape), info.dtype, functools.partial(make, *args)
  )
