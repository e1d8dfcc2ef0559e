"""Vocabularies of source models: supported kinds and equality of tokens."""

import dataclasses

from encdec_adapt.base import errors
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import vocabulary, vocabulary_pair


def open_if_suitable(
  choice: vocabulary_pair.Choice | None,
) -> vocabulary_pair.Opened | None:
  """Opens the tokenizers of a folder, unless their kind is unsupported.

  Returns:
    None if there are none, or, after printing a note, if a tokenizer has an
    unsupported kind.

  Raises:
    UserError: a tokenizer is damaged.
  """
  try:
    return choice and choice.open()
  except vocabulary.DamagedError:
    # A subclass of UserError, but a damaged file is not an unsupported file.
    raise
  except errors.UserError as error:
    print(f'note: not used as a vocabulary: {error}')
    return None


def vocabularies_of_pair(
  encoder: model_on_disk.StoredModel, decoder: model_on_disk.StoredModel
) -> vocabulary_pair.Choice | None:
  """Chooses the vocabularies of an encoder-decoder made from two models.

  Args:
    encoder: decoder-only source of the encoder.
    decoder: decoder-only source of the decoder.

  Returns:
    The decoder's, and the encoder's if its tokens differ; None if the decoder
    has none.

  Raises:
    UserError: a tokenizer is damaged.
  """
  # Both sources are decoder-only, with only a decoder vocabulary.
  targets, inputs = decoder.vocabularies, encoder.vocabularies
  if targets is None or inputs is None:
    return targets
  if same_tokens(targets.decoder, inputs.decoder):
    return targets
  return dataclasses.replace(targets, encoder=inputs.decoder)


def same_tokens(path_a: str, path_b: str) -> bool:
  """Returns whether ids mean the same text in the vocabularies at two paths."""
  if path_a == path_b:
    return True
  # Compare tokens, not files: a tokenizer.json may be a converted
  # tokenizer.model.
  vocabularies = map(vocabulary_pair.open_vocabulary, (path_a, path_b))
  return len({vocab.tokens_digest for vocab in vocabularies}) == 1


def require_same_tokens(
  source: model_on_disk.StoredModel, side: str, path: str, name: str
) -> None:
  """Checks that a source and its target have the same tokens.

  Args:
    source: the source; must have vocabularies.
    side: stack of the target to be initialized.
    path: path of the target's vocabulary; may not exist yet.
    name: name of the target in the error.

  Raises:
    UserError: the vocabularies differ, or a vocabulary is damaged.
  """
  # A decoder-only model has only 'decoder', even as the source of an encoder.
  theirs = source.vocabularies.path(
    side if side in source.model.stacks else 'decoder'
  )
  # A vocabulary yet to be trained differs from the source's.
  if not vocabulary_pair.exists(path) or not same_tokens(path, theirs):
    key = 'encoder_vocabulary' if side == 'encoder' else 'vocabulary'
    raise errors.UserError(
      f'{source.path} has the vocabulary {theirs}, the {side} of {name} has'
      f' {path}, and they differ: ids would mean other text. Use one vocabulary'
      f' (config.data.{key} of a job).'
    )
