"""Our models in lm-eval (EleutherAI's harness, the extra `eval`).

`loglikelihood` follows the rules of lm-eval's Hugging Face backend, for
comparable numbers. The encoder of an encoder-decoder reads the context, after
BOS; its decoder starts from BOS and reads the continuation, encoded separately.
Trailing spaces of the context move to the continuation, EOS is not scored, and
an empty context is BOS alone. A decoder-only model reads both together, after
BOS (GPT-2 and Qwen without it). Longer contexts keep their last tokens, up to
the model's limit (`max_position_embeddings` of config.json; lm-eval gives any
encoder-decoder 2,048). A longer continuation is an error.

The adapter differs on purpose where that backend does not suit
encoder-decoders:
 - the opening of targets, such as the token that BART is forced to write first,
   is read before a continuation, and not scored;
 - rolling likelihood: the encoder reads the tokens before the scored window, as
   in PrefixLM (theirs gives the encoder BOS alone), and every token but BOS is
   scored once;
 - generation: `max_gen_toks` counts generated tokens only; theirs counts the
   context, too.

Process 0 runs lm-eval, with a single rank; the others `follow` it. Only this
module imports lm-eval's model interface, when a task is run.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api import instance
from lm_eval.api import model as lm_eval_model
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.generation import model_in_memory
from encdec_adapt.inference import (
  engine,
  log_likelihoods,
  row_batches,
  sampling,
)
from encdec_adapt.stored import pretrained_files
from encdec_adapt.telemetry import progress

# Tokens of a rolling-likelihood window, and maximum tokens of its context.
WINDOW = 1024
_MAX_TOKENS = 256  # As in lm-eval.


class Adapter(lm_eval_model.TemplateLM):
  """A model with lm-eval's interface; see the module docstring."""

  def __init__(
    self,
    loaded: model_in_memory.LoadedModel,
    *,
    batch_size: int = 8,
    report: progress.Report | None = None,
    prefix: str = '',
  ):
    """Opens the model's vocabulary.

    Args:
      loaded: a model with a decoder.
      batch_size: rows at a time.
      report: progress callback (requests done, all requests).
      prefix: text before every context, except in rolling likelihoods.

    Raises:
      UserError: the model has no tokenizer.
    """
    super().__init__()
    opened = loaded.stored.require_vocabularies()
    self._loaded, self._batch_size = loaded, batch_size
    self._report = report or (lambda *_: None)
    self._prefix = prefix
    self._reader = opened.sides[loaded.stored.prompt_side]
    self._writer = opened.decoder
    is_pair = loaded.config.architecture.encodes_prompt
    # lm-eval encodes context and continuation together for 'causal'.
    self.backend = 'seq2seq' if is_pair else 'causal'
    limit = pretrained_files.prompt_room(loaded.stored)
    self.max_length = limit or engine.UNLIMITED
    positions = pretrained_files.stack_positions(loaded.stored)['decoder']
    self._positions = min(positions, engine.UNLIMITED)
    self._opening = len(self._writer.ids.target_opening)

  # -- The interface of lm-eval ------------------------------------------------

  @property
  def eot_token_id(self) -> int:
    """EOS of the decoder."""
    return self._writer.eos

  @property
  def prefix_token_id(self) -> int:
    """BOS, or T5's EOS: stands in for an empty context."""
    return self._framed([])[0]

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **_: Any
  ) -> list[int]:
    """Encodes a context, framed, or a continuation without framing."""
    # int: requests are sent to the other processes as JSON.
    if add_special_tokens is False:
      return [int(i) for i in self._writer.encode(string)]
    return self._framed(self._reader.encode(self._prefix + string))

  def _encode_pair(
    self, context: str, continuation: str
  ) -> tuple[list[int], list[int]]:
    """Encodes a context of spaces as an empty one."""
    if self._prefix or context.strip():
      return super()._encode_pair(context, continuation)
    text = context + continuation
    return self._framed([]), self.tok_encode(text, add_special_tokens=False)

  def _framed(self, context: Sequence[int]) -> list[int]:
    side = self._loaded.stored.prompt_side
    return self._reader.ids.frame(context, side)

  def score_choices(
    self, pairs: Sequence[tuple[str, str]], separator: str | None
  ) -> list[tuple[float, bool]]:
    """Scores (context, choice) pairs; see `prompted_task`.

    Args:
      pairs: the texts.
      separator: text between context and choice for decoder-only models; None
        for the separator of the run.

    Returns:
      Log-likelihood of each choice, and whether greedy decoding yields it.
    """
    if separator is None:
      separator = self._loaded.stored.framing.separator
    if not separator or self.backend != 'causal':
      requests = [
        instance.Instance('loglikelihood', {}, pair, i)
        for i, pair in enumerate(pairs)
      ]
      return self.loglikelihood(requests, disable_tqdm=True)
    # As in training, the separator is encoded separately; lm-eval would encode
    # it with the choice.
    between = self.tok_encode(separator, add_special_tokens=False)
    requests = [
      (
        pair,
        self._framed([*self._reader.encode(self._prefix + pair[0]), *between]),
        self.tok_encode(pair[1], add_special_tokens=False),
      )
      for pair in pairs
    ]
    return self._loglikelihood_tokens(requests)

  def _loglikelihood_tokens(
    self, requests: Sequence[Any], **_: Any
  ) -> list[tuple[float, bool]]:
    """Scores (texts, context ids, continuation ids).

    Raises:
      UserError: a continuation has more tokens than the decoder has positions.
    """
    for (_, text), _, continuation in requests:
      count = self._opening + len(continuation)
      if count > self._positions:
        stored = self._loaded.stored
        key = pretrained_files.positions_key(stored, 'decoder')
        raise errors.UserError(
          f'the continuation {text!r:.60} has {count} tokens, more than the'
          f' {self._positions} positions of {stored.path} ({key}); shorten the'
          ' text of the task.'
        )
    pairs = [self._truncated(*ids) for _, *ids in requests]
    return [tuple(scored) for scored in self._score(pairs)]

  def _truncated(
    self, context: Sequence[int], continuation: Sequence[int]
  ) -> log_likelihoods.Pair:
    """Truncates a context to its last tokens."""
    room = self.max_length
    if self.backend == 'causal':
      # The last token of the continuation is predicted, not read.
      room += 1 - self._opening - len(continuation)
    return log_likelihoods.Pair(list(context)[-room:], list(continuation))

  def _prompt(self, tokens: Sequence[int], generated: int) -> Sequence[int]:
    room = self.max_length - (generated if self.backend == 'causal' else 0)
    if room < 1:
      raise errors.UserError(
        f'a task generates up to {generated} tokens, and the model reads at'
        f' most {self.max_length}; lower max_gen_toks in its generation_kwargs.'
      )
    return tokens[-room:]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], **_: Any
  ) -> list[float]:
    """Scores whole texts, window by window."""
    pairs, owners = [], []
    for number, request in enumerate(requests):
      (text,) = request.args
      tokens = self.tok_encode(text, add_special_tokens=False)
      size = min(WINDOW, max(1, (self.max_length - self._opening) // 2))
      size = min(size, self._positions - self._opening)
      for start in range(0, len(tokens), size):
        context = tokens[max(0, start - size) : start]
        if self._reader is not self._writer:
          # The encoder's vocabulary may need more tokens for the same text.
          decoded = self._writer.decode(context, start=False)
          context = self._reader.encode(decoded)[-size:].tolist()
        context = self._framed(context)
        window = tokens[start : start + size]
        pairs.append(log_likelihoods.Pair(context, window))
        owners.append(number)
    totals = [0.0] * len(requests)
    for owner, scored in zip(owners, self._score(pairs), strict=True):
      totals[owner] += scored.log_prob
    return totals

  def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
    """Continues contexts up to a stop string."""
    pairs = (request.args for request in requests)
    work = [[self.tok_encode(text), _read_options(x)] for text, x in pairs]
    return self._together('generate', work)

  # -- All processes -----------------------------------------------------------

  def follow(self) -> None:
    """Takes part in the requests of process 0 until it calls `stop`."""
    while self._together('', None) is not None:
      pass

  def stop(self) -> None:
    """Ends `follow` on the other processes."""
    self._together('stop', None)

  def _score(
    self, pairs: Sequence[log_likelihoods.Pair]
  ) -> list[log_likelihoods.Scored]:
    return self._together('score', pairs) if pairs else []

  def _together(self, kind: str, work: Any) -> Any:
    """Runs the requests of process 0 on every process.

    Args:
      kind: 'score', 'generate' or 'stop'; ignored on other processes.
      work: the requests, JSON serialisable; ignored on other processes.
    """
    kind, work = distributed.from_lead(lambda: [kind, work], 'evaluation')
    if kind == 'stop':
      return None

    def report(count: int) -> None:
      self._report(count, len(work))

    if kind == 'score':
      pairs = [log_likelihoods.Pair(*pair) for pair in work]
      return self._loaded.score_tokens(pairs, self._batch_size, report)
    completions = self._generate(work)
    return [x.text for x in row_batches.in_order(completions, report)]

  def _generate(
    self, work: Sequence[Any]
  ) -> Iterator[tuple[int, engine.Completion]]:
    runner = self._loaded.engine(rows=self._loaded.rows(self._batch_size))
    requests = []
    for i, (tokens, options) in enumerate(work):
      limit, stop = options['max_tokens'], tuple(options['stop'])
      prompt = np.array(self._prompt(tokens, limit), np.int32)
      # A seed per request: samples are independent of the batch.
      seed = sampling.seed_of(0, i)
      config = sampling.SamplingConfig(**options['sampling'], seed=seed)
      requests.append(engine.Request(prompt, limit, config, stop))
    return runner.run(requests)


def _read_options(options: dict[str, Any]) -> dict[str, Any]:
  options = dict(options)
  until = options.pop('until', [])
  stop = [until] if isinstance(until, str) else until
  # Tasks and versions of lm-eval name the limit differently.
  limits = [
    options.pop(name, None)
    for name in ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_length')
  ]
  is_sampled = options.pop('do_sample', None)
  chosen = {'temperature': 1.0} | {
    name: value
    for name in ('temperature', 'top_k', 'top_p', 'min_p')
    if (value := options.pop(name, None)) is not None
  }
  penalty = options.pop('repetition_penalty', 1.0)
  if not (is_sampled and chosen['temperature']):
    # As in transformers, greedy decoding ignores sampling options.
    chosen = {}
  # Silently dropping an option would change published numbers.
  if options.pop('num_beams', 1) != 1 or options:
    raise errors.UserError(
      f'generation options {sorted(options) or ["num_beams"]} of a task are not'
      ' supported; remove them from its generation_kwargs.'
    )
  return {
    'max_tokens': next((n for n in limits if n is not None), _MAX_TOKENS),
    'stop': [text for text in stop if text],
    'sampling': {**chosen, 'repetition_penalty': penalty},
  }
