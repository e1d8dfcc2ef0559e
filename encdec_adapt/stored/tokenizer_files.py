"""Tokenizer files of an exported folder, compared with our vocabularies.

A folder gets a tokenizer.json and a tokenizer_config.json, so that
`transformers` encodes text as in training. If the stacks have different
tokenizers, the encoder's is at the top and the decoder's in decoder_tokenizer/.
Unsupported tokenizers are copied, with a note that they were not compared. The
conversion itself is in `tokenizers.tokenizer_writer`.
"""

from collections.abc import Iterator, Mapping
import pathlib

from encdec_adapt import config as config_lib
from encdec_adapt.data.records import record_sets
from encdec_adapt.files import paths
from encdec_adapt.stored import model_on_disk, pretrained_files
from encdec_adapt.tokenizers import tokenizer_writer, vocabulary_pair

_RECORDS = 64  # Rows of a run's records to compare.


def write(
  folder: pathlib.Path,
  stored: model_on_disk.StoredModel,
  opened: vocabulary_pair.Opened | None,
  reads: str,
) -> list[str]:
  """Writes the tokenizer files of a model and compares ids.

  Args:
    folder: an empty local folder.
    stored: the model.
    opened: vocabularies of the model; None if there are none.
    reads: side of `opened` used by a single-stack model.

  Returns:
    Notes for the user.

  Raises:
    UserError: a file is damaged, or its ids of a text differ from our
      vocabulary's.
  """
  sources = {
    stack: {
      name: path / name
      for name in vocabulary_pair.FILES
      if (path / name).is_file()
    }
    for stack, path in pretrained_files.tokenizer_folders(stored.path).items()
  }
  notes, decoder_files = [], sources.get('decoder', {})
  if opened is None and not decoder_files:
    # Omit the encoder's too: readers would use it for the decoder.
    return ['the decoder has no tokenizer, so none is written.']
  # Compare contents, not paths: the stacks may have copies of one file.
  differ = (opened is not None and opened.differ) or any(
    name not in decoder_files
    or file.read_bytes() != decoder_files[name].read_bytes()
    for name, file in sources.get('encoder', {}).items()
  )
  targets = {'decoder': folder}
  if differ and (opened is None or stored.model.architecture.encodes_prompt):
    separate = folder / model_on_disk.DECODER_TOKENIZER
    targets = {'encoder': folder, 'decoder': separate}
  elif differ:  # A stack of a pair with two vocabularies reads one.
    targets = {reads: folder}
    own = opened.sides[reads].fingerprint
    found = (x for x in sources.values() if _fingerprint(x) == own)
    sources = {reads: next(found, {})}
  for side, target in targets.items():
    files = sources.get(side, {})
    target.mkdir(exist_ok=True)
    # First, as the writer completes existing files.
    for name, file in files.items():
      paths.copy(file, target / name)
    if opened:
      vocabulary = opened.sides[side]
      notes.append(tokenizer_writer.write(target, vocabulary))
      texts = _sample_texts(stored, opened, side)
      tokenizer_writer.check(target, vocabulary, texts)
  if opened is None:
    notes.append(
      'the tokenizer files of the source are written as they are, and their'
      ' ids were not compared with those of the model, which has no vocabulary'
      ' that encdec_adapt can use.'
    )
  return list(filter(None, notes))


def _fingerprint(files: Mapping[str, paths.Path]) -> str:
  file = next(iter(files.values()), None)
  return (
    vocabulary_pair.open_vocabulary(file.parent).fingerprint if file else ''
  )


def _sample_texts(
  stored: model_on_disk.StoredModel, opened: vocabulary_pair.Opened, side: str
) -> Iterator[str]:
  yield from tokenizer_writer.TEXTS
  if stored.checkpoint is None:
    return
  # Held-out rows: real text in the languages and formats of training.
  folder = paths.at(config_lib.load_run(str(stored.path)).data.folder) / 'eval'
  if not (folder / record_sets.MANIFEST).exists():
    return
  records = record_sets.RecordSet.open(folder)
  spec, fingerprints = records.spec, opened.fingerprints
  # Encoder-only models have their text in the inputs.
  reads = side == 'encoder' or spec.objectives[0].rows.sides == ('encoder',)
  if any(getattr(spec, name) != fingerprints[name] for name in fingerprints):
    return  # The records were rebuilt for another run.
  for row in records.read(range(min(_RECORDS, len(records)))):
    for pair in row:
      ids = pair.inputs if reads else pair.targets
      yield opened.sides[side].decode(ids)
