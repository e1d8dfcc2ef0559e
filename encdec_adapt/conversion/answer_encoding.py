"""Prompts and answers as token ids, as a run's model read them in training.

A maker of the run's objective (`objectives`) encodes both together, so that
prefix, separator, chat format and the end of an answer are those of training. A
Hugging Face folder has plain texts that end with EOS, or conversations where a
prompt is one. Rewards of texts are computed here, too.
"""

from collections.abc import Mapping, Sequence
import json

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.conversion import (
  model_in_memory,
  model_on_disk,
  pretrained_files,
  prompt_encoding,
)
from encdec_adapt.inference import rewards
from encdec_adapt.objectives import example_maker, framing, objective_names
from encdec_adapt.tokenizers import chat_format

Prompt = str | chat_format.Messages
_LONGEST = 1 << 30  # Tokens that a row has room for; `fits` checks them.


def maker(
  stored: model_on_disk.StoredModel, name: str, *, chat: bool = False
) -> example_maker.ExampleMaker:
  """Returns the maker of examples that a model reads, of any length.

  Args:
    stored: the model.
    name: 'pairs' for answers, or 'preferences' for pairs of answers.
    chat: whether prompts are conversations, if the run does not say it.

  Raises:
    UserError: the model has no vocabularies, or several prefixes.
  """
  opened = stored.require_vocabularies()
  options = {'separator': stored.separator}
  if chat or stored.answers_chats:
    name = {'pairs': 'chat', 'preferences': 'chat_preferences'}[name]
  else:
    options['prefix'] = prompt_encoding.task_prefix(stored)
  options = [f'{key}={json.dumps(x)}' for key, x in options.items() if x]
  objective = objective_names.parse_one(f'{name}:{",".join(options)}')
  return objective.make(
    framing.Lengths(_LONGEST, _LONGEST),
    opened.decoder,
    encoder_vocabulary=opened.encoder if opened.differ else None,
  )


def fits(
  stored: model_on_disk.StoredModel,
  limits: Mapping[str, float],
  pairs: Sequence[framing.Pair],
) -> bool:
  """Returns whether a model has the positions to read answers to a prompt.

  Args:
    stored: the model.
    limits: result of `pretrained_files.stack_positions`.
    pairs: the prompt with each answer.
  """
  inputs = max(len(pairs[0].inputs), len(pairs[0].teacher_inputs)) + 1
  # A decoder reads BOS and all targets.
  longest = max(len(pair.targets) for pair in pairs) + 1
  positions = stored.model.architecture.positions(inputs, longest)
  return all(count <= limits[side] for side, count in positions.items())


def score_texts(
  loaded: model_in_memory.LoadedModel,
  prompts: Sequence[Prompt],
  completions: Sequence[Sequence[str]],
  ended: Sequence[Sequence[bool]],
  *,
  batch_size: int,
) -> np.ndarray:
  """Computes the rewards of completions of prompts, [P, G].

  Args:
    loaded: a reward model.
    prompts: texts, or conversations that end with a user.
    completions: the texts of the G completions of each prompt.
    ended: whether each has an end: one that was cut short has none.
    batch_size: prompts at a time.

  Raises:
    UserError: the model is no reward model, or has fewer positions than an
      example; names it.
  """
  stored, groups = loaded.stored, []
  rewards.require_reward_model(stored.model, str(stored.path))
  limits = pretrained_files.stack_positions(stored)
  chat = not all(isinstance(prompt, str) for prompt in prompts)
  make, side = maker(stored, 'pairs', chat=chat), stored.prompt_side
  opened = stored.require_vocabularies()
  for i, (prompt, texts) in enumerate(zip(prompts, completions, strict=True)):
    pairs = [_pair(make, f'{i + 1}', prompt, text) for text in texts]
    if not fits(stored, limits, pairs):
      raise errors.UserError(
        f'prompt {i + 1} and its completion have more tokens than {stored.path}'
        ' has positions (max_position_embeddings of its config.json).'
      )
    ids = pairs[0].inputs if side == 'encoder' else pairs[0].teacher_inputs
    # The end is the last token.
    answers = [
      pair.targets[: len(pair.targets) - (not end)]
      for pair, end in zip(pairs, ended[i], strict=True)
    ]
    groups.append(([opened.sides[side].bos, *ids], answers))
  return rewards.score(
    loaded.model,
    loaded.params,
    *zip(*groups, strict=True),
    mesh=loaded.where.mesh,
    rules=loaded.rules,
    rows=loaded.rows(min(batch_size, len(groups))),
    bos=opened.decoder.bos,
  )


def _pair(
  make: example_maker.ExampleMaker, name: str, prompt: Prompt, answer: str
) -> framing.Pair:
  """Encodes a prompt and its completion."""
  content = [prompt, answer]
  if make.documents == 'chat':
    messages = prompt
    if isinstance(prompt, str):
      messages = [{'role': 'user', 'content': prompt}]
    content = [*messages, {'role': 'assistant', 'content': answer}]
  # Of a conversation every turn of the assistant is an example.
  return [*make.examples([(name, json.dumps(content))], None)][-1]
