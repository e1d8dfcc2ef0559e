"""Framing: makes batch fields from rows of token ids.

A record row holds unframed pairs: inputs p_0..p_m-1, targets t_0..t_n-1 and,
optionally, target weights w_0..w_n-1 and decoder inputs r_0..r_n-1, which the
decoder reads in place of the targets (MEAP's masks). Fields of a batch:

| field            | content of the pair's segment                          |
|------------------|--------------------------------------------------------|
| encoder_tokens   | BOS p_0 .. p_m-1; for vocabularies with EOS at the end |
|                  | (T5's) p_0 .. p_m-1 EOS, after the opening, if any     |
|                  | (`<s>` of CodeT5 and BART), and before the closing, if |
|                  | any (a language of mBART)                              |
| decoder_tokens   | BOS r_0 .. r_n-2; r is t by default                    |
| targets          | t_0 .. t_n-1                                           |
| weights          | w_0 .. w_n-1, or 1; 0 at padding                       |
| *_segments       | 1, 2, .. by pair within the row; 0 at padding          |
| *_positions      | 0, 1, .. restarting with each pair; 0 at padding       |
| teacher_tokens   | BOS p_0 .. p_m-1 r_0 .. r_n-1, pairs contiguous; the   |
|                  | prefix in the decoder's vocabulary; if m > 0, without  |
|                  | BOS in those like GPT-2's (`SideIds.omits_bos`)        |
| teacher_index    | per target, the index in the teacher's row of the      |
|                  | position predicting it: the last prefix token for t_0, |
|                  | t_j-1 for t_j                                          |
| window_*         | for a teacher of span corruption (`with_windows`): BOS |
|                  | and the uncorrupted window, and per target the index   |
|                  | of the position predicting it                          |
| row              | index of the record row, -1 for a filler row           |
| stored_*         | k ids and probabilities per target of a stored teacher |

A pair takes m+1 encoder (more with an opening or a closing), n decoder and
at most m+1+n teacher positions. Each side has the BOS and padding of its
vocabulary; EOS and the teacher's tokens are the decoder's. T5's BOS is its
padding; its targets begin with the opening, if any, and end with EOS unless
truncated. With two vocabularies, a pair takes the encoder positions of the
longer of its two prefixes, so that it also fits the teacher's row.

| model           | reads                                                   |
|-----------------|---------------------------------------------------------|
| encoder-decoder | encoder_* and decoder_*                                 |
| causal decoder  | decoder_* of pairs without inputs, else teacher_*       |
| prefix decoder  | teacher_*, bidirectional over the framed p_0 .. p_m-1   |
| encoder-only    | encoder_*; targets and weights have length S, aligned   |
|                 | with the tokens p_i, and weight 0 at BOS and EOS. The   |
|                 | decoder's length is 0                                   |

A decoder-only model reads pairs through the teacher's fields, with the same
targets as the encoder-decoder; `on_all_tokens` adds the inputs to its targets.

Must not import TensorFlow, SeqIO or JAX.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from encdec_adapt.tokenizers import special_ids

Batch = dict[str, np.ndarray]
# Logical axes of the per-answer fields of rows with several answers to a
# prompt, [P, G, L]; the other fields belong to the prompt.
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
    decoder_inputs: [n], tokens read by the decoder in place of the targets;
      None for the targets themselves.
    weights: float32 [n], weights of the targets in the loss; None for 1.
    fields: further fields of the document as JSON, not read by models; None for
      none.
    documents: ids of the source documents.
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
    """Inputs in the decoder's vocabulary, which the teacher shares."""
    return self.inputs if self.prefix is None else self.prefix

  @property
  def parts(self) -> tuple[np.ndarray, ...]:
    """Inputs and targets, and the prefix if the sides' vocabularies differ."""
    return self[:2] if self.prefix is None else self[:3]

  @property
  def read_tokens(self) -> np.ndarray:
    """Decoder inputs before the shift, [n]; the targets by default."""
    return self.targets if self.decoder_inputs is None else self.decoder_inputs

  @property
  def target_tokens(self) -> int:
    """Number of targets, including targets of weight 0."""
    return len(self.targets)

  def positions(self, lengths: 'Lengths') -> tuple[int, int]:
    """Returns the numbers of encoder and decoder positions; 0 if absent."""
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
    n = len(pair.targets)
    if n == 0:
      raise ValueError(f'pair {segment} of the row has no targets')
    # The last target predicts nothing, so no decoder reads it. The teacher's
    # row has it: `on_all_tokens` and `check_framing` expect every target after
    # its index.
    prompt = framing.decoder.frame(pair.teacher_inputs, 'decoder')
    streams = {
      'encoder': [framing.encoder.frame(pair.inputs, 'encoder')],
      'decoder': [[framing.decoder.bos], pair.read_tokens[:-1]],
      'teacher': [prompt, pair.read_tokens],
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
      # The first target is predicted where the last prefix token is read.
      last = starts['teacher'] + len(prompt) - 1
      row['teacher_index'][positions] = last + np.arange(n)
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
  """Adds the inputs of pairs to the targets of a decoder-only model.

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
  # Copies the targets, as the teacher's row has MEAP's masks in place of some.
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


def at_eos(segments: np.ndarray, ids: special_ids.SideIds) -> np.ndarray:
  """Returns whether each position is that of a segment's framing EOS.

  Args:
    segments: segments of rows, [B, L].
    ids: special ids of the vocabulary.
  """
  last = (segments > 0) & (segments != _following(segments))
  return np.roll(last, -len(ids.closing), axis=1)


def with_windows(batch: Batch, ids: special_ids.SideIds) -> Batch:
  """Restores the uncorrupted text of span corruption.

  The text of a pair without sentinels is its inputs followed by its targets.

  Args:
    batch: batch of pairs from `denoising` or of split windows, [B, ...].
    ids: special ids of the shared vocabulary.

  Returns:
    The batch with window_tokens, window_segments and window_positions
    [B, S + T], BOS and the text without sentinels and mode tokens; and
    window_index [B, T], the window position predicting each target, -1 for
    sentinels and padding.
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
    if side == 'decoder':  # After its sentinel and the preceding visible run.
      span = np.maximum(span - 1, 0) + 0.5
    is_text = (segments > 0) & ~is_sentinel
    edges = ids.opening + ids.target_opening + ids.closing
    is_text &= ~np.isin(tokens, ids.modes + edges)
    if side == 'encoder' and ids.ends_with_eos:  # The window has BOS instead.
      last = at_eos(segments, ids)
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
    answers: a list of one pair per answer; empty lists frame a row of padding.
    lengths: S and T.
    framing: special ids.
    teacher: whether to make the teacher_* fields.

  Returns:
    Fields of `frame_row`; fields in `GROUP_AXES` are [G, L].
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
  passages: bool = False,
) -> None:
  """Checks a batch against the tables in the module docstring.

  Args:
    batch: fields of the batch.
    framing: special ids of its rows.
    mask: mask token, allowed in place of any target read (MEAP), or None.
    eos_inside: whether inputs may contain the EOS of documents or turns.
    labelled: whether targets are label indices.
    passages: whether inputs are several framed passages.

  Raises:
    ValueError: names the broken rule, the row and the position.
  """
  weights, targets = batch['weights'], batch['targets']
  side = 'decoder' if 'decoder_segments' in batch else 'encoder'
  rules = {
    'padding has weight 0': (batch[f'{side}_segments'] > 0) | (weights == 0)
  }
  ids = getattr(framing, side)
  # Qwen pads with EOS, which is a target; a label index may equal the padding
  # id.
  if ids.pad != ids.eos and not labelled:
    rules['padding is never a target'] = (weights == 0) | (targets != ids.pad)
  if side == 'decoder':
    rules |= _decoder_rules(batch, framing.decoder, mask)
  rules |= _encoder_rules(batch, framing.encoder, eos_inside, passages)
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
  batch: Mapping[str, np.ndarray],
  ids: special_ids.SideIds,
  eos_inside: bool,
  passages: bool,
) -> dict[str, np.ndarray]:
  """Returns rule -> positions where it holds, [B, S]."""
  if 'encoder_tokens' not in batch:
    return {}
  tokens, segments = batch['encoder_tokens'], batch['encoder_segments']
  if ids.ends_with_eos:
    last = at_eos(segments, ids)
    is_eos = (segments > 0) & (tokens == ids.eos)
    # Documents and turns inside may end with EOS too.
    ends = is_eos | ~last if eos_inside or passages else is_eos == last
    return {'an encoder segment ends with its only EOS': ends}
  start = (batch['encoder_positions'] == 0) & (segments > 0)
  is_bos = tokens == ids.bos
  # An inner document may end with EOS, which is also Qwen's BOS.
  is_inside = passages or (eos_inside and ids.eos == ids.bos)
  starts = is_bos | ~start if is_inside else start == is_bos
  rules = {
    'an encoder segment starts with its only BOS': (segments == 0) | starts
  }
  # Qwen's BOS, at the start of every segment, is its EOS.
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
  # Only a wrong index can be the last of the row. Clipped, it fails the rule,
  # with its position in the error, instead of this gather.
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
