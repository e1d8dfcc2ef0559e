"""A vocabulary for tests of objectives, and the pairs they make in it."""

import json
from types import SimpleNamespace

import numpy as np

from encdec_adapt.objectives import example_maker, framing, objective_names
from tests import gemma_ids

EOS = gemma_ids.EOS
MASK = 4
A, B, C = 5, 6, 7  # Sentinels.
R, S, X = 8, 9, 10
TEXT = 500  # First id of text.
STOP = 1000  # Ends a sentence.

# A token for every character.
LETTERS = SimpleNamespace(
  encode=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32)
)


def vocabulary(sentinels=96, **changes):
  """Sentinels A, B, C and more, modes, a mask, 600 ids of text."""
  ends = np.zeros(STOP + 100, bool)
  ends[STOP] = True
  fields = dict(
    path='v.model',
    eos=EOS,
    ids=gemma_ids.FRAMING.decoder,
    mask=MASK,
    sentinels=[A, B, C, *range(11, 11 + sentinels - 3)][:sentinels],
    mode_ids={'R': R, 'S': S, 'X': X},
    text_ids=np.arange(TEXT, STOP + 100, dtype=np.int32),
    sentence_ends=ends,
  )
  return SimpleNamespace(**fields | changes)


def make(name, encoder, decoder, *, sentinels=96, **options):
  """Makes an objective for rows of these lengths."""
  return objective_names.parse_one(name).make(
    framing.Lengths(encoder, decoder), vocabulary(sentinels), **options
  )


def make_fitting(name, length=48, **options):
  """Makes an objective for rows with the sides that it fills."""
  sides = objective_names.parse_one(name).rows.sides
  lengths = [length * (x in sides) for x in ('encoder', 'decoder')]
  return make(name, *lengths, **options)


def pairs(objective, tokens, seed=0):
  """Returns a document's pairs; window i has a generator of its own."""
  tokens = np.asarray(tokens, np.int32)
  return list(
    objective.pairs(tokens, lambda i: np.random.default_rng([seed, i]))
  )


def examples(maker, *contents, locate=str, **policy):
  """Returns the examples of documents of JSON; their ids count from 0."""
  documents = [(str(i), json.dumps(x)) for i, x in enumerate(contents)]
  policy = example_maker.DocumentPolicy(locate, **policy)
  generator = lambda name: np.random.default_rng(0)  # noqa: E731
  return list(maker.examples(documents, generator, policy))


def lists(pair):
  """Returns inputs and targets as lists."""
  return [part.tolist() for part in pair.parts]
