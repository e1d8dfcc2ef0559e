r"""Continues prompts with a trained model: text in, text out.

    python -m encdec_adapt.generate --checkpoint=runs/adapted \
      --prompt='The quick' [--temperature=0.8 --top_p=0.95]

The model is the newest checkpoint of a training job, or a Hugging Face folder.
An encoder-decoder reads the prompt with its encoder, as in PrefixLM training;
a decoder-only model continues it. With --chat a prompt is what a user says,
and the model answers in the chat format of its vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import pathlib
import time
from typing import Any

from absl import flags
import jax
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.checkpoints import manager
from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import kept_files, loaded_model, stored_model
from encdec_adapt.files import disk, paths
from encdec_adapt.inference import generation
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.models import build, model_config
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.tokenizers import chat_format, vocabularies, vocabulary
from encdec_adapt.training import setup

# A text, or with --chat the messages of a conversation.
Prompt = str | chat_format.Messages
_SHORTEST = 16  # tokens; rows are padded to this times a power of two


@dataclasses.dataclass(frozen=True)
class Options:
  """What is asked of a model.

  Attributes:
    max_tokens: most tokens of a continuation.
    batch_size: prompts that are continued at a time.
    seed: of all draws; the n-th prompt draws alike for any batch size.
    sampling: how tokens are chosen.
    chat: prompts are what a user says in a conversation.
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
  """One prompt continued.

  Attributes:
    prompt: what was given.
    text: the text generated, without special tokens.
    tokens: how many were generated, EOS included.
    ended: whether the model ended it; otherwise max_tokens did.
  """

  prompt: Prompt
  text: str
  tokens: int
  ended: bool


@dataclasses.dataclass(frozen=True)
class Opened:
  """A model whose parameters have not been read.

  Attributes:
    config: its shape.
    vocabularies: of its sides.
    special_ids: as `kept_files.special_ids` gives them.
    read: gives the model and its parameters, on one device.
  """

  config: model_config.ModelConfig
  vocabularies: vocabularies.Opened
  special_ids: Mapping[str, Any]
  read: Callable[[], tuple[build.Model, Any]]

  @property
  def reader(self) -> vocabulary.Vocabulary:
    """The vocabulary that prompts are read with."""
    side = 'encoder' if 'encoder' in self.config.stacks else 'decoder'
    return self.vocabularies.sides[side]


@dataclasses.dataclass
class Timing:
  """Seconds spent so far: compiling apart from generating."""

  compiling: float = 0.0
  generating: float = 0.0


def define_flags(values: flags.FlagValues) -> None:
  """The flags of this command."""
  define = dict(flag_values=values)
  flags.DEFINE_string(
    'checkpoint',
    None,
    'Work directory of a training job, or a Hugging Face folder.',
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
  flags.DEFINE_integer('max_tokens', 64, 'Most tokens generated.', **define)
  flags.DEFINE_float('temperature', 0.0, '0 is greedy.', **define)
  flags.DEFINE_integer('top_k', None, 'Only the k likeliest.', **define)
  flags.DEFINE_float(
    'top_p', None, 'Only the likeliest that reach this probability.', **define
  )
  flags.DEFINE_integer('seed', 0, 'Of all draws.', **define)
  flags.DEFINE_integer('batch_size', 8, 'Prompts at a time.', **define)
  flags.DEFINE_bool(
    'chat', False, "Prompts are a user's turn; the answer is generated.",
    **define,
  )  # fmt: skip
  flags.DEFINE_string(
    'output', None, 'JSON file that also gets the continuations.', **define
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
  opened = open_model(values.checkpoint)
  encoded = encode_prompts(opened, prompts, values.prompts, chat=values.chat)

  timing = Timing()
  done = []
  for results in continue_prompts(opened, prompts, encoded, options, timing):
    for result in results:
      done.append(result)
      end = 'ended' if result.ended else 'cut'
      print(f'--- prompt {len(done)} of {len(prompts)}\n{result.prompt}')
      print(f'--- continuation ({result.tokens} tokens, {end})\n{result.text}')
    if values.output:  # Whatever interrupts it, what is done is there.
      _write(values.output, pathlib.Path(values.checkpoint).name, done)
  tokens = sum(result.tokens for result in done)
  print(
    f'--- {len(done)} prompts, {min(options.batch_size, len(done))} at a time:'
    f' {tokens} tokens in {timing.generating:.2f} s,'
    f' {tokens / timing.generating:.1f} tokens/s'
    f' (compiling took {timing.compiling:.1f} s)'
  )
  return 0


def read_prompts(
  texts: Sequence[str], file: str | None, *, chat: bool = False
) -> list[Prompt]:
  """Prompts of the flags, in order.

  Args:
    texts: prompts given one by one.
    file: path of a file of prompts, or None.
    chat: a line of JSON may be a conversation.

  Raises:
    UserError: both or neither are given, the file cannot be read, or a
      prompt is empty.
  """
  if bool(texts) == (file is not None):
    raise errors.UserError(
      'give either --prompt=TEXT or --prompts=FILE, and not both.'
    )
  if file is None:
    prompts = list(texts)
  else:
    try:
      # Not splitlines(), which also splits at form feeds and the like.
      lines = paths.at(file).read_text(encoding='utf-8').split('\n')
    except (OSError, UnicodeDecodeError) as error:
      raise errors.UserError(
        f'--prompts={file} cannot be read as UTF-8 text ({error}).'
      ) from error
    # The last line ends in a newline, too.
    lines = lines[:-1] if lines[-1] == '' else lines
    if not lines:
      raise errors.UserError(
        f'--prompts={file} is empty; write one prompt per line.'
      )
    prompts = lines
    if file.endswith('.jsonl'):
      prompts = [
        _json_prompt(line, _place(file, i), chat)
        for i, line in enumerate(lines)
      ]
  for i, prompt in enumerate(prompts):
    if isinstance(prompt, str) and not prompt.strip():
      raise errors.UserError(
        f'{_place(file, i)}: the prompt is empty; there is nothing to continue.'
      )
  return prompts


def _place(file: str | None, index: int) -> str:
  """Where a prompt is given, for messages."""
  if file is None:
    return f'--prompt number {index + 1}'
  return f'--prompts={file}, line {index + 1}'


def open_model(path: str) -> Opened:
  """Opens a Hugging Face folder, or the newest checkpoint of a training job.

  Args:
    path: the folder, or the job's work directory.

  Raises:
    UserError: there is no model, no sound checkpoint or no vocabulary, or it
      is not that of the checkpoint.
  """
  open_it = _open_folder if stored_model.is_folder(path) else _open_run
  config, opened, read = open_it(path)
  special = kept_files.special_ids(kept_files.folders(path), opened)
  return Opened(config, opened, special, read)


def _open_folder(path: str):
  source = stored_model.open_model(path)
  if source.vocabularies is None:
    raise errors.UserError(
      f'{path} has no tokenizer, so there is nothing to read prompts with; put'
      ' its tokenizer.model or tokenizer.json beside the weights.'
    )
  opened = source.vocabularies.open()
  for side, stack in source.model.stacks.items():
    vocabularies.check_size(opened.sides[side], stack.vocab_size, side)

  def read():
    loaded = loaded_model.load(path)
    return loaded.model, loaded.params

  return source.model, opened, read


def _open_run(workdir: str):
  settings = config_lib.load_run(workdir)
  found = manager.open_latest(workdir)
  choice = settings.data.vocabularies
  opened = stored_model.open_vocabularies(found, choice)
  if opened is None:
    raise errors.UserError(
      f'{workdir} has no vocabulary, so there is nothing to read prompts with;'
      f' put that of its model at {choice.decoder}.'
    )
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(), devices=jax.local_devices()[:1]
  )
  compute = settings.compute
  if 'encoder' in settings.model.stacks:  # It is not run from a cache.
    compute = setup.with_attention_for(compute, mesh)
  where = setup.place_model(settings.model, compute, mesh, settings.rules)
  abstract = where.abstract_params()
  return (
    settings.model,
    opened,
    lambda: (where.model, found.restore_params(abstract)),
  )


def encode_prompts(
  opened: Opened,
  prompts: Sequence[Prompt],
  file: str | None,
  *,
  chat: bool = False,
) -> list[np.ndarray]:
  """Token ids of each prompt, int32 [n], without BOS.

  Args:
    opened: the model.
    prompts: as `read_prompts` gives them.
    file: that they are from, or None.
    chat: they are what a user says, or conversations.

  Raises:
    UserError: a chat is asked for and a vocabulary has no template; or names
      the prompt that cannot be encoded.
  """
  if chat:
    for one in opened.vocabularies.sides.values():
      chat_format.template_of(one)
  encoded = []
  for index, prompt in enumerate(prompts):
    try:
      encoded.append(_encode_prompt(opened.reader, prompt, chat))
    except errors.UserError as error:
      raise errors.UserError(f'{_place(file, index)}: {error}') from error
  return encoded


def _encode_prompt(
  reader: vocabulary.Vocabulary, prompt: Prompt, chat: bool
) -> np.ndarray:
  if not chat:
    return reader.encode(prompt)
  messages = prompt
  if isinstance(prompt, str):
    messages = [{'role': 'user', 'content': prompt}]
  return chat_format.encode(messages, reader, open_turn=True).ids


def continue_prompts(
  opened: Opened,
  prompts: Sequence[Prompt],
  encoded: Sequence[np.ndarray],
  options: Options,
  timing: Timing,
) -> Iterator[list[Continuation]]:
  """Reads the parameters, and yields continuations batch by batch, in order.

  Args:
    opened: the model.
    prompts: what is continued.
    encoded: the same, as `encode_prompts` gives them.
    options: what is asked.
    timing: is added to.
  """
  model, params = opened.read()
  reader, writer = opened.reader, opened.vocabularies.decoder
  ends = list(opened.special_ids['eos'])
  if options.chat:
    ends.append(chat_format.end_of_turn(writer))
  special = {**opened.special_ids, 'eos': np.array(ends, np.int32)}
  size = min(options.batch_size, len(prompts))
  compiled = {}
  for start in range(0, len(prompts), size):
    texts = prompts[start : start + size]
    ids = [*encoded[start : start + size], *[None] * (size - len(texts))]
    rows = frame_prompts(ids, bos=reader.bos, pad=reader.pad)
    dynamic = {
      'rng': jax.random.key(options.seed),
      'rows': np.arange(start, start + size, dtype=np.int32),
      **special,
    }
    shape = rows[0].shape
    if shape not in compiled:
      began = time.perf_counter()
      compiled[shape] = generation.generate.lower(
        model,
        params,
        *rows,
        **dynamic,
        max_tokens=options.max_tokens,
        sampling=options.sampling,
      ).compile()
      timing.compiling += time.perf_counter() - began
    began = time.perf_counter()
    result = jax.device_get(compiled[shape](params, *rows, **dynamic))
    timing.generating += time.perf_counter() - began
    yield [
      _continuation(writer, text, tokens[:length], ends)
      for text, tokens, length in zip(
        texts, result.tokens, result.lengths, strict=False
      )
    ]


def frame_prompts(
  prompts: Sequence[np.ndarray | None], *, bos: int, pad: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Tokens, segments and positions [B, S]: BOS and the prompt, then padding.

  Args:
    prompts: token ids [n] of each row, None for a row that only fills up.
    bos: first token of a row.
    pad: token after a prompt.

  Returns:
    int32 arrays; S is a power of two, so that few lengths are compiled.
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
  # A model's table may have more rows than the vocabulary has tokens; no
  # text has those ids, and special ones are not shown.
  known = np.where(tokens < writer.size, tokens, writer.pad)
  return Continuation(
    prompt=prompt,
    text=writer.decode(known, start=False),
    tokens=len(tokens),
    ended=bool(tokens[-1] in ends),
  )


def _json_prompt(line: str, where: str, chat: bool) -> Prompt:
  """The prompt of a line of JSON."""
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
    raise errors.UserError(
      f'{where} is JSON of another kind than a string: {line[:60]}'
    )
  return prompt


def _write(output: str, run: str, results: Sequence[Continuation]) -> None:
  """Writes a JSON list of what was generated."""
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
