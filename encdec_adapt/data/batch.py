"""Framing: how rows of token ids become a batch.

A record row holds pairs of token ids without framing. A pair has inputs
p_0..p_m-1 and targets t_0..t_n-1; the last target is EOS if and only if the
document ends there. The fields of a batch are, in the pair's segment,

| field            | content of the pair's segment                          |
|------------------|--------------------------------------------------------|
| encoder_tokens   | BOS p_0 .. p_m-1            (no EOS)                   |
| decoder_tokens   | BOS t_0 .. t_n-2                                       |
| targets          | t_0 .. t_n-1                                           |
| weights          | 1 at targets, 0 at padding                             |
| *_segments       | 1, 2, .. by pair within the row; 0 at padding          |
| *_positions      | 0, 1, .. restarting with each pair; 0 at padding       |
| teacher_tokens   | BOS p_0 .. p_m-1 t_0 .. t_n-1, pairs contiguous; the   |
|                  | prefix as the decoder's vocabulary has it              |
| teacher_index    | per target, the index in the teacher's row of the      |
|                  | position that predicts it: t_0 is predicted by the     |
|                  | last prefix token, t_j by t_j-1                        |
| row              | index of the record row, -1 for a filler row           |

So a pair takes m+1 encoder, n decoder and m+1+n teacher positions. Each side
has BOS and padding of its own vocabulary; EOS and the teacher's tokens are the
decoder's. If the encoder has another vocabulary, the teacher's prefix has
another length; the pair then takes as many encoder positions as the longer of
the two prefixes, so that it also fits the teacher's row.

A causal language model has pairs with empty inputs, and only the decoder's and
target fields. A decoder-only model reads PrefixLM rows through the teacher's
fields, which gives it the same targets as the encoder-decoder.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from encdec_adapt.tokenizers import special_ids

Batch = dict[str, np.ndarray]


class Pair(NamedTuple):
  """Token ids of one example, unframed, int32.

  Attributes:
    inputs: [m], in the encoder's vocabulary; empty for a causal language
      model.
    targets: [n], in the decoder's vocabulary.
    prefix: inputs in the decoder's vocabulary; None if both sides share one.
  """

  inputs: np.ndarray
  targets: np.ndarray
  prefix: np.ndarray | None = None

  @property
  def teacher_inputs(self) -> np.ndarray:
    """Inputs in the vocabulary of the teacher, which is the decoder's."""
    return self.inputs if self.prefix is None else self.prefix

  @property
  def parts(self) -> tuple[np.ndarray, ...]:
    """The two or three arrays of the pair."""
    return self[:2] if self.prefix is None else tuple(self)


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
  """Returns the encoder positions of a pair (0 without an encoder)."""
  if not lengths.encoder:
    return 0
  return max(len(pair.inputs), len(pair.teacher_inputs)) + 1


def frame_row(
  pairs: Sequence[Pair],
  lengths: Lengths,
  framing: special_ids.Framing,
  *,
  teacher: bool = False,
) -> Batch:
  """Frames one row.

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
  s, t, r = lengths.encoder, lengths.decoder, lengths.teacher
  bos, pad = framing.decoder.bos, framing.decoder.pad
  row = {
    'decoder_tokens': np.full(t, pad, np.int32),
    'decoder_segments': np.zeros(t, np.int32),
    'decoder_positions': np.zeros(t, np.int32),
    'targets': np.full(t, pad, np.int32),
    'weights': np.zeros(t, np.float32),
  }
  sides = ['decoder']
  if s:
    sides.append('encoder')
  if teacher:
    sides.append('teacher')
    row['teacher_index'] = np.zeros(t, np.int32)
  for side, length, fill in (
    ('encoder', s, framing.encoder.pad),
    ('teacher', r, pad),
  ):
    if side in sides:
      row[f'{side}_tokens'] = np.full(length, fill, np.int32)
      for field in ('segments', 'positions'):
        row[f'{side}_{field}'] = np.zeros(length, np.int32)

  at = dict.fromkeys(sides, 0)
  for segment, pair in enumerate(pairs, start=1):
    m, n = len(pair.teacher_inputs), len(pair.targets)
    if n == 0:
      raise ValueError(f'pair {segment} of the row has no targets')
    streams = {'decoder': [[bos], pair.targets[:-1]]}
    if 'encoder' in sides:
      streams['encoder'] = [[framing.encoder.bos], pair.inputs]
    if 'teacher' in sides:
      streams['teacher'] = [[bos], pair.teacher_inputs, pair.targets]
    start = dict(at)
    for side, parts in streams.items():
      tokens = np.concatenate(parts)
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


def check_framing(
  batch: Mapping[str, np.ndarray], framing: special_ids.Framing
) -> None:
  """Checks that a batch obeys the table in the module's docstring.

  Args:
    batch: fields of the batch.
    framing: special ids that frame its rows.

  Raises:
    ValueError: names the broken rule, the row and the position.
  """
  rules = {
    **_decoder_rules(batch, framing.decoder),
    **_encoder_rules(batch, framing.encoder),
    **_teacher_rules(batch),
  }
  for rule, holds in rules.items():
    if not holds.all():
      row, position = np.argwhere(~holds)[0]
      raise ValueError(
        f'batch framing: "{rule}" does not hold at row {row}, position'
        f' {position}'
      )


def _decoder_rules(
  batch: Mapping[str, np.ndarray], ids: special_ids.SideIds
) -> dict[str, np.ndarray]:
  """Returns rule -> positions where it holds, [B, T]."""
  segments, weights = batch['decoder_segments'], batch['weights']
  first = (batch['decoder_positions'] == 0) & (segments > 0)
  # Within a segment, each input is the target before it.
  later = (segments > 0) & ~first
  previous = np.roll(batch['targets'], 1, axis=-1)
  rules = {
    'a decoder segment starts with BOS': ~first
    | (batch['decoder_tokens'] == ids.bos),
    'decoder inputs are the targets shifted right': ~later
    | (batch['decoder_tokens'] == previous),
    'padding has weight 0': (segments > 0) | (weights == 0),
  }
  if ids.pad != ids.eos:
    rules['padding is never a target'] = (weights == 0) | (
      batch['targets'] != ids.pad
    )
  return rules


def _encoder_rules(
  batch: Mapping[str, np.ndarray], ids: special_ids.SideIds
) -> dict[str, np.ndarray]:
  """Returns rule -> positions where it holds, [B, S]."""
  if 'encoder_tokens' not in batch:
    return {}
  tokens, segments = batch['encoder_tokens'], batch['encoder_segments']
  start = (batch['encoder_positions'] == 0) & (segments > 0)
  rules = {
    'an encoder segment starts with its only BOS': (segments == 0)
    | (start == (tokens == ids.bos))
  }
  if ids.eos != ids.bos:
    rules['the encoder reads no EOS'] = (segments == 0) | (tokens != ids.eos)
  return rules


def _teacher_rules(
  batch: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Returns rule -> positions where it holds, [B, T]."""
  if 'teacher_index' not in batch:
    return {}
  weights, index = batch['weights'], batch['teacher_index']
  after = np.minimum(index + 1, batch['teacher_tokens'].shape[-1] - 1)
  predicted = np.take_along_axis(batch['teacher_tokens'], after, axis=-1)
  where = np.take_along_axis(batch['teacher_segments'], index, axis=-1)
  return {
    'the teacher predicts the targets': (weights == 0)
    | ((predicted == batch['targets']) & (where == batch['decoder_segments']))
  }
