"""Encodes prompts and answers as token ids, as in training.

The example maker of the run's objective (`objectives`) encodes both, with the
prefix, separator, chat format and end of answer of training. A Hugging Face
folder without these reads plain texts ending with EOS, or conversations.
"""

from collections.abc import Sequence
import json

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.generation import model_in_memory, prompt_encoding
from encdec_adapt.inference import rewards
from encdec_adapt.objectives import example_maker, framing, objective_names
from encdec_adapt.stored import model_on_disk, pretrained_files, prompt_framing
from encdec_adapt.tokenizers import chat_format

Prompt = str | chat_format.Messages
_LONGEST = 1 << 30  # No limit on the tokens of a row; `fits` checks them.


def maker(
  stored: model_on_disk.StoredModel, name: str, prompts: Sequence[Prompt]
) -> example_maker.ExampleMaker:
  """Returns the example maker of a model, without a length limit.

  Args:
    stored: the model.
    name: 'pairs' for answers, or 'preferences' for pairs of answers.
    prompts: texts or conversations; their type selects the format for a folder.

  Raises:
    UserError: the model has no vocabularies, or several prefixes.
  """
  opened, options = stored.require_vocabularies(), {}
  is_text = all(isinstance(prompt, str) for prompt in prompts)
  if stored.framing.chats or not is_text:
    name = {'pairs': 'chat', 'preferences': 'chat_preferences'}[name]
  else:
    options['prefix'] = prompt_encoding.task_prefix(stored)
  options['separator'] = stored.framing.separator
  options = {key: text for key, text in options.items() if text}
  text = prompt_framing.with_options(name, options)
  return objective_names.parse_one(text).make(
    framing.Lengths(_LONGEST, _LONGEST, opened.encoder.ids.frame_size),
    opened.decoder,
    encoder_vocabulary=opened.encoder if opened.differ else None,
  )


def fits(
  stored: model_on_disk.StoredModel, sizes: Sequence[tuple[int, int]]
) -> list[bool]:
  """Returns whether each example fits into the model's context length.

  Args:
    stored: the model.
    sizes: tokens of the prompt and of the answer, each including BOS.
  """
  limits = pretrained_files.stack_positions(stored)
  read = stored.model.architecture.positions
  return [
    all(count <= limits[side] for side, count in read(*size).items())
    for size in sizes
  ]


def score_texts(
  loaded: model_in_memory.LoadedModel,
  prompts: Sequence[Prompt],
  completions: Sequence[str],
  ended: Sequence[bool],
  *,
  batch_size: int,
) -> np.ndarray:
  """Computes the rewards of the completions of prompts, [P].

  Args:
    loaded: a reward model.
    prompts: texts, or conversations ending with a user turn.
    completions: text of the completion of each prompt.
    ended: whether each completion is complete (False if truncated).
    batch_size: prompts per batch.

  Raises:
    UserError: the model is not a reward model, or an example exceeds its
      context length.
  """
  stored = loaded.stored
  make = maker(stored, 'pairs', prompts)

  def encode(prompt: Prompt, answer: str, end: bool) -> framing.Pair:
    content = [prompt, answer]
    if make.documents == 'chat':
      messages = prompt
      if isinstance(prompt, str):
        messages = [{'role': 'user', 'content': prompt}]
      content = [*messages, {'role': 'assistant', 'content': answer}]
    # Each assistant turn of a conversation is an example; nothing is random.
    documents = [(repr(answer), json.dumps(content))]
    *_, pair = make.examples(documents, np.random.default_rng)
    return pair if end else pair._replace(targets=pair.targets[:-1])

  pairs = list(map(encode, prompts, completions, ended))
  ids = stored.require_vocabularies().framing
  if not all(fits(stored, [rewards.size(pair, ids) for pair in pairs])):
    raise errors.UserError(
      f'a prompt and its completion have more tokens than {stored.path} has'
      f' positions ({pretrained_files.positions_key(stored, "decoder")}); leave'
      ' it out.'
    )
  return rewards.score(
    loaded.model,
    loaded.params,
    [[pair] for pair in pairs],
    mesh=loaded.placement.mesh,
    rules=loaded.rules,
    rows=loaded.rows(min(batch_size, len(pairs))),
    ids=ids,
  )[:, 0]
