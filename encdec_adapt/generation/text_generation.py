"""Text generation for `generate` and Python callers.

Prompts are encoded as in training (`prompt_encoding`), and continued by the
engine or the beam search of `inference`.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import typing

import numpy as np

from encdec_adapt.base import errors, keys
from encdec_adapt.generation import prompt_encoding
from encdec_adapt.inference import beam_search, engine
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.stored import model_on_disk, pretrained_files
from encdec_adapt.tokenizers import chat_format

if typing.TYPE_CHECKING:
  from encdec_adapt.generation import model_in_memory

# Source of a prompt, for error messages -> the prompt; with `chat` a text or
# the messages of a conversation.
Prompts = Mapping[str, prompt_encoding.Prompt]
_QUESTION = prompt_encoding.Question.__annotations__.keys()


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of generation, as flags of commands and keyword arguments.

  Raises:
    UserError: options are incompatible, or a value is out of range.
  """

  max_tokens: int = keys.key(64, 'Maximum generated tokens.', at_least=1)
  max_prompt: int | None = keys.key(
    None,
    'Maximum tokens of a prompt, BOS included; a longer one keeps BOS (if it'
    ' has one), mode, task prefix and its last tokens. Without it, prompts'
    " longer than the model's positions (max_position_embeddings of its"
    ' config.json, or learned ones) are refused.',
    at_least=2,
  )
  prefix: str | None = keys.key(
    None,
    "Text before every prompt, '' for none; by default the task prefix that the"
    ' run was trained with.',
  )
  mode: str = keys.key(
    '',
    'Mode token of UL2 that every prompt begins with: R, S or X, of those that'
    ' the run was trained with.',
  )
  sentinels: bool = keys.key(
    False,
    'Read names of sentinels in a prompt as tokens, and show them in the'
    ' continuation.',
  )
  temperature: float = keys.key(0.0, '0 is greedy.')
  top_k: int | None = keys.key(None, 'Draw among the k likeliest tokens only.')
  top_p: float | None = keys.key(
    None, 'Draw among the likeliest tokens that reach this probability only.'
  )
  min_p: float | None = keys.key(
    None,
    'Draw among tokens with at least this share of the largest probability.',
  )
  repetition_penalty: float = keys.key(
    1.0,
    'Divides positive logits, and multiplies negative ones, of tokens that the'
    ' decoder has read; 1 for none.',
  )
  seed: int = keys.key(
    0, 'Seed of all draws; each prompt draws on its own.', at_least=0
  )
  beams: int = keys.key(1, 'Beams of a beam search; 1 for none.', at_least=1)
  length_penalty: float = keys.key(
    1.0,
    'Beams are compared by their log-probability divided by their length to'
    ' this power.',
  )
  stop: Sequence[str] = keys.key(
    (),
    'Text that ends a continuation, which does not contain it; may be'
    ' repeated.',
  )
  batch_size: int = keys.key(
    8, 'Rows at a time: prompts, or the beams of prompts.', at_least=1
  )
  int8: bool = keys.key(False, 'Keep kernels as 8-bit integers.')
  chat: bool = keys.key(
    False, "Take prompts as a user's turns and answer them."
  )

  def __post_init__(self):
    keys.check(self, '--')
    # SamplingConfig refuses values out of range or without effect.
    sampling = self.sampling(0)
    if self.beams > 1 and (
      sampling.temperature or sampling.repetition_penalty != 1
    ):
      raise errors.UserError(
        f'--beams={self.beams} searches without drawing; leave out'
        ' --temperature and --repetition_penalty.'
      )
    if self.beams > 1 and self.stop:
      raise errors.UserError(
        f'--stop does not work with --beams={self.beams}; leave out one.'
      )
    for name in ('prefix', 'mode', 'sentinels'):
      if self.chat and getattr(self, name):
        raise errors.UserError(
          f'--chat does not work with --{name}; leave out one.'
        )
    # A string would be read as a list of characters.
    if isinstance(self.stop, str) or not all(self.stop):
      raise errors.UserError(
        f'--stop is {self.stop!r}; give texts that are not empty, or leave it'
        ' out.'
      )

  def sampling(self, index: int) -> sampling_lib.SamplingConfig:
    """Returns the sampling options of a prompt by index."""
    return sampling_lib.SamplingConfig(
      self.temperature,
      self.top_k,
      self.top_p,
      self.min_p,
      self.repetition_penalty,
      # Seeded by index: independent of batching and restarts.
      sampling_lib.seed_of(self.seed, index),
    )


def check(prompts: Prompts, *, chat: bool = False) -> Prompts:
  """Checks that prompts are texts or questions, or with `chat` conversations.

  Returns:
    The same prompts.

  Raises:
    UserError: a prompt has the wrong type, or is empty.
  """
  for origin, prompt in prompts.items():
    # The chat format checks messages when it encodes them.
    if chat and isinstance(prompt, list):
      continue
    if isinstance(prompt, dict) and not chat:
      if prompt.keys() != _QUESTION:
        raise errors.UserError(
          f'{origin} has the keys {sorted(prompt)}; an object has'
          f' {" and ".join(_QUESTION)}.'
        )
      prompt = prompt['question']
    if not isinstance(prompt, str):
      raise errors.UserError(f'{origin} must be a JSON string: {prompt!r:.60}')
    if not prompt.strip():
      raise errors.UserError(
        f'{origin}: the prompt is empty; there is nothing to continue.'
      )
  return prompts


def encode(
  prompts: Prompts,
  stored: model_on_disk.StoredModel,
  options: Options,
  generated: int,
) -> tuple[prompt_encoding.PromptEncoder, list[np.ndarray]]:
  """Encodes prompts.

  Args:
    prompts: the prompts.
    stored: the model.
    options: options of generation.
    generated: maximum number of generated tokens.

  Returns:
    The encoder, and the framed token ids of each prompt, int32 [n].

  Raises:
    UserError: a vocabulary lacks the chat template for `chat`, or a prompt
      cannot be encoded or is too long; names the prompt.
  """
  if options.chat:
    # The encoder's vocabulary reads the turns, the decoder's ends the answer.
    for vocabulary in stored.require_vocabularies().sides.values():
      chat_format.template_of(vocabulary)
  encoder = prompt_encoding.PromptEncoder(
    stored,
    # User turns have no prefix, as in training.
    prefix='' if options.chat else options.prefix,
    mode=options.mode,
    sentinels=options.sentinels,
  )
  longest = pretrained_files.prompt_room(stored, generated)
  key = pretrained_files.positions_key(stored, stored.prompt_side)
  encoded = []
  for origin, prompt in prompts.items():
    if options.chat and isinstance(prompt, str):
      prompt = [{'role': 'user', 'content': prompt}]
    try:
      ids = encoder.encode(prompt, options.max_prompt)
    except errors.UserError as error:
      raise errors.UserError(f'{origin}: {error}') from error
    # Positions restart with every document.
    limit = None if isinstance(prompt, dict) else longest
    if not options.max_prompt and limit is not None and len(ids) > limit:
      raise errors.UserError(
        f'{origin} has {len(ids)} tokens, and the model has room for'
        f' {longest} ({key}, in a decoder-only model without --max_tokens);'
        f' give --max_prompt={longest} to keep the last ones, or shorten it.'
      )
    encoded.append(ids)
  return encoder, encoded


def complete(
  loaded: 'model_in_memory.LoadedModel',
  encoded: Mapping[int, np.ndarray],
  encoder: prompt_encoding.PromptEncoder,
  options: Options,
) -> Iterator[tuple[int, engine.Completion]]:
  """Continues prompts and yields completions as they finish.

  Args:
    loaded: the model.
    encoded: index -> token ids of the prompt.
    encoder: the prompt encoder; decodes answers with sentinels.
    options: options of generation.
  """
  indices, ids = list(encoded), loaded.special_ids
  if options.chat:
    vocabulary = loaded.stored.require_vocabularies().decoder
    ends = *ids.eos, chat_format.end_of_turn(vocabulary)
    ids = dataclasses.replace(ids, eos=ends)
  # No more rows than prompts: unused rows cost time too.
  count = max(1, len(encoded) * options.beams)
  rows = loaded.rows(min(options.batch_size, count))
  decode = encoder.answer_text if options.sentinels else None
  generator = loaded.engine(
    rows=rows, int8=options.int8, ids=ids, decode=decode
  )
  if options.beams > 1:
    completions = beam_search.search(
      generator,
      list(encoded.values()),
      beams=options.beams,
      max_tokens=options.max_tokens,
      length_penalty=options.length_penalty,
    )
  else:
    completions = generator.run(
      engine.Request(
        tokens, options.max_tokens, options.sampling(i), tuple(options.stop)
      )
      for i, tokens in encoded.items()
    )
  # Both number requests from 0 in the order of arrival.
  for number, completion in completions:
    yield indices[number], completion
