"""What a job starts from: its sources and its teacher, checked and read."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh

from encdec_adapt import config as config_lib
from encdec_adapt import job, vocabulary_checks
from encdec_adapt.adaptation import coverage, initialise, weight_plan
from encdec_adapt.cli import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import kept_files, stored_model
from encdec_adapt.models import decoder_only, model_config, parameters
from encdec_adapt.telemetry import accounting
from encdec_adapt.training import state as state_lib


def check_sources(
  settings: config_lib.Settings, where: state_lib.Placement
) -> None:
  """Refuses sources that do not fit the job, before any long work.

  Args:
    settings: of the job.
    where: its model.

  Raises:
    UserError: a source is no Hugging Face folder, and holds no run or no
      sound checkpoint; it is not what the model can be adapted from; or it
      was trained with another vocabulary.
  """
  choice = settings.data.vocabularies
  sources, _ = fitting_sources(settings, where)
  if not sources:
    return
  kept_files.check(origin_folders(settings))
  of_side = {'encoder': sources[0], 'decoder': sources[-1]}
  seen = set()
  for side in settings.model.stacks:
    source, own = of_side[side], choice.path(side)
    if (source.path, own) not in seen:
      seen.add((source.path, own))
      vocabulary_checks.check_source(settings, source, side)


def fitting_sources(
  settings: config_lib.Settings, where: state_lib.Placement
) -> tuple[list[stored_model.StoredModel], coverage.Coverage | None]:
  """The sources, opened, and what an adaptation would do with every weight.

  Reads configs alone; says in what a model differs from one it continues.

  Returns:
    The sources, the encoder's first, and the account (None where the model
    is not adapted).

  Raises:
    UserError: a source is not what the model can start from.
  """
  init = settings.init
  folders = [folder for folder in (init.encoder, init.decoder) if folder]
  sources = [_open(settings, folder) for folder in folders]
  if init.mode == 'random':
    return sources, None
  if init.mode == 'checkpoint':
    _compare(sources[0], where)
    return sources, None
  for source in sources:
    stored_model.require_decoder_only(source)
  report = weight_plan.make_plan(
    settings.model,
    *(source.model for source in sources),
    **_options(settings),
  )
  return sources, stored_model.with_outside(report, sources[0], sources[-1])


def _options(settings: config_lib.Settings) -> dict[str, Any]:
  """What a configuration asks of an adaptation."""
  init = settings.init
  if init.mode == 'embeddings':
    return {'fresh': weight_plan.all_but_embeddings(settings.model)}
  return {
    'cross_attention': init.cross_attention,
    'post_norm_gain': init.post_norm_gain,
  }


def origin_folders(settings: config_lib.Settings) -> kept_files.Folders:
  """Where the files of the sources lie that export carries along."""
  init = settings.init
  if init.mode == 'random':
    return {}
  if init.mode == 'checkpoint':
    return kept_files.folders(init.encoder)
  return kept_files.of_pair(init.encoder, init.decoder or init.encoder)


def initial_params(
  settings: config_lib.Settings, where: state_lib.Placement
) -> tuple[decoder_only.Params, coverage.Coverage | None]:
  """Parameters at step 0, born sharded.

  Returns:
    The parameters, and where each came from (None for a checkpoint of the
    same model).

  Raises:
    UserError: a source is missing or does not fit.
  """
  init = settings.init
  rng = jax.random.key(settings.seed)
  if init.mode == 'checkpoint':
    return _open(settings, init.encoder).read(where), None
  folders = [folder for folder in (init.encoder, init.decoder) if folder]
  sources = [_open(settings, folder) for folder in folders]
  read = [_read_source(source, settings, where.mesh) for source in sources]
  function = initialise.from_scratch
  if init.mode != 'random':
    function = functools.partial(initialise.initialise, **_options(settings))
  reports = []

  def make(rng, *params):
    pairs = zip((source.model for source in sources), params, strict=True)
    result, report = function(where.model.config, *pairs, rng=rng)
    reports.append(report)
    return result

  params = where.place(make, rng, *read)
  report = reports[-1]
  if sources:
    report = stored_model.with_outside(report, sources[0], sources[-1])
  return params, report


def _read_source(
  source: stored_model.StoredModel, settings: config_lib.Settings, mesh: Mesh
) -> decoder_only.Params:
  """Parameters of a decoder-only model."""
  return source.read(job.place_model(settings, source.model, mesh))


def _compare(
  source: stored_model.StoredModel, where: state_lib.Placement
) -> None:
  """Says in what the model differs from the one that it continues.

  Raises:
    UserError: in the shape of a parameter.
  """
  own, theirs = (
    {path: info.shape for path, info in table.items()}
    for table in (where.model.table, parameters.parameter_table(source.model))
  )
  found = model_config.differences(source.model, where.model.config)
  if own != theirs:
    path = sorted(dict(own.items() ^ theirs.items()))[0]
    raise errors.UserError(
      f'{source.path} is of another model than config.model: {path} is'
      f' {theirs.get(path, "absent")} there and {own.get(path, "absent")} here'
      f' ({"; ".join(found) or "tables are padded differently"}). Set'
      ' config.model to that of the source.'
    )
  if found and distributed.is_lead():
    print('differs from its source: ' + '; '.join(found))


def place_teacher(
  settings: config_lib.Settings, mesh: Mesh
) -> state_lib.Placement | None:
  """The teacher's model, or None where nothing is distilled.

  Raises:
    UserError: the teacher is no decoder-only model, or speaks another
      vocabulary.
  """
  if not settings.loss.distillation:
    return None
  source = _open(settings, settings.teacher.checkpoint)
  if not isinstance(source.model, model_config.DecoderOnlyConfig):
    raise errors.UserError(
      f'config.teacher.checkpoint {source.path} is an encoder-decoder;'
      ' a teacher is a decoder-only model.'
    )
  sizes = source.model.decoder.vocab_size, settings.model.decoder.vocab_size
  if sizes[0] != sizes[1]:
    raise errors.UserError(
      f'the teacher {source.path} has {sizes[0]} tokens and the model'
      f' {sizes[1]}; a distribution is learnt over one vocabulary.'
    )
  vocabulary_checks.check_source(settings, source, 'decoder')
  return job.place_model(settings, source.model, mesh)


def read_teacher(
  settings: config_lib.Settings, where: state_lib.Placement
) -> decoder_only.Params:
  """The teacher's parameters."""
  return _open(settings, settings.teacher.checkpoint).read(where)


def read_costs(settings: config_lib.Settings) -> accounting.Sources:
  """What the job's sources and teacher have cost, as far as it is known."""
  init = settings.init
  paths = [init.encoder, init.decoder] if init.mode != 'random' else []
  paths.append(settings.teacher.checkpoint)
  return accounting.read_sources(path for path in paths if path)


def _open(settings: config_lib.Settings, path: str) -> stored_model.StoredModel:
  """A source or teacher, its tables padded as the model's own."""
  return stored_model.open_model(
    path, vocab_multiple=settings.model.decoder.vocab_multiple
  )
