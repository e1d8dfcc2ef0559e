"""SeqIO tasks: the definition of an example.

A task reads the documents of a source in one split and pass, encodes them and
makes pairs by an objective; a mixture takes the examples of several tasks in
turn. Data sources have any number of virtual shards: shard i of n has the
documents whose index is i modulo n. An example depends only on the seed, the
pass, the source and its own id, so a shard always has the same examples, on
every machine and in every run.

This module imports SeqIO and TensorFlow (about ten seconds, 800 MB). It is
imported only where records are made, never in a process that trains from them.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import re

import numpy as np
import seqio
import tensorflow as tf

from encdec_adapt.data import (
  batch,
  mixtures,
  objectives,
  randomness,
  text_split,
)
from encdec_adapt.tokenizers import vocabularies, vocabulary

# Token features of an example; the last one only with `text_split`.
_PARTS = ('inputs', 'targets', 'prefix')
# Other features of an example.
_ABOUT = ('source', 'id', 'shared_spans')
_ROWS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Example:
  """One example.

  Attributes:
    pair: inputs and targets, unframed.
    source: name of the source.
    id: the document's id, '#' and the window's number in the document.
    shared_spans: number of spans that share their sentinel with another.
  """

  pair: batch.Pair
  source: str
  id: str
  shared_spans: int


class SeqioVocabulary(seqio.Vocabulary):
  """Adapter from our vocabularies to SeqIO's, with the same ids.

  `seqio.SentencePieceVocabulary` encodes in TensorFlow, where a U+2581 in a
  text becomes a space and the names of special pieces in Gemma's own files
  match in text.
  """

  def __init__(self, one: vocabulary.Vocabulary):
    super().__init__(extra_ids=0)
    self._vocabulary = one

  @property
  def bos_id(self) -> int:
    return self._vocabulary.bos

  @property
  def pad_id(self) -> int:
    return self._vocabulary.pad

  @property
  def eos_id(self) -> int:
    return self._vocabulary.eos

  @property
  def unk_id(self) -> int | None:
    return self._vocabulary.unk

  @property
  def _base_vocab_size(self) -> int:
    return self._vocabulary.size

  def _encode(self, s: str) -> list[int]:
    return self._vocabulary.encode(s).tolist()

  def _decode(self, ids: Sequence[int]) -> str:
    return self._vocabulary.decode(ids)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text: bytes) -> np.ndarray:
      # Run eagerly, TensorFlow gives an array of rank 0.
      text = np.asarray(text, object).item()
      return self._vocabulary.encode(text.decode('utf-8'))

    ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    return tf.ensure_shape(ids, [None])

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    def decode(row: np.ndarray) -> bytes:
      return self._vocabulary.decode(row).encode('utf-8')

    text = tf.numpy_function(decode, [ids], tf.string, stateful=False)
    return tf.ensure_shape(text, [])

  def __eq__(self, other) -> bool:
    return (
      isinstance(other, SeqioVocabulary)
      and self._vocabulary.fingerprint == other._vocabulary.fingerprint
    )

  def __hash__(self) -> int:
    return hash(self._vocabulary.fingerprint)


class DocumentSource(seqio.DataSource):
  """Documents of a source in one split and pass: scalars 'id' and 'text'.

  Attributes:
    failure: exception of the reader, which TensorFlow turns into a string.
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
    shard = (shard_info.index, shard_info.num_shards) if shard_info else ()

    def read():
      try:
        for document in self._part.documents(self._draw, *shard):
          # Bytes, as TensorFlow drops NUL from the end of a str.
          yield {
            'id': document.id.encode('utf-8'),
            'text': document.text.encode('utf-8'),
          }
      except Exception as error:
        self.failure = error
        raise

    scalar = tf.TensorSpec([], tf.string)
    return tf.data.Dataset.from_generator(
      read, output_signature={'id': scalar, 'text': scalar}
    )


def make_task(
  part: mixtures.Part,
  draw: mixtures.Draw,
  opened: vocabularies.Opened,
  objective: objectives.Objective | text_split.TextSplit,
) -> seqio.Task:
  """Makes the task of a source and an objective for a split and a pass.

  It is not added to SeqIO's registry.

  Args:
    part: source and weight.
    draw: split, seed and pass.
    opened: vocabularies.
    objective: objective for the lengths of the rows.
  """
  source = part.source.name
  encoder, decoder = (
    seqio.Feature(SeqioVocabulary(side), add_eos=False)
    for side in (opened.encoder, opened.decoder)
  )
  features = {'inputs': encoder, 'targets': decoder}
  if objective.reads == 'text':
    features['prefix'] = decoder
  key = functools.partial(
    randomness.generator, draw.seed, draw.pass_index, source
  )
  # SeqIO allows no other characters; the digest keeps names apart.
  name = re.sub(r'[^\w.:#]', '_', f'{objective.name}:{source}')
  return seqio.Task(
    f'{name}#{randomness.digest(source):032x}',
    source=DocumentSource(part, draw),
    preprocessors=([tokenise] if objective.reads == 'tokens' else [])
    + [
      functools.partial(
        apply_objective, objective=objective, key=key, source=source
      ),
    ],
    output_features=features,
    metric_fns=[],
  )


def make_mixture(
  parts: Sequence[mixtures.Part],
  draw: mixtures.Draw,
  opened: vocabularies.Opened,
  objective: objectives.Objective | text_split.TextSplit,
) -> seqio.Mixture:
  """Mixes the tasks of several sources; for arguments see `make_task`.

  Weights count the draws of a document, so a shard of the mixture has all
  examples of the tasks' shards. They come in turn: a random order would depend
  on the position.
  """
  tasks = [make_task(part, draw, opened, objective) for part in parts]
  rates = [part.weight for part in parts]
  return seqio.Mixture(
    f'{objective.name}:mixture',
    list(zip(tasks, rates, strict=True)),
    sample_fn=_take_turns,
  )


def _take_turns(
  datasets: Sequence[tf.data.Dataset], rates: Sequence[float], seed: int
) -> tf.data.Dataset:
  """Takes an example of each dataset in turn until all are exhausted."""
  del rates, seed
  turns = tf.data.Dataset.range(len(datasets)).repeat()
  return tf.data.Dataset.choose_from_datasets(
    datasets, turns, stop_on_empty_dataset=False
  )


def tokenise(
  dataset: tf.data.Dataset, output_features: dict[str, seqio.Feature]
) -> tf.data.Dataset:
  """SeqIO preprocessor that encodes 'text' as 'tokens', int32 [n]."""
  vocabulary = output_features['targets'].vocabulary

  def encode(row):
    return {'id': row['id'], 'tokens': vocabulary.encode_tf(row['text'])}

  return dataset.map(encode)


def apply_objective(
  dataset: tf.data.Dataset,
  objective: objectives.Objective | text_split.TextSplit,
  key: Callable[[str], np.random.Generator],
  source: str,
) -> tf.data.Dataset:
  """SeqIO preprocessor that turns documents into examples.

  Args:
    dataset: dataset with 'id' and the objective's input, 'tokens' or 'text'.
    objective: makes the pairs.
    key: returns the generator of an example by its id.
    source: name of the source.

  Returns:
    A dataset with the parts of a pair ('inputs', 'targets' and, if the text
    is split, 'prefix'), int32, and the other attributes of `Example`.
  """
  names = _PARTS if objective.reads == 'text' else _PARTS[:2]

  def make(document_id: bytes, content: np.ndarray):
    document = document_id.decode('utf-8')
    if objective.reads == 'text':
      # Run eagerly, TensorFlow gives an array of rank 0.
      content = np.asarray(content, object).item().decode('utf-8')
    pairs = list(objective.pairs(content, lambda i: key(f'{document}#{i}')))
    ids = [f'{document}#{i}'.encode() for i in range(len(pairs))]
    shared = [objective.shared_spans(pair) for pair in pairs]
    parts = []
    for side in zip(*(pair.parts for pair in pairs), strict=True):
      parts += [np.concatenate(side), np.array([len(row) for row in side])]
    return (*parts, np.array(ids, object), np.array(shared, np.int32))

  # [inputs, their lengths, targets, their lengths, .., ids, shared spans]
  types = (tf.int32, tf.int64) * len(names) + (tf.string, tf.int32)

  def examples(row):
    made = tf.numpy_function(
      make, [row['id'], row[objective.reads]], types, stateful=False
    )
    *sides, ids, shared = [tf.ensure_shape(one, [None]) for one in made]
    ragged = functools.partial(tf.RaggedTensor.from_row_lengths, validate=False)
    return {
      **{
        name: ragged(tokens, lengths)
        for name, tokens, lengths in zip(
          names, sides[::2], sides[1::2], strict=True
        )
      },
      'source': tf.fill(tf.shape(ids), source),
      'id': ids,
      'shared_spans': shared,
    }

  return dataset.map(examples).unbatch()


def examples(
  mixture: seqio.Mixture, shard_index: int, num_shards: int
) -> Iterator[Example]:
  """Yields the examples of one virtual shard, always in the same order.

  Args:
    mixture: mixture by `make_mixture`.
    shard_index: number of the shard, in [0, num_shards).
    num_shards: number of shards.

  Raises:
    UserError: a source is missing or has no text.
  """
  # TensorFlow would take all memory of a GPU.
  if tf.config.get_visible_devices('GPU'):
    tf.config.set_visible_devices([], 'GPU')
  (split,) = mixture.splits
  dataset = mixture.get_dataset(
    split=split,
    shuffle=False,
    shard_info=seqio.ShardInfo(shard_index, num_shards),
    num_epochs=1,
    passthrough_features=_ABOUT,
  )
  # One element at a time costs five times as much.
  rows = dataset.ragged_batch(_ROWS_AT_ONCE)
  try:
    for some in rows:
      tokens = zip(
        *(_rows(some[name]) for name in _PARTS if name in some), strict=True
      )
      about = (some[name].numpy().tolist() for name in _ABOUT)
      for parts, name, example_id, *counts in zip(tokens, *about, strict=True):
        pair = batch.Pair(*parts)
        yield Example(pair, name.decode(), example_id.decode(), *counts)
  except tf.errors.OpError:
    for failure in (task.source.failure for task in mixture.tasks):
      if failure is not None:
        raise failure from None
    raise


def _rows(ragged: tf.RaggedTensor) -> list[np.ndarray]:
  """Splits a ragged batch into its rows."""
  return np.split(ragged.values.numpy(), ragged.row_splits.numpy()[1:-1])
