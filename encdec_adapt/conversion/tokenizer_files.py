"""Tokenizer files of an exported folder, compared with our vocabularies.

A folder gets a tokenizer.json and a tokenizer_config.json, so that
`transformers` encodes text as the model was trained on it; the encoder's own
go to the subfolder encoder/ where they are not the decoder's. A model without
a vocabulary that this package can open keeps its own files, and a note says
that nothing was compared.
"""

from collections.abc import Iterator
import pathlib

from encdec_adapt import config as config_lib
from encdec_adapt.conversion import model_on_disk, pretrained_files
from encdec_adapt.data.records import record_sets
from encdec_adapt.files import paths
from encdec_adapt.tokenizers import tokenizer_writer, vocabulary_pair

_RECORDS = 64  # Rows of a run's records whose text is compared.
# Compared for every model: runs of spaces, digits, line ends, characters that
# small vocabularies spell in bytes.
_TEXTS = (
  'The quick brown fox jumps over the lazy dog.',
  '  def f(x):\n\n    return {"a": 1234567890, "b": x ** 2}\n\t# end  ',
  'Caf\u00e9, na\u00efve \u2014 \u4f60\u597d, \u043c\u0438\u0440 \U0001f600!',
)


def write(
  folder: pathlib.Path,
  stored: model_on_disk.StoredModel,
  opened: vocabulary_pair.Opened | None,
) -> list[str]:
  """Writes the tokenizer files of a model and compares ids.

  Args:
    folder: an empty local folder.
    stored: the model.
    opened: vocabularies of the model; None if there are none.

  Returns:
    Notes for the user.

  Raises:
    UserError: a file is damaged, or encodes a text to other ids than our
      vocabulary.
  """
  found = pretrained_files.folders(stored.path)
  kept = {
    stack: {
      name: path / name
      for name in pretrained_files.TOKENIZER
      if (path / name).is_file()
    }
    for stack, path in found.items()
  }
  notes = []
  for side in ('decoder', 'encoder'):
    files = kept.get(side, {})
    if side == 'encoder' and not _is_own(
      files, kept.get('decoder', {}), opened
    ):
      continue
    target = folder if side == 'decoder' else folder / model_on_disk.ENCODER
    target.mkdir(exist_ok=True)
    for name, file in files.items():
      paths.copy(file, target / name)
    if opened:
      one = opened.sides[side]
      notes.append(tokenizer_writer.write(target, one))
      tokenizer_writer.check(target, one, _sample_texts(stored, opened, side))
  if opened is None and not kept.get('decoder'):
    notes.append('the model has no tokenizer, so none is written.')
  elif opened is None:
    notes.append(
      'the tokenizer files of the source are written as they are, and their'
      ' ids were not compared with those of the model, which has no vocabulary'
      ' that encdec_adapt can use.'
    )
  return [note for note in notes if note]


def _is_own(
  files: dict[str, paths.Path],
  decoders: dict[str, paths.Path],
  opened: vocabulary_pair.Opened | None,
) -> bool:
  """Returns whether the encoder has tokenizer files of its own."""
  return bool(opened and opened.differ) or any(
    name not in decoders or file.read_bytes() != decoders[name].read_bytes()
    for name, file in files.items()
  )


def _sample_texts(
  stored: model_on_disk.StoredModel, opened: vocabulary_pair.Opened, side: str
) -> Iterator[str]:
  """Yields texts to compare: fixed ones, and those of the run's records."""
  yield from _TEXTS
  if stored.checkpoint is None:
    return
  folder = paths.at(config_lib.load_run(str(stored.path)).data.folder) / 'eval'
  if not (folder / record_sets.MANIFEST).exists():
    return
  found = record_sets.RecordSet.open(folder)
  made = {name: getattr(found.spec, name) for name in opened.fingerprints}
  if made != opened.fingerprints:
    return  # The records were made again, for another run.
  for row in found.read(range(min(_RECORDS, len(found)))):
    for pair in row:
      ids = pair.inputs if side == 'encoder' else pair.targets
      yield opened.sides[side].decode(ids)
