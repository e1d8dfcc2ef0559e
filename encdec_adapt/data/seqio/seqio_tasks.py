"""SeqIO tasks: the definition of an example.

A task reads the documents of a source in a split and a pass and makes pairs
with an objective. The objective is an ordinary preprocessor (`make_pairs`),
available to users' tasks:

    seqio.TaskRegistry.add(
      'my_ul2',
      source=..,  # Examples with 'text', and optionally 'id'.
      preprocessors=[functools.partial(seqio_tasks.make_pairs,
      objective='ul2')], output_features=seqio_tasks.features(vocabulary),
    )

This module registers the task `encdec_adapt_OBJECTIVE` for every text
objective, on the source `python` with a byte vocabulary and sentinels, and
`encdec_adapt_prefix_lm_and_ul2`, a mixture of two.

Data sources have any number of virtual shards, each with its share of a source
(`data/sources/document_source.py`). An example depends only on the seed, the
pass, the source and its id, so a shard has the same examples on every machine
and in every run. Records (`data/making/shard_jobs.py`) use the same documents
and objectives, without this module.

This module imports SeqIO and TensorFlow (about ten seconds, 800 MB). Sources
`seqio:..` and users of the tasks import it.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
import re
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from encdec_adapt.base import errors
from encdec_adapt.data.sources import mixtures, text_sources
from encdec_adapt.objectives import (
  example_maker,
  framing,
  objective_names,
  randomness,
)
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib
from encdec_adapt.tokenizers import vocabulary_pair

# Documents per batch. In `make_pairs`, windows of concatenated documents do not
# cross batches, so this number changes the examples of users' tasks.
_DOCUMENTS_AT_ONCE = 256
# Sentinels of the registered tasks, as in T5's vocabulary.
_SENTINELS = 100
# SeqIO features of a pair.
_FIELDS: dict[str, Any] = {
  'inputs': np.int32,
  'targets': np.int32,
  'decoder_inputs': np.int32,
  'weights': np.float32,
}
# Dtypes of the results of `_flatten`, which TensorFlow needs in advance: tokens
# and lengths of every field, and document ids.
_FLAT_TYPES = (
  *(kind for dtype in _FIELDS.values() for kind in (dtype, np.int64)),
  tf.string,
)


class SeqioVocabulary(seqio.Vocabulary):
  """Adapter from our vocabularies to SeqIO vocabularies with the same ids.

  Attributes:
    ours: adapted vocabulary.

  `seqio.SentencePieceVocabulary` encodes in TensorFlow, which turns U+2581 in a
  text into a space and matches the names of special pieces of Gemma's files
  in text.
  """

  def __init__(self, ours: vocabulary_lib.Vocabulary):
    # Our vocabulary's size includes sentinels, which SeqIO would add as extra
    # ids.
    super().__init__(extra_ids=0)
    self.ours = ours

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
      # In eager mode, TensorFlow passes an array of rank 0.
      text = np.asarray(text, object).item()
      return self.ours.encode(text.decode('utf-8'))

    # Not stateful: TensorFlow may merge or drop calls.
    ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    return tf.ensure_shape(ids, [None])

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    def decode(row: np.ndarray) -> bytes:
      return self.ours.decode(row).encode('utf-8')

    text = tf.numpy_function(decode, [ids], tf.string, stateful=False)
    return tf.ensure_shape(text, [])

  # SeqIO requires equal vocabularies for the tasks of a mixture, even if opened
  # separately.
  def __eq__(self, vocabulary: object) -> bool:
    return (
      isinstance(vocabulary, SeqioVocabulary)
      and self.ours.fingerprint == vocabulary.ours.fingerprint
    )

  def __hash__(self) -> int:
    return hash(self.ours.fingerprint)


class DocumentSource(seqio.DataSource):
  """Documents of a split and pass of a source: scalars 'id' and 'text'."""

  def __init__(self, part: mixtures.Part, draw: mixtures.Draw):
    # SeqIO keys its cache by the task's name, which lacks the pass.
    super().__init__(splits=(draw.split,), caching_permitted=False)
    self._part = part
    self._draw = draw

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return True

  def list_shards(self, split: str) -> Sequence[str]:
    # One name suffices: sources divide into any number of shards.
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
      ValueError: `shuffle` is set; rows are shuffled on reading.
    """
    if shuffle:
      raise ValueError(
        f'{self._part.source.name!r} is read in order: shuffle=False'
      )
    shard = (shard_info.index, shard_info.num_shards) if shard_info else ()

    def read():
      stream = self._part.documents(self._draw, *shard)
      # Passing single documents would cost several times as much as reading
      # them.
      while batch := list(itertools.islice(stream, _DOCUMENTS_AT_ONCE)):
        # Bytes, because TensorFlow strips trailing NULs from a str.
        yield {
          'id': [document.id.encode('utf-8') for document in batch],
          'text': [document.text.encode('utf-8') for document in batch],
        }

    strings = tf.TensorSpec([None], tf.string)
    return tf.data.Dataset.from_generator(
      read, output_signature={'id': strings, 'text': strings}
    ).unbatch()


def features(ours: vocabulary_lib.Vocabulary) -> dict[str, seqio.Feature]:
  """Returns the output features of pairs in an encdec_adapt vocabulary."""
  # Objectives append EOS themselves.
  feature = seqio.Feature(SeqioVocabulary(ours), add_eos=False)
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
  """SeqIO preprocessor that turns documents into an objective's pairs.

  Objectives that concatenate documents do so in batches of 256.

  Args:
    dataset: examples with 'text' and optionally 'id'; without 'id', the
      position in the dataset is the name, so that random draws depend on the
      sharding.
    sequence_length: length of 'inputs' and 'targets' in tokens; 0 or no entry
      for a side not used by the objective.
    output_features: 'inputs' and 'targets' with a vocabulary of this package.
    objective: name of the objective (`objectives/objective_names.py`).
    sentinels: policy for sentinels (`objectives/denoising.py`).
    source: name of the source; part of every random key.
    seed: seed of all random draws.
    pass_index: pass over the source, with independent draws.

  Returns:
    A dataset with 'inputs' and 'targets', int32 [n]; 'decoder_inputs' and
    'weights', as long as the targets or empty; and 'documents', the document
    ids.
  """
  parsed = objective_names.parse_one(objective)
  if parsed.maker.documents != 'text' or not sequence_length:
    raise errors.UserError(
      f'make_pairs with objective {objective!r} and sequence_length'
      f' {sequence_length}: it takes objectives of text, and needs the lengths'
      ' of inputs and targets'
    )
  adapter = output_features['targets'].vocabulary
  if not isinstance(adapter, SeqioVocabulary):
    raise errors.UserError(
      'make_pairs needs a vocabulary of this package (seqio_tasks.features),'
      f' not {type(adapter).__name__}: it has to know sentinels and modes'
    )
  lengths = framing.Lengths(
    sequence_length.get('inputs', 0),
    sequence_length.get('targets', 0),
    adapter.ours.ids.frame_size,
  )
  flat_pairs = functools.partial(
    _flat_pairs,
    parsed.make(lengths, adapter.ours, sentinel_policy=sentinels),
    adapter.ours,
    randomness.Keyed(seed, pass_index, source),
  )

  def rows(batch: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    # Called with many documents, because each call waits for the GIL.
    return _rows_from_flat(
      tf.numpy_function(
        flat_pairs, [batch['id'], batch['text']], _FLAT_TYPES, stateful=False
      )
    )

  if 'id' not in dataset.element_spec:
    dataset = dataset.enumerate().map(
      lambda i, example: example | {'id': tf.strings.as_string(i)}
    )
  # Not in parallel: all calls share one generator.
  return dataset.batch(_DOCUMENTS_AT_ONCE).map(rows).unbatch()


def _flat_pairs(
  maker: example_maker.ExampleMaker,
  vocabulary: vocabulary_lib.Vocabulary,
  key: randomness.Keyed,
  names: np.ndarray,
  texts: np.ndarray,
) -> list[np.ndarray]:
  """Makes the pairs of a batch of documents; ids and texts are UTF-8, [n]."""
  contents = (
    (name.decode(), vocabulary.encode(text.decode('utf-8')))
    for name, text in zip(names, texts, strict=True)
  )

  def generator(name: str) -> np.random.Generator:
    # Windows over several documents are numbered within the batch; its first
    # document identifies the batch.
    first = names[0].decode() if name.startswith('#') else ''
    return key(first + name)

  return _flatten(list(maker.examples(contents, generator)))


def _flatten(pairs: Sequence[framing.Pair]) -> list[np.ndarray]:
  """Returns pairs as arrays for TensorFlow, in the order of `_FLAT_TYPES`.

  Returns:
    For every field, the tokens of all pairs and the length of each; then the
    document ids.
  """
  columns = []
  for field, dtype in _FIELDS.items():
    # Fixes the dtype of batches without pairs and pairs without the field.
    empty = np.zeros(0, dtype)
    values = [getattr(pair, field) for pair in pairs]
    values = [empty if value is None else value for value in values]
    columns += [
      np.concatenate([empty, *values]).astype(dtype),
      np.array([len(value) for value in values], np.int64),
    ]
  ids = np.array([' '.join(pair.documents).encode() for pair in pairs], object)
  return [*columns, ids]


def _rows_from_flat(flat: Sequence[tf.Tensor]) -> dict[str, Any]:
  # TensorFlow does not know the ranks of a Python function's results.
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
  vocabulary: vocabulary_lib.Vocabulary,
  objective: str,
  **options: Any,
) -> seqio.Task:
  """Builds the task of an objective on a source, for a split and a pass.

  The task is not registered.

  Args:
    part: source and weight.
    draw: split, seed and pass.
    vocabulary: vocabulary of both sides.
    objective: name of the objective.
    **options: further options of `make_pairs`.
  """
  source = part.source.name
  # SeqIO allows few characters in names; the digest disambiguates sources.
  name = re.sub(r'[^\w.]', '_', f'{objective}_{source}')
  return seqio.Task(
    f'{name}_{randomness.digest(source):032x}',
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
    output_features=features(vocabulary),
    metric_fns=[],
  )


def register() -> None:
  """Registers the tasks and mixtures listed in the module's docstring."""
  # Byte vocabularies need no file.
  vocabulary = vocabulary_pair.open_vocabulary(
    vocabulary_pair.BYTES, added_sentinels=_SENTINELS
  )
  for name, entry in objective_names.NAMES.items():
    # Names with a separate parser, such as `denoise`, need options.
    if entry.parse or entry.maker.documents != 'text':
      continue
    seqio.TaskRegistry.add(
      f'encdec_adapt_{name}',
      source=seqio.FunctionDataSource(_python_text, splits=('train', 'eval')),
      preprocessors=[
        functools.partial(
          make_pairs, objective=name, sentinels='recycle', source='python'
        )
      ],
      output_features=features(vocabulary),
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
  del shuffle_files, seed  # The source is ordered by hashes.
  part = mixtures.Part(text_sources.open_source('python'), 1.0)
  draw = mixtures.Draw(split, eval_fraction=0.04, seed=0)
  return DocumentSource(part, draw).get_dataset(split)


register()
