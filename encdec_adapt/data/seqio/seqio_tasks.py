"""SeqIO tasks: the definition of an example.

A task reads the documents of a source in one split and pass, and makes pairs
by an objective. An objective is an ordinary preprocessor (`make_pairs`), which
a task of a user's own may have too:

    seqio.TaskRegistry.add(
      'my_ul2',
      source=..,  # Examples with 'text', and 'id' if they have one.
      preprocessors=[functools.partial(tasks.make_pairs, objective='ul2')],
      output_features=tasks.features(vocabulary),
    )

This module registers the task `encdec_adapt_OBJECTIVE` for every objective of
text: Python's own in bytes, with sentinels. `encdec_adapt_prefix_lm_and_ul2` is
a mixture of two.

Data sources have any number of virtual shards, each of which reads its share of
a source (`data/sources/document_source.py`). An example depends only on the
seed, the pass, the source and its own id, so a shard always has the same
examples, on every machine and in every run. Records are made from `documents`,
which fetches many documents at a time from TensorFlow, because one at a time
costs a multiple of reading them.

This module imports SeqIO and TensorFlow (about ten seconds, 800 MB). It is
imported only where records are made, never in a process that trains from them.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
import itertools
import re
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from encdec_adapt.base import errors
from encdec_adapt.data.sources import (
  document_source,
  mixtures,
  text_sources,
)
from encdec_adapt.objectives import (
  definition,
  framing,
  parsing,
  randomness,
)
from encdec_adapt.tokenizers import vocabulary, vocabulary_pair

_DOCUMENTS_AT_ONCE = 256
# Sentinels of the registered tasks.
_SENTINELS = 100
# Of a pair, as SeqIO has them.
_FIELDS: dict[str, Any] = {
  'inputs': np.int32,
  'targets': np.int32,
  'decoder_inputs': np.int32,
  'weights': np.float32,
}
# Of `_flatten`: tokens and lengths of every field, and the documents' ids.
_FLAT_TYPES = (
  *(kind for dtype in _FIELDS.values() for kind in (dtype, np.int64)),
  tf.string,
)


class SeqioVocabulary(seqio.Vocabulary):
  """Adapter from our vocabularies to SeqIO's, with the same ids.

  Attributes:
    ours: the adapted vocabulary.

  `seqio.SentencePieceVocabulary` encodes in TensorFlow, where a U+2581 in a
  text becomes a space and the names of special pieces in Gemma's own files
  match in text.
  """

  def __init__(self, one: vocabulary.Vocabulary):
    super().__init__(extra_ids=0)
    self.ours = one

  @property
  def bos_id(self) -> int:
    return self.ours.bos

  @property
  def pad_id(self) -> int:
    return self.ours.pad

  @property
  def eos_id(self) -> int:
    return self.ours.eos

  @property
  def unk_id(self) -> int | None:
    return self.ours.unk

  @property
  def _base_vocab_size(self) -> int:
    return self.ours.size

  def _encode(self, s: str) -> list[int]:
    return self.ours.encode(s).tolist()

  def _decode(self, ids: Sequence[int]) -> str:
    return self.ours.decode(ids)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text: bytes) -> np.ndarray:
      # Run eagerly, TensorFlow gives an array of rank 0.
      text = np.asarray(text, object).item()
      return self.ours.encode(text.decode('utf-8'))

    ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    return tf.ensure_shape(ids, [None])

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    def decode(row: np.ndarray) -> bytes:
      return self.ours.decode(row).encode('utf-8')

    text = tf.numpy_function(decode, [ids], tf.string, stateful=False)
    return tf.ensure_shape(text, [])

  def __eq__(self, other) -> bool:
    return (
      isinstance(other, SeqioVocabulary)
      and self.ours.fingerprint == other.ours.fingerprint
    )

  def __hash__(self) -> int:
    return hash(self.ours.fingerprint)


class DocumentSource(seqio.DataSource):
  """Documents of a source in one split and pass: scalars 'id' and 'text'.

  Attributes:
    failure: exception that ended the reading, else None.
  """

  def __init__(self, part: mixtures.Part, draw: mixtures.Draw):
    super().__init__(splits=(draw.split,), caching_permitted=False)
    self.failure: Exception | None = None
    self._part = part
    self._draw = draw

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return True

  def list_shards(self, split: str) -> Sequence[str]:
    return [self._part.source.name]

  def get_dataset(
    self,
    split: str = 'train',
    shuffle: bool = False,
    seed: int | None = None,
    shard_info: seqio.ShardInfo | None = None,
    **unused,
  ) -> tf.data.Dataset:
    """Returns the documents of a shard in the source's order.

    Raises:
      ValueError: `shuffle` is set; rows are shuffled when they are read.
    """
    if shuffle:
      name = self._part.source.name
      raise ValueError(f'{name!r} is read in order: shuffle=False')
    return self.batches(shard_info).unbatch()

  def batches(
    self, shard_info: seqio.ShardInfo | None, *, raises: bool = True
  ) -> tf.data.Dataset:
    """Returns batches of the documents of a shard: 'id' and 'text', [n].

    Args:
      shard_info: number of the shard and of all; None for all documents.
      raises: whether the dataset raises the reader's exception, which
        TensorFlow logs with two tracebacks, or ends where it is raised, for
        callers that check `failure`.
    """
    shard = (shard_info.index, shard_info.num_shards) if shard_info else ()

    def read():
      try:
        found = self._part.documents(self._draw, *shard)
        while some := list(itertools.islice(found, _DOCUMENTS_AT_ONCE)):
          # Bytes, as TensorFlow drops NUL from the end of a str.
          yield {
            'id': [document.id.encode('utf-8') for document in some],
            'text': [document.text.encode('utf-8') for document in some],
          }
      except Exception as error:
        self.failure = error
        if raises:
          raise

    strings = tf.TensorSpec([None], tf.string)
    return tf.data.Dataset.from_generator(
      read, output_signature={'id': strings, 'text': strings}
    )


def documents(
  part: mixtures.Part, draw: mixtures.Draw, shard_index: int, num_shards: int
) -> Iterator[document_source.Document]:
  """Yields the documents of one virtual shard, always in the same order.

  Args:
    part: source and weight.
    draw: split, seed and pass.
    shard_index: number of the shard, in [0, num_shards).
    num_shards: number of shards.

  Raises:
    UserError: the source is missing or has no text.
  """
  source = DocumentSource(part, draw)
  shard = seqio.ShardInfo(shard_index, num_shards)
  for some in source.batches(shard, raises=False):
    names, texts = some['id'].numpy(), some['text'].numpy()
    for name, text in zip(names, texts, strict=True):
      yield document_source.Document(name.decode(), text.decode())
  if source.failure is not None:
    raise source.failure


def features(one: vocabulary.Vocabulary) -> dict[str, seqio.Feature]:
  """Returns the output features of pairs in a vocabulary of ours."""
  feature = seqio.Feature(SeqioVocabulary(one), add_eos=False)
  return {'inputs': feature, 'targets': feature}


def make_pairs(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, seqio.Feature],
  *,
  objective: str,
  sentinels: str = 'unique',
  source: str = '',
  seed: int = 0,
  pass_index: int = 0,
) -> tf.data.Dataset:
  """SeqIO preprocessor that turns documents into the pairs of an objective.

  An objective that concatenates documents does so with 256 of them.

  Args:
    dataset: examples with 'text', and 'id' if the source has names for them;
      otherwise they are named by their position in the dataset, which makes
      their random draws depend on the shards.
    sequence_length: length of 'inputs' and 'targets' in tokens; 0 or no entry
      for a side that the objective does not fill.
    output_features: 'inputs' and 'targets' with a vocabulary of ours.
    objective: name of the objective (`objectives/parsing.py`).
    sentinels: policy for sentinels (`objectives/denoising.py`).
    source: name of the source; part of the key of all random draws.
    seed: seed of all random draws.
    pass_index: pass over the source; every pass draws again.

  Returns:
    A dataset with 'inputs' and 'targets', int32 [n]; 'decoder_inputs' and
    'weights', of the length of the targets or empty; and 'documents', the ids
    of the documents.
  """
  parsed = parsing.parse_one(objective)
  if parsed.documents != 'text' or not sequence_length:
    raise errors.UserError(
      f'make_pairs with objective {objective!r} and sequence_length'
      f' {sequence_length}: it takes objectives of text, and needs the lengths'
      ' of inputs and targets'
    )
  vocabulary = output_features['targets'].vocabulary
  if not isinstance(vocabulary, SeqioVocabulary):
    raise errors.UserError(
      f'make_pairs needs a vocabulary of ours (tasks.features), not'
      f' {type(vocabulary).__name__}: it has to know sentinels and modes'
    )
  one = vocabulary.ours
  made = parsed.make(
    framing.Lengths(
      sequence_length.get('inputs', 0), sequence_length.get('targets', 0)
    ),
    one,
    sentinel_policy=sentinels,
  )
  key = randomness.Keyed(seed, pass_index, source)

  def make(names: np.ndarray, texts: np.ndarray) -> list[np.ndarray]:
    return _flatten(_pairs_of(made, one, key, names, texts))

  def pairs_of(some: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    flat = tf.numpy_function(
      make, [some['id'], some['text']], _FLAT_TYPES, stateful=False
    )
    return _rows_from_flat(flat)

  if 'id' not in dataset.element_spec:
    dataset = dataset.enumerate().map(
      lambda i, one: one | {'id': tf.strings.as_string(i)}
    )
  return dataset.batch(_DOCUMENTS_AT_ONCE).map(pairs_of).unbatch()


def _pairs_of(
  made: definition.ExampleMaker,
  one: vocabulary.Vocabulary,
  key: randomness.Keyed,
  names: np.ndarray,
  texts: np.ndarray,
) -> list[framing.Pair]:
  """Makes the pairs of a batch of documents; ids and texts are UTF-8, [n]."""
  found = (
    (name.decode(), one.encode(text.decode('utf-8')))
    for name, text in zip(names, texts, strict=True)
  )

  def generator(name: str) -> np.random.Generator:
    """Windows over several documents are named by the first of the batch."""
    first = names[0].decode() if name.startswith('#') else ''
    return key(first + name)

  return list(made.examples(found, generator))


def _flatten(pairs: Sequence[framing.Pair]) -> list[np.ndarray]:
  """Returns what TensorFlow takes of pairs, in the order of `_FLAT_TYPES`.

  Returns:
    The tokens of all pairs and the length of each, for every field, and the
    ids of their documents.
  """
  columns = []
  for field, dtype in _FIELDS.items():
    parts = [getattr(pair, field) for pair in pairs]
    parts = [np.zeros(0, dtype) if part is None else part for part in parts]
    columns += [
      np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype),
      np.array([len(part) for part in parts], np.int64),
    ]
  ids = np.array([' '.join(pair.documents).encode() for pair in pairs], object)
  return [*columns, ids]


def _rows_from_flat(flat: Sequence[tf.Tensor]) -> dict[str, Any]:
  """Returns the fields of a dataset, a row for every pair, from `_flatten`."""
  *columns, ids = [tf.ensure_shape(column, [None]) for column in flat]
  result = {'documents': ids}
  for i, field in enumerate(_FIELDS):
    result[field] = tf.RaggedTensor.from_row_lengths(
      columns[2 * i], columns[2 * i + 1], validate=False
    )
  return result


def make_task(
  part: mixtures.Part,
  draw: mixtures.Draw,
  one: vocabulary.Vocabulary,
  objective: str,
  **options: Any,
) -> seqio.Task:
  """Makes the task of a source and an objective for a split and a pass.

  It is not added to SeqIO's registry.

  Args:
    part: source and weight.
    draw: split, seed and pass.
    one: vocabulary of both sides.
    objective: name of the objective.
    **options: further options of `make_pairs`.
  """
  source = part.source.name
  return seqio.Task(
    f'{_name(objective)}_{_name(source)}_{randomness.digest(source):032x}',
    source=DocumentSource(part, draw),
    preprocessors=[
      functools.partial(
        make_pairs,
        objective=objective,
        source=source,
        seed=draw.seed,
        pass_index=draw.pass_index,
        **options,
      )
    ],
    output_features=features(one),
    metric_fns=[],
  )


def _name(text: str) -> str:
  """Replaces the characters that SeqIO does not allow in names."""
  return re.sub(r'[^\w.]', '_', text)


def register() -> None:
  """Registers the shipped tasks and mixtures (the module's docstring)."""
  one = vocabulary_pair.open_vocabulary(
    vocabulary_pair.BYTES, added_sentinels=_SENTINELS
  )
  for name, entry in parsing.NAMES.items():
    if name == 'denoise' or entry.maker.documents != 'text':
      continue
    seqio.TaskRegistry.add(
      f'encdec_adapt_{name}',
      source=seqio.FunctionDataSource(_python_text, splits=('train', 'eval')),
      preprocessors=[
        functools.partial(
          make_pairs, objective=name, sentinels='recycle', source='python'
        )
      ],
      output_features=features(one),
      metric_fns=[],
    )
  seqio.MixtureRegistry.add(
    'encdec_adapt_prefix_lm_and_ul2',
    ['encdec_adapt_prefix_lm', 'encdec_adapt_ul2'],
    default_rate=1.0,
  )


def _python_text(
  split: str, shuffle_files: bool, seed: int | None = None
) -> tf.data.Dataset:
  """Returns the documents of a split of Python's own text, in order."""
  del shuffle_files, seed  # The order of the source is that of hashes.
  part = mixtures.Part(text_sources.open_source('python'), 1.0)
  draw = mixtures.Draw(split, eval_fraction=0.04, seed=0)
  return DocumentSource(part, draw).batches(None).unbatch()


register()
