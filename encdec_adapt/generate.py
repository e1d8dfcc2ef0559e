r"""Continues prompts with a trained model: text in, text out.

    python -m encdec_adapt.generate --checkpoint=runs/adapted \
      --prompt='The quick' [--temperature=0.8 --top_p=0.95]

The model is the newest checkpoint of a run, or a Hugging Face folder. An
encoder-decoder reads the prompt with its encoder, as in PrefixLM training; a
decoder-only model continues it. With --chat a prompt is a user's turn, and
the model answers in the chat format of its vocabulary.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import json
import pathlib

from absl import flags
import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import kept_files, loaded_model, stored_model
from encdec_adapt.files import disk, paths
from encdec_adapt.inference import generation
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.tokenizers import chat_format, vocabularies, vocabulary

# A text, or with --chat the messages of a conversation.
Prompt = str | chat_format.Messages
_SHORTEST = 16  # Rows are padded to a multiple of this and a power of two.


@dataclasses.dataclass(frozen=True)
class Options:
  """How prompts are continued.

  Attributes:
    max_tokens: maximum tokens of a continuation, at least 1.
    batch_size: prompts that are continued at a time, at least 1.
    seed: seed of all draws; the n-th prompt draws alike for any batch size.
    sampling: how tokens are chosen.
    chat: whether prompts are turns of a user in a conversation.
  """

  max_tokens: int = 64
  batch_size: int = 8
  seed: int = 0
  sampling: sampling_lib.SamplingConfig = sampling_lib.SamplingConfig()
  chat: bool = False

  def __post_init__(self):
    for name in ('max_tokens', 'batch_size'):
      if getattr(self, name) < 1:
        raise errors.UserError(
          f'--{name} is {getattr(self, name)}; it must be at least 1.'
        )


@dataclasses.dataclass(frozen=True)
class Continuation:
  """A prompt and its continuation.

  Attributes:
    prompt: the prompt.
    text: the generated text, without special tokens.
    tokens: number of generated tokens, EOS included.
    ended: whether the model ended it; otherwise max_tokens did.
  """

  prompt: Prompt
  text: str
  tokens: int
  ended: bool


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags of this command."""
  define = dict(flag_values=values)
  flags.DEFINE_string(
    'checkpoint',
    None,
    'Work directory of a run, or a Hugging Face folder.',
    **define,
  )
  flags.DEFINE_multi_string(
    'prompt', [], 'Text to continue; may be repeated.', **define
  )
  flags.DEFINE_string(
    'prompts',
    None,
    'File with a prompt per line; with a JSON string per line if it ends in'
    ' .jsonl, or with --chat also a list of messages ("role", "content").',
    **define,
  )
  flags.DEFINE_integer('max_tokens', 64, 'Maximum generated tokens.', **define)
  flags.DEFINE_float('temperature', 0.0, '0 is greedy.', **define)
  flags.DEFINE_integer(
    'top_k', None, 'Draw among the k likeliest tokens only.', **define
  )
  flags.DEFINE_float(
    'top_p',
    None,
    'Draw among the likeliest tokens that reach this probability only.',
    **define,
  )
  flags.DEFINE_integer('seed', 0, 'Seed of all draws.', **define)
  flags.DEFINE_integer('batch_size', 8, 'Prompts at a time.', **define)
  flags.DEFINE_bool(
    'chat', False, "Take prompts as a user's turns and answer them.", **define
  )
  flags.DEFINE_string(
    'output', None, 'JSON file to write the continuations to.', **define
  )


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'checkpoint')
  prompts = read_prompts(values.prompt, values.prompts, chat=values.chat)
  options = Options(
    values.max_tokens,
    values.batch_size,
    values.seed,
    sampling_lib.SamplingConfig(values.temperature, values.top_k, values.top_p),
    values.chat,
  )
  if values.output:
    disk.require_output(values.output)
  stored = stored_model.open_model(values.checkpoint)
  opened = open_vocabularies(stored)
  encoded = encode_prompts(stored, opened, prompts, values.prompts, options)
  done = []
  for results in continue_prompts(stored, opened, prompts, encoded, options):
    for result in results:
      done.append(result)
      end = 'ended' if result.ended else 'cut'
      print(f'--- prompt {len(done)} of {len(prompts)}\n{result.prompt}')
      print(f'--- continuation ({result.tokens} tokens, {end})\n{result.text}')
    if values.output:  # Written after each batch, in case of an interruption.
      _write(values.output, pathlib.Path(values.checkpoint).name, done)
  return 0


def read_prompts(
  texts: Sequence[str], file: str | None, *, chat: bool = False
) -> list[Prompt]:
  """Reads the prompts of the flags, in order.

  Args:
    texts: prompts given one by one.
    file: path of a file of prompts, or None.
    chat: whether a line of JSON may be a conversation.

  Raises:
    UserError: both or neither are given, the file cannot be read, or a
      prompt is empty.
  """
  if bool(texts) == (file is not None):
    raise errors.UserError(
      'give either --prompt=TEXT or --prompts=FILE, and not both.'
    )
  prompts = list(texts)
  if file is not None:
    try:
      # Not splitlines(), which also splits at form feeds and the like.
      content = paths.at(file).read_text(encoding='utf-8')
      prompts = content.removesuffix('\n').split('\n')
    except (OSError, UnicodeDecodeError) as error:
      raise errors.UserError(
        f'--prompts={file} cannot be read as UTF-8 text ({error}).'
      ) from error
    if file.endswith('.jsonl'):
      prompts = [
        _json_prompt(line, _place(file, i), chat)
        for i, line in enumerate(prompts)
      ]
  for i, prompt in enumerate(prompts):
    if isinstance(prompt, str) and not prompt.strip():
      raise errors.UserError(
        f'{_place(file, i)}: the prompt is empty; there is nothing to continue.'
      )
  return prompts


def _json_prompt(line: str, where: str, chat: bool) -> Prompt:
  """Parses a prompt from a line of JSON."""
  try:
    prompt = json.loads(line)
  except json.JSONDecodeError as error:
    raise errors.UserError(
      f'{where} is not JSON ({error}); write one JSON string per line.'
    ) from error
  if chat and isinstance(prompt, list):
    try:
      chat_format.check_messages(prompt)
    except errors.UserError as error:
      raise errors.UserError(f'{where}: {error}') from error
  elif not isinstance(prompt, str):
    raise errors.UserError(f'{where} must be a JSON string: {line[:60]}')
  return prompt


def _place(file: str | None, index: int) -> str:
  """Returns the place of a prompt, for messages."""
  if file is None:
    return f'--prompt number {index + 1}'
  return f'--prompts={file}, line {index + 1}'


def open_vocabularies(stored: stored_model.StoredModel) -> vocabularies.Opened:
  """Opens the vocabularies of a model.

  Raises:
    UserError: there is none, or it has ids that the model has no row for.
  """
  opened = stored.open_vocabularies()
  if opened is None:
    raise errors.UserError(
      f'{stored.path} has no tokenizer to read prompts with; put its'
      ' tokenizer.model or tokenizer.json into the folder of the weights.'
    )
  for side, stack in stored.model.stacks.items():
    vocabularies.check_size(opened.sides[side], stack.vocab_size, side)
  return opened


def _reader(
  stored: stored_model.StoredModel, opened: vocabularies.Opened
) -> vocabulary.Vocabulary:
  """Returns the vocabulary that prompts are read with."""
  return opened.sides[next(iter(stored.model.stacks))]


def encode_prompts(
  stored: stored_model.StoredModel,
  opened: vocabularies.Opened,
  prompts: Sequence[Prompt],
  file: str | None = None,
  options: Options = Options(),
) -> list[np.ndarray]:
  """Encodes each prompt as token ids, int32 [n], without BOS.

  Args:
    stored: the model.
    opened: vocabularies of the model.
    prompts: see `read_prompts`.
    file: the file that they come from, or None.
    options: how they are continued.

  Raises:
    UserError: a vocabulary has no chat template and one is needed, or a
      prompt cannot be encoded; names the prompt.
  """
  reader = _reader(stored, opened)
  if options.chat:
    for one in opened.sides.values():
      chat_format.template_of(one)
  encoded = []
  for index, prompt in enumerate(prompts):
    try:
      if not options.chat:
        encoded.append(reader.encode(prompt))
        continue
      messages = prompt
      if isinstance(prompt, str):
        messages = [{'role': 'user', 'content': prompt}]
      encoded.append(chat_format.encode(messages, reader, open_turn=True).ids)
    except errors.UserError as error:
      raise errors.UserError(f'{_place(file, index)}: {error}') from error
  return encoded


def continue_prompts(
  stored: stored_model.StoredModel,
  opened: vocabularies.Opened,
  prompts: Sequence[Prompt],
  encoded: Sequence[np.ndarray],
  options: Options,
) -> Iterator[list[Continuation]]:
  """Reads the parameters and yields continuations batch by batch, in order.

  Args:
    stored: the model.
    opened: vocabularies of the model.
    prompts: the prompts.
    encoded: their token ids, see `encode_prompts`.
    options: how they are continued.
  """
  dtype = jnp.float32
  if stored.step is not None:
    dtype = jnp.dtype(config_lib.load_run(str(stored.path)).compute.dtype)
  loaded = loaded_model.read(stored, dtype=dtype)
  reader, writer = _reader(stored, opened), opened.decoder
  special = dict(
    kept_files.special_ids(kept_files.folders(stored.path), opened)
  )
  ends = list(special['eos'])
  if options.chat:
    ends.append(chat_format.end_of_turn(writer))
  special['eos'] = np.array(ends, np.int32)
  size = min(options.batch_size, len(prompts))
  for start in range(0, len(prompts), size):
    texts = prompts[start : start + size]
    ids = [*encoded[start : start + size], *[None] * (size - len(texts))]
    result = generation.generate(
      loaded.model,
      loaded.params,
      *frame_prompts(ids, bos=reader.bos, pad=reader.pad),
      rng=jax.random.key(options.seed),
      rows=np.arange(start, start + size, dtype=np.int32),
      max_tokens=options.max_tokens,
      sampling=options.sampling,
      **special,
    )
    result = jax.device_get(result)
    yield [
      _continuation(writer, text, tokens[:length], ends)
      for text, tokens, length in zip(
        texts, result.tokens, result.lengths, strict=False
      )
    ]


def frame_prompts(
  prompts: Sequence[np.ndarray | None], *, bos: int, pad: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Frames prompts as rows [B, S]: BOS and the prompt, then padding.

  Args:
    prompts: token ids [n] of each row, None for a row of padding only.
    bos: first token of a row.
    pad: token after a prompt.

  Returns:
    Tokens, segments and positions, int32; S is a power of two, so that few
    lengths are compiled.
  """
  longest = max(len(ids) + 1 for ids in prompts if ids is not None)
  length = _SHORTEST
  while length < longest:
    length *= 2
  tokens = np.full((len(prompts), length), pad, np.int32)
  segments, positions = np.zeros((2, *tokens.shape), np.int32)
  for row, ids in enumerate(prompts):
    if ids is not None:
      used = len(ids) + 1
      tokens[row, :used] = [bos, *ids]
      segments[row, :used] = 1
      positions[row, :used] = np.arange(used)
  return tokens, segments, positions


def _continuation(
  writer: vocabulary.Vocabulary,
  prompt: Prompt,
  tokens: np.ndarray,
  ends: Sequence[int],
) -> Continuation:
  # A table may have more rows than the vocabulary has tokens; no text has
  # those ids.
  known = np.where(tokens < writer.size, tokens, writer.pad)
  return Continuation(
    prompt=prompt,
    text=writer.decode(known, start=False),
    tokens=len(tokens),
    ended=bool(tokens[-1] in ends),
  )


def _write(output: str, run: str, results: Sequence[Continuation]) -> None:
  """Writes the continuations as a JSON list."""
  samples = [
    {
      'run': run,
      'prompt': result.prompt,
      'continuation': result.text,
      'tokens': result.tokens,
      'ended': result.ended,
    }
    for result in results
  ]
  text = json.dumps(samples, indent=2, ensure_ascii=False) + '\n'
  paths.write(output, text.encode())


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
