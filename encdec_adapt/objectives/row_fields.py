"""Kinds of rows: their fields on disk and in a batch, declared once.

Reading, framing, placement, plans and displays know a kind of rows by its
`RowFields` alone. `row_codec` stores `stored`, `row_display` shows
them, `frame` makes the fields of a batch, and `axes` are their logical axes.

| rows          | declared in   | an example is                             |
|---------------|---------------|-------------------------------------------|
| `PAIRS`       | this module   | inputs and targets                        |
| `TEXT`        | this module   | targets, without inputs                   |
| `ENCODED`     | this module   | inputs with a target for each             |
| conversations | `supervised`  | a prompt and a turn of the assistant      |
| labels        | `labelled`    | inputs with labels                        |
| preferences   | `preferences` | a prompt and two answers                  |
| texts         | `embeddings`  | a query and the texts that it is compared |
|               |               | with                                      |

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Callable, Mapping
import dataclasses

from encdec_adapt.objectives import framing

Axes = Mapping[str, tuple[str | None, ...]]


@dataclasses.dataclass(frozen=True)
class StoredField:
  """A field of an example that is stored in a row.

  Attributes:
    name: attribute of the example, an array [n], a text or None.
    form: 'tokens' and 'integers' are int32, 'floats' are stored as float16,
      and 'json' is a text.
    title: name that the field is shown with; '' for its own.
    names: names of integers, which are shown instead of them.
    side: stack that reads tokens, so that they are of its vocabulary.
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
    content: content that a model reads, one of `Architecture.rows`.
    sides: sides of a row that are filled.
    stored: fields of an example, in the order of the records.
    example: class of the examples, a NamedTuple with `stored` and `documents`,
      and with `positions`, `target_tokens` and `teacher_inputs` as of
      `framing.Pair`.
    frame: frames the examples of a row; see `framing.frame_row`.
    check: checks framed rows; see `framing.check_framing`.
    axes: logical axes of batch fields other than rows ('batch') of tokens
      ('length').
    answers: answers of a row; several are fields [P, G, T].
    packs: whether a row may hold several examples.
    texts: most texts of a row of texts to embed, else 0.
    ends_turns: whether targets end with the token that ends a turn.
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

  def capacity(self, lengths: framing.Lengths) -> framing.Lengths:
    """Returns the largest sums of the `positions` of a row's examples."""
    if not self.texts:
      return lengths
    return dataclasses.replace(lengths, decoder=self.texts)


PAIRS = RowFields()
TEXT = RowFields('decoder', ('decoder',))
ENCODED = RowFields('encoder', ('encoder',))
