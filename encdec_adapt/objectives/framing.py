"""Framing: how rows of token ids become a batch.

A record row holds pairs of token ids without framing. A pair has inputs
p_0..p_m-1 and targets t_0..t_n-1, and optionally weights w_0..w_n-1 of the
targets and decoder inputs r_0..r_n-1, which the decoder reads in place of the
targets (MEAP's masks). The fields of a batch are, in the pair's segment,

| field            | content of the pair's segment                          |
|------------------|--------------------------------------------------------|
| encoder_tokens   | BOS p_0 .. p_m-1, or of a vocabulary that ends with    |
|                  | EOS (T5's) p_0 .. p_m-1 EOS, behind its opening if it  |
|                  | has one (the `<s>` of CodeT5)                          |
| decoder_tokens   | BOS r_0 .. r_n-2, where r is t unless the pair has it  |
| targets          | t_0 .. t_n-1                                           |
| weights          | w_0 .. w_n-1, or 1; 0 at padding                       |
| *_segments       | 1, 2, .. by pair within the row; 0 at padding          |
| *_positions      | 0, 1, .. restarting with each pair; 0 at padding       |
| teacher_tokens   | BOS p_0 .. p_m-1 r_0 .. r_n-1, pairs contiguous; the   |
|                  | prefix as the decoder's vocabulary has it              |
| teacher_index    | per target, the index in the teacher's row of the      |
|                  | position that predicts it: t_0 is predicted by the     |
|                  | last prefix token, t_j by t_j-1                        |
| window_*         | the text of span corruption as a teacher reads it      |
|                  | (`with_windows`): BOS and the window before any span   |
|                  | was hidden, and the index of the position that         |
|                  | predicts each target                                   |
| row              | index of the record row, -1 for a filler row           |
| stored_*         | ids and probabilities of a stored teacher, k a target  |

So a pair takes m+1 encoder (m+2 behind an opening), n decoder and m+1+n teacher
positions. Each side has BOS and padding of its vocabulary; EOS and the
teacher's tokens are the decoder's. T5's decoders start with padding, which is
its BOS, and the targets of its pairs begin with its opening and end with EOS
unless they are cut. If the encoder has another
vocabulary, the teacher's prefix has another length; the pair then takes as many
encoder positions as the longer of the two prefixes, so that it also fits the
teacher's row.

| model           | reads                                                   |
|-----------------|---------------------------------------------------------|
| encoder-decoder | encoder_* and decoder_*                                 |
| causal decoder  | decoder_* of pairs without inputs, else teacher_*       |
| prefix decoder  | teacher_*, bidirectional over BOS p_0 .. p_m-1          |
| encoder-only    | encoder_*: targets and weights have its length S, those |
|                 | of token p_i at the position that reads it, and weight 0|
|                 | at BOS or EOS. The decoder's length is 0                |

A decoder-only model reads rows of pairs through the teacher's fields, which
gives it the same targets as the encoder-decoder; `on_all_tokens` makes it
predict the inputs too.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from encdec_adapt.tokenizers import special_ids

Batch = dict[str, np.ndarray]
# Logical axes of the fields that rows of several answers to a prompt have for
# each of them, [P, G, L]; the other fields are those of the prompt.
GROUP_AXES = dict.fromkeys(
  ('targets', 'weights', 'teacher_index')
  + ('decoder_tokens', 'decoder_segments', 'decoder_positions')
  + ('teacher_tokens', 'teacher_segments', 'teacher_positions'),
  ('batch', None, 'length'),
)
# Fields of a stored teacher, [B, T, k], and their logical axes.
STORED_IDS, STORED_PROBABILITIES = 'stored_ids', 'stored_probabilities'
STORED_AXES = dict.fromkeys(
  (STORED_IDS, STORED_PROBABILITIES), ('batch', 'length', None)
)


class Pair(NamedTuple):
  """An unframed example; token ids are int32.

  Attributes:
    inputs: [m], in the encoder's vocabulary; empty for a causal language
      model.
    targets: [n], in the decoder's vocabulary.
    prefix: inputs in the decoder's vocabulary; None if both sides share it.
    decoder_inputs: [n], tokens that the decoder reads in place of the targets;
      None for the targets themselves.
    weights: float32 [n], weights of the targets in the loss; None for 1.
    fields: further fields of the document, a JSON object, which no model reads;
      None for none.
    documents: ids of the documents that the tokens are from.
  """

  inputs: np.ndarray
  targets: np.ndarray
  prefix: np.ndarray | None = None
  decoder_inputs: np.ndarray | None = None
  weights: np.ndarray | None = None
  fields: str | None = None
  documents: tuple[str, ...] = ()

  @property
  def teacher_inputs(self) -> np.ndarray:
    """Inputs in the vocabulary of the teacher, which is the decoder's."""
    return self.inputs if self.prefix is None else self.prefix

  @property
  def parts(self) -> tuple[np.ndarray, ...]:
    """Inputs and targets, and the prefix if the sides' vocabularies differ."""
    return self[:2] if self.prefix is None else self[:3]

  @property
  def read_tokens(self) -> np.ndarray:
    """Tokens that the decoder reads in place of the targets, [n]."""
    return self.targets if self.decoder_inputs is None else self.decoder_inputs

  @property
  def target_tokens(self) -> int:
    """Number of targets, those of weight 0 included."""
    return len(self.targets)

  def positions(self, lengths: 'Lengths') -> tuple[int, int]:
    """Returns encoder and decoder positions; 0 without the side."""
    # The longer prefix, so that a packed row also fits the teacher's S + T.
    inputs = max(len(self.inputs), len(self.teacher_inputs))
    return (
      inputs + lengths.edges if lengths.encoder else 0,
      len(self.targets) if lengths.decoder else 0,
    )


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Row lengths in tokens.

  Attributes:
    encoder: S, or 0 for a causal language model.
    decoder: T, or 0 for an encoder-only model.
    edges: number of ids around inputs (`special_ids.SideIds.edges`).
  """

  encoder: int
  decoder: int
  edges: int = 1

  @property
  def teacher(self) -> int:
    """Length of the teacher's row; S + T always suffices."""
    return self.encoder + self.decoder


def frame_row(
  pairs: Sequence[Pair],
  lengths: Lengths,
  framing: special_ids.Framing,
  *,
  teacher: bool = False,
) -> Batch:
  """Frames a row.

  Args:
    pairs: pairs of the row, in order.
    lengths: S and T; S = 0 frames a causal language model.
    framing: special ids.
    teacher: whether to make the teacher_* fields.

  Returns:
    Field name to array of [S], [T] or [S + T]; int32, weights float32.

  Raises:
    ValueError: the pairs do not fit, or a pair has no targets.
  """
  sizes = {'encoder': lengths.encoder, 'decoder': lengths.decoder}
  sizes['teacher'] = lengths.teacher if teacher else 0
  sizes = {side: size for side, size in sizes.items() if size}
  aligned = 'decoder' if lengths.decoder else 'encoder'  # With the targets.
  row = _padding(sizes, aligned, framing)
  ends = dict.fromkeys(sizes, 0)  # End of the last segment, by side.
  # Segments count from 1, as 0 marks padding.
  for segment, pair in enumerate(pairs, start=1):
    m, n = len(pair.teacher_inputs), len(pair.targets)
    if n == 0:
      raise ValueError(f'pair {segment} of the row has no targets')
    # The last target predicts nothing, so that no decoder reads it. It is in
    # the teacher's row, where `on_all_tokens` and `check_framing` look for
    # every target behind its index.
    streams = {
      'encoder': [framing.encoder.frame(pair.inputs, 'encoder')],
      'decoder': [[framing.decoder.bos], pair.read_tokens[:-1]],
      'teacher': [[framing.decoder.bos], pair.teacher_inputs, pair.read_tokens],
    }
    starts = dict(ends)
    for side in sizes:
      tokens = np.concatenate(streams[side])
      _write_segment(row, side, starts[side], segment, tokens)
      ends[side] += len(tokens)
    # An encoder-only model predicts each token where it reads it.
    first = starts[aligned]
    if aligned == 'encoder':
      first += len(framing.encoder.edges('encoder')[0])
    positions = slice(first, first + n)
    row['targets'][positions] = pair.targets
    row['weights'][positions] = 1.0 if pair.weights is None else pair.weights
    if teacher:
      # Position m of the teacher's row, after BOS, reads the last prefix token.
      row['teacher_index'][positions] = starts['teacher'] + m + np.arange(n)
  return row


def _padding(
  sizes: Mapping[str, int], aligned: str, framing: special_ids.Framing
) -> Batch:
  """Returns a row of padding; targets and weights align with side `aligned`."""
  length, pad = sizes[aligned], framing.decoder.pad
  row = {
    'targets': np.full(length, pad, np.int32),
    'weights': np.zeros(length, np.float32),
  }
  for side, size in sizes.items():
    fill = framing.encoder.pad if side == 'encoder' else pad
    row[f'{side}_tokens'] = np.full(size, fill, np.int32)
    row[f'{side}_segments'] = np.zeros(size, np.int32)
    row[f'{side}_positions'] = np.zeros(size, np.int32)
  if 'teacher' in sizes:
    row['teacher_index'] = np.zeros(length, np.int32)
  return row


def _write_segment(
  row: Batch, side: str, start: int, segment: int, tokens: np.ndarray
) -> None:
  stop = start + len(tokens)
  length = len(row[f'{side}_tokens'])
  if stop > length:
    raise ValueError(
      f'segment {segment} ends at {side} position {stop} of {length}; the'
      ' row was packed for longer rows'
    )
  row[f'{side}_tokens'][start:stop] = tokens
  row[f'{side}_segments'][start:stop] = segment
  row[f'{side}_positions'][start:stop] = np.arange(len(tokens))


def on_all_tokens(batch: Batch, pad: int) -> Batch:
  """Makes a decoder-only model predict the inputs of pairs too.

  Args:
    batch: batch with the teacher's fields, [B, ...].
    pad: padding id of the decoder's vocabulary.

  Returns:
    The batch with targets, weights and teacher_index of the teacher's row,
    [B, S + T]; inputs have weight 1, and targets the weights of the batch.
  """
  tokens, segments = batch['teacher_tokens'], batch['teacher_segments']
  index = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  # A segment does not predict the BOS of the next.
  follows = (segments > 0) & (segments == _following(segments))
  targets = np.where(follows, np.roll(tokens, -1, axis=1), pad)
  weights = follows.astype(np.float32)
  # Targets are copied from the batch: the teacher's row has MEAP's masks in
  # place of some.
  rows, columns = np.nonzero(batch['decoder_segments'])
  indices = batch['teacher_index'][rows, columns]
  targets[rows, indices] = batch['targets'][rows, columns]
  weights[rows, indices] = batch['weights'][rows, columns]
  return batch | {
    'targets': targets.astype(np.int32),
    'weights': weights,
    'teacher_index': index.astype(np.int32),
  }


def _following(segments: np.ndarray) -> np.ndarray:
  """Returns the segment of the next position, 0 at the end of a row."""
  following = np.roll(segments, -1, axis=1)
  following[:, -1] = 0  # `roll` wraps around.
  return following


def with_windows(batch: Batch, ids: special_ids.SideIds) -> Batch:
  """Restores the text of pairs with spans of their inputs as targets.

  The text of a pair without sentinels is its inputs, then its targets.

  Args:
    batch: batch of pairs of `denoising` or of a window cut in two, [B, ...].
    ids: special ids of the vocabulary that both sides share.

  Returns:
    The batch with window_tokens, window_segments and window_positions, BOS and
    text without sentinels and mode tokens, [B, S + T]; and window_index [B, T],
    the position of the window that predicts a target, -1 for sentinels and
    padding, which it does not have.
  """
  inputs, targets = batch['encoder_tokens'], batch['targets']
  targets_at = slice(inputs.shape[1], None)  # In concatenated arrays.
  width = inputs.shape[1] + targets.shape[1]
  sides = []
  for side, tokens in (('encoder', inputs), ('decoder', targets)):
    segments, starts = (
      batch[f'{side}_segments'],
      batch[f'{side}_positions'] == 0,
    )
    is_sentinel = np.isin(tokens, ids.sentinels)
    count = np.cumsum(is_sentinel, axis=1)
    # Counted from the start of the segment.
    before = np.where(starts, count - is_sentinel, 0)
    span = count - np.maximum.accumulate(before, axis=1)
    if side == 'decoder':  # Behind its sentinel, and behind the visible run.
      span = np.maximum(span - 1, 0) + 0.5
    is_text = (segments > 0) & ~is_sentinel
    is_text &= ~np.isin(tokens, ids.modes + ids.opening)
    if side == 'encoder' and ids.ends_with_eos:  # The window has BOS instead.
      last = (segments > 0) & (segments != _following(segments))
      tokens, span = np.where(last, ids.bos, tokens), np.where(last, -0.5, span)
    order = segments * (width + 1.0) + span
    sides.append([tokens, segments, np.where(is_text, order, np.inf)])
  tokens, segments, order = (
    np.concatenate(x, axis=1) for x in zip(*sides, strict=True)
  )
  # Tokens of a run keep their order.
  permutation = np.argsort(order, axis=1, kind='stable')
  index = np.argsort(permutation, axis=1)[:, targets_at] - 1
  is_text = np.isfinite(order)
  tokens, segments = (
    np.take_along_axis(np.where(is_text, x, fill), permutation, axis=1)
    for x, fill in ((tokens, ids.pad), (segments, 0))
  )
  numbers, starts = np.arange(width), np.diff(segments, axis=1, prepend=0) > 0
  first = np.maximum.accumulate(np.where(starts, numbers, 0), axis=1)
  fields = {
    'window_tokens': tokens,
    'window_segments': segments,
    'window_positions': np.where(segments > 0, numbers - first, 0),
    'window_index': np.where(is_text[:, targets_at], index, -1),
  }
  return batch | {name: x.astype(np.int32) for name, x in fields.items()}


def frame_group(
  answers: Sequence[Sequence[Pair]],
  lengths: Lengths,
  framing: special_ids.Framing,
  *,
  teacher: bool = False,
) -> Batch:
  """Frames a row of several answers to a prompt.

  Args:
    answers: for each answer, its pair alone; no pair frames a row of padding.
    lengths: S and T.
    framing: special ids.
    teacher: whether to make the teacher_* fields.

  Returns:
    Fields of `frame_row`, those of `GROUP_AXES` [G, L].
  """
  rows = [frame_row(x, lengths, framing, teacher=teacher) for x in answers]
  fields = stack_rows(rows)
  return rows[0] | {name: x for name, x in fields.items() if name in GROUP_AXES}


def stack_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> Batch:
  """Stacks framed rows into a batch, field by field: [B, ...]."""
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def check_framing(
  batch: Mapping[str, np.ndarray],
  framing: special_ids.Framing,
  *,
  mask: int | None = None,
  eos_inside: bool = False,
  labelled: bool = False,
) -> None:
  """Checks that a batch obeys the tables in the module's docstring.

  Args:
    batch: fields of the batch.
    framing: special ids that frame its rows.
    mask: token that the decoder may read in place of any target (MEAP), or
      None.
    eos_inside: whether inputs may hold EOS, of a document or a turn.
    labelled: whether targets are numbers of labels.

  Raises:
    ValueError: names the broken rule, the row and the position.
  """
  weights, targets = batch['weights'], batch['targets']
  side = 'decoder' if 'decoder_segments' in batch else 'encoder'
  rules = {
    'padding has weight 0': (batch[f'{side}_segments'] > 0) | (weights == 0)
  }
  ids = getattr(framing, side)
  # Qwen pads with EOS, which is a target; the number of a label may equal the
  # id of padding.
  if ids.pad != ids.eos and not labelled:
    rules['padding is never a target'] = (weights == 0) | (targets != ids.pad)
  if side == 'decoder':
    rules |= _decoder_rules(batch, framing.decoder, mask)
  rules |= _encoder_rules(batch, framing.encoder, eos_inside)
  rules |= _teacher_rules(batch, mask)
  for rule, holds in rules.items():
    if not holds.all():
      row, position = np.argwhere(~holds)[0]
      raise ValueError(
        f'batch framing: "{rule}" does not hold at row {row}, position'
        f' {position}'
      )


def check_group(
  batch: Mapping[str, np.ndarray], framing: special_ids.Framing, **rules: Any
) -> None:
  """Checks every answer of the rows of `frame_group`; see `check_framing`."""
  for answer in range(batch['targets'].shape[1]):
    fields = {
      name: value[:, answer] if name in GROUP_AXES else value
      for name, value in batch.items()
    }
    check_framing(fields, framing, **rules)


def _decoder_rules(
  batch: Mapping[str, np.ndarray], ids: special_ids.SideIds, mask: int | None
) -> dict[str, np.ndarray]:
  """Returns rule -> positions where it holds, [B, T]."""
  segments, tokens = batch['decoder_segments'], batch['decoder_tokens']
  first = (batch['decoder_positions'] == 0) & (segments > 0)
  later = (segments > 0) & ~first
  # `roll` wraps around to the first position, to which only BOS applies.
  previous = np.roll(batch['targets'], 1, axis=-1)
  masked = tokens == (-1 if mask is None else mask)  # No token is -1.
  return {
    'a decoder segment starts with BOS': ~first | (tokens == ids.bos) | masked,
    'decoder inputs are the targets shifted right': ~later
    | (tokens == previous)
    | masked,
  }


def _encoder_rules(
  batch: Mapping[str, np.ndarray], ids: special_ids.SideIds, eos_inside: bool
) -> dict[str, np.ndarray]:
  """Returns rule -> positions where it holds, [B, S]."""
  if 'encoder_tokens' not in batch:
    return {}
  tokens, segments = batch['encoder_tokens'], batch['encoder_segments']
  if ids.ends_with_eos:
    last = (segments > 0) & (segments != _following(segments))
    is_eos = (segments > 0) & (tokens == ids.eos)
    # Documents and turns inside may end with EOS too.
    ends = is_eos | ~last if eos_inside else is_eos == last
    return {'an encoder segment ends with its only EOS': ends}
  start = (batch['encoder_positions'] == 0) & (segments > 0)
  is_bos = tokens == ids.bos
  # A document inside may end with EOS, which of Qwen is BOS.
  is_inside = eos_inside and ids.eos == ids.bos
  starts = is_bos | ~start if is_inside else start == is_bos
  rules = {
    'an encoder segment starts with its only BOS': (segments == 0) | starts
  }
  # BOS of Qwen is its EOS, with which every segment starts.
  if ids.eos != ids.bos and not eos_inside:
    rules['the encoder reads no EOS'] = (segments == 0) | (tokens != ids.eos)
  return rules


def _teacher_rules(
  batch: Mapping[str, np.ndarray], mask: int | None
) -> dict[str, np.ndarray]:
  """Returns rule -> positions where it holds, [B, T]."""
  if 'teacher_index' not in batch:
    return {}
  weights, index = batch['weights'], batch['teacher_index']
  # Only a wrong index can be the last of the row: clipped, it breaks the rule,
  # which names its place, instead of failing here.
  following = np.minimum(index + 1, batch['teacher_tokens'].shape[-1] - 1)
  predicted = np.take_along_axis(batch['teacher_tokens'], following, axis=-1)
  masked = predicted == (-1 if mask is None else mask)
  segments = batch['teacher_segments']
  # In the same segment: equal tokens of the next pair are not predictions.
  same_segment = np.take_along_axis(
    segments, index, axis=-1
  ) == np.take_along_axis(segments, following, axis=-1)
  return {
    'the teacher predicts the targets': (weights == 0)
    | ((predicted == batch['targets']) | masked) & same_segment
  }
