"""The one place that says how a row of token ids becomes a batch.

A record row holds pairs of token ids without any framing. Framing, for a
pair with inputs p_0..p_m-1 and targets t_0..t_n-1 (the last target is EOS
where, and only where, the document ends there):

| field            | content of the pair's segment                          |
|------------------|--------------------------------------------------------|
| encoder_tokens   | BOS p_0 .. p_m-1            (no EOS)                   |
| decoder_tokens   | BOS t_0 .. t_n-2                                       |
| targets          | t_0 .. t_n-1                                           |
| weights          | 1 at every target, 0 at padding                        |
| *_segments       | 1, 2, .. by pair within the row; 0 at padding          |
| *_positions      | 0, 1, .. restarting with each pair; 0 at padding       |
| teacher_tokens   | BOS p_0 .. p_m-1 t_0 .. t_n-1, pairs contiguous        |
| teacher_index    | per target, the index in the teacher's row of the      |
|                  | position that predicts it: t_0 is predicted by the     |
|                  | last prefix token, t_j by t_j-1                        |
| row              | index of the record row, -1 for a filler row           |

So a pair takes m+1 encoder, n decoder and m+1+n teacher positions. A causal
language model has pairs with empty inputs and uses the decoder's and target
fields only. A decoder-only model reads PrefixLM rows through the teacher's
fields, which gives it exactly the encoder-decoder's targets.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

PAD, EOS, BOS = 0, 1, 2

Batch = dict[str, np.ndarray]


class Pair(NamedTuple):
  """Token ids of one example, unframed: inputs [m] and targets [n], int32.

  `inputs` is empty for a causal language model.
  """

  inputs: np.ndarray
  targets: np.ndarray


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Row lengths in tokens.

  Attributes:
    encoder: S, or 0 for a causal language model.
    decoder: T.
  """

  encoder: int
  decoder: int

  @property
  def teacher(self) -> int:
    """Length of the teacher's row; S + T always suffices."""
    return self.encoder + self.decoder


def encoder_cost(pair: Pair, lengths: Lengths) -> int:
  """Encoder positions that a pair takes (0 for a causal language model)."""
  return len(pair.inputs) + 1 if lengths.encoder else 0


def frame_row(
  pairs: Sequence[Pair], lengths: Lengths, *, teacher: bool = False
) -> Batch:
  """Frames one row.

  Args:
    pairs: what the row holds, in order.
    lengths: S and T; S = 0 frames a causal language model.
    teacher: also make the teacher_* fields.

  Returns:
    Field name to array of [S], [T] or [S + T]; int32, weights float32.

  Raises:
    ValueError: the pairs do not fit, or a pair has no targets.
  """
  s, t, r = lengths.encoder, lengths.decoder, lengths.teacher
  row = {
    'decoder_tokens': np.zeros(t, np.int32),
    'decoder_segments': np.zeros(t, np.int32),
    'decoder_positions': np.zeros(t, np.int32),
    'targets': np.zeros(t, np.int32),
    'weights': np.zeros(t, np.float32),
  }
  sides = ['decoder']
  if s:
    sides.append('encoder')
  if teacher:
    sides.append('teacher')
    row['teacher_index'] = np.zeros(t, np.int32)
  for side, length in (('encoder', s), ('teacher', r)):
    if side in sides:
      for field in ('tokens', 'segments', 'positions'):
        row[f'{side}_{field}'] = np.zeros(length, np.int32)

  at = dict.fromkeys(sides, 0)
  for segment, pair in enumerate(pairs, start=1):
    m, n = len(pair.inputs), len(pair.targets)
    if n == 0:
      raise ValueError(f'pair {segment} of the row has no targets')
    streams = {'decoder': np.concatenate([[BOS], pair.targets[:-1]])}
    if 'encoder' in sides:
      streams['encoder'] = np.concatenate([[BOS], pair.inputs])
    if 'teacher' in sides:
      streams['teacher'] = np.concatenate([[BOS], pair.inputs, pair.targets])
    start = dict(at)
    for side, tokens in streams.items():
      _place(row, side, start[side], segment, tokens)
      at[side] += len(tokens)
    where = slice(start['decoder'], start['decoder'] + n)
    row['targets'][where] = pair.targets
    row['weights'][where] = 1.0
    if 'teacher' in sides:
      row['teacher_index'][where] = start['teacher'] + m + np.arange(n)
  return row


def _place(row: Batch, side: str, start: int, segment: int, tokens):
  """Writes one framed segment of `side` at `start`."""
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


def stack_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> Batch:
  """Stacks framed rows into a batch: [B, ...] per field."""
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def check_framing(batch: Mapping[str, np.ndarray]) -> None:
  """Asserts the module's table on a batch; run on the first one of a job.

  Raises:
    ValueError: names the rule, the row and the position that break it.
  """
  segments = batch['decoder_segments']
  weights = batch['weights']
  first = (batch['decoder_positions'] == 0) & (segments > 0)
  # Within a segment, each input is the target before it.
  later = (segments > 0) & ~first
  previous = np.roll(batch['targets'], 1, axis=-1)
  rules = {
    'a decoder segment starts with BOS': ~first
    | (batch['decoder_tokens'] == BOS),
    'decoder inputs are the targets shifted right': ~later
    | (batch['decoder_tokens'] == previous),
    'padding has weight 0': (segments > 0) | (weights == 0),
    'padding is never a target': (weights == 0) | (batch['targets'] != PAD),
  }
  if 'encoder_tokens' in batch:
    encoder = batch['encoder_segments']
    start = (batch['encoder_positions'] == 0) & (encoder > 0)
    rules['an encoder segment starts with its only BOS'] = (encoder == 0) | (
      start == (batch['encoder_tokens'] == BOS)
    )
    rules['the encoder reads no EOS'] = (encoder == 0) | (
      batch['encoder_tokens'] != EOS
    )
  if 'teacher_index' in batch:
    index = batch['teacher_index']
    after = np.minimum(index + 1, batch['teacher_tokens'].shape[-1] - 1)
    predicted = np.take_along_axis(batch['teacher_tokens'], after, axis=-1)
    where = np.take_along_axis(batch['teacher_segments'], index, axis=-1)
    rules['the teacher predicts the targets'] = (weights == 0) | (
      (predicted == batch['targets']) & (where == segments)
    )
  for rule, holds in rules.items():
    if not holds.all():
      row, position = np.argwhere(~holds)[0]
      raise ValueError(
        f'batch framing: "{rule}" does not hold at row {row}, position'
        f' {position}'
      )
