"""Kinds of rows: their fields on disk and in a batch, declared once.

Reading, framing, placement, plans and displays use only the `RowFields` of a
kind. `row_codec` encodes the fields `stored`, `row_display` shows them, `frame`
makes the fields of a batch, and `axes` has their logical axes.

| rows          | declared in   | an example is                             |
|---------------|---------------|-------------------------------------------|
| `PAIRS`       | this module   | inputs and targets                        |
| `TEXT`        | this module   | targets, without inputs                   |
| `ENCODED`     | this module   | inputs with a target for each             |
| conversations | `supervised`  | a prompt and an assistant turn            |
| labels        | `labelled`    | inputs with labels                        |
| preferences   | `preferences` | a prompt and two answers                  |
| texts         | `embeddings`  | a query, a positive and negatives         |
| passages      | `passages`    | a question with passages, and the answer  |

Must not import TensorFlow, SeqIO or JAX.
"""

from collections.abc import Callable, Mapping
import dataclasses

from encdec_adapt.objectives import framing

Axes = Mapping[str, tuple[str | None, ...]]


@dataclasses.dataclass(frozen=True)
class StoredField:
  """A stored field of an example.

  Attributes:
    name: attribute of the example, an array [n], a string or None.
    form: 'tokens' and 'integers' are int32, 'floats' are stored as float16,
      and 'json' is a string.
    title: displayed name of the field; '' for `name`.
    names: names of integers, displayed instead of them.
    side: stack with the vocabulary of tokens.
  """

  name: str
  form: str = 'tokens'
  title: str = ''
  names: tuple[str, ...] = ()
  side: str = 'decoder'


INPUTS = StoredField('inputs', side='encoder')
# Records have the fields in this order.
PAIR_FIELDS = (
  INPUTS,
  StoredField('targets'),
  StoredField('prefix'),
  StoredField('decoder_inputs', title='reads'),
  StoredField('weights', 'floats'),
  StoredField('fields', 'json'),
)


@dataclasses.dataclass(frozen=True)
class RowFields:
  """A kind of rows.

  Attributes:
    content: content for a model, one of `Architecture.rows`.
    sides: filled sides of a row.
    stored: fields of an example, in the order of the records.
    example: class of the examples, a NamedTuple with `stored` and `documents`,
      and with `positions`, `target_tokens` and `teacher_inputs` like
      `framing.Pair`.
    frame: frames the examples of a row; see `framing.frame_row`.
    check: checks framed rows; see `framing.check_framing`.
    axes: logical axes of batch fields other than ('batch', 'length').
    answers: number of answers per row; fields of several are [P, G, T].
    packs: whether a row may hold several examples.
    texts: maximum number of texts per row to embed, else 0.
    ends_turns: whether targets end with the end-of-turn token.
    passages: most tokens of a passage, if the encoder reads each on its own,
      else 0.
  """

  content: str = 'pair'
  sides: tuple[str, ...] = ('encoder', 'decoder')
  stored: tuple[StoredField, ...] = PAIR_FIELDS
  example: type = framing.Pair
  frame: Callable[..., framing.Batch] = framing.frame_row
  check: Callable[..., None] = framing.check_framing
  axes: Axes = dataclasses.field(default_factory=dict)
  answers: int = 1
  packs: bool = True
  texts: int = 0
  ends_turns: bool = False
  passages: int = 0

  def capacity(self, lengths: framing.Lengths) -> framing.Lengths:
    """Returns the maximum sums of `positions` over a row's examples."""
    if not self.texts:
      return lengths
    return dataclasses.replace(lengths, decoder=self.texts)


PAIRS = RowFields()
TEXT = RowFields('decoder', ('decoder',))
ENCODED = RowFields('encoder', ('encoder',))
