"""Whether vocabularies are those of a model, its records and its sources."""

from encdec_adapt import config as config_lib
from encdec_adapt.cli import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import stored_model
from encdec_adapt.data import records
from encdec_adapt.tokenizers import vocabularies


def check_model(settings: config_lib.Settings) -> None:
  """Refuses vocabularies that do not suit the model, before any long work.

  One that is yet to be trained suits it.

  Raises:
    UserError: one is missing or damaged, or has more tokens than the model's
      table has rows.
  """
  data = settings.data
  if vocabularies.exists(data.vocabularies.decoder) or (
    not data.train_vocabulary
  ):
    for note in check_sizes(settings, data.vocabularies.open()):
      if distributed.is_lead():
        print(f'note: {note}')


def check_sizes(
  settings: config_lib.Settings, opened: vocabularies.Opened
) -> list[str]:
  """Refuses opened vocabularies with more tokens than the tables have rows.

  Args:
    settings: of the job.
    opened: its vocabularies.

  Returns:
    What to say of special tokens that are left out.

  Raises:
    UserError: a token that may be read has no row.
  """
  notes = []
  for side, rows in settings.data.table_sizes.items():
    key = f'config.model.{side}.vocab_size'
    notes.append(
      vocabularies.check_size(opened.sides[side], rows, side, key=key)
    )
  return [note for note in notes if note]


def check_records(
  settings: config_lib.Settings, record_set: records.RecordSet
) -> None:
  """Refuses records that were made with other vocabularies than the model's.

  Raises:
    UserError: names both.
  """
  opened = settings.data.vocabularies.open()
  spec = record_set.spec
  made = {'encoder': spec.encoder_vocabulary, 'decoder': spec.vocabulary}
  for side in settings.model.stacks:
    own = opened.sides[side]
    if own.fingerprint != made[side]:
      raise errors.UserError(
        f'the records {record_set.folder} were made with the vocabulary'
        f' {made[side][:12]} of the {side}, the model with {own.path}'
        f" ({own.fingerprint[:12]}); make records with the model's"
        ' vocabularies.'
      )


def check_source(
  settings: config_lib.Settings, source: stored_model.StoredModel, side: str
) -> None:
  """Refuses a source or teacher that was trained with another vocabulary.

  Args:
    settings: of this job.
    source: of a stack, or the whole model.
    side: the stack that takes it.
  """
  own = settings.data.vocabularies.path(side)
  if source.vocabularies is None:
    if distributed.is_lead():
      print(
        f'note: {source.path} has no tokenizer; it is taken on trust that its'
        f' ids mean what they mean in {own}.'
      )
    return
  # A decoder-only model has one side, whichever stack takes it.
  theirs = source.vocabularies.path(
    side if side in source.model.stacks else 'decoder'
  )
  if own == theirs:
    return
  # One that is yet to be trained is not what the source was trained with.
  digests = {
    vocabularies.exists(path)
    and vocabularies.open_vocabulary(path).tokens_digest
    for path in (own, theirs)
  }
  if len(digests) > 1:
    key = 'encoder_vocabulary' if side == 'encoder' else 'vocabulary'
    raise errors.UserError(
      f'{source.path} was trained with the vocabulary {theirs}, the {side} of'
      f' this job has {own}, and they differ: ids would mean other text. Set'
      f' config.data.{key} to that of the source.'
    )
