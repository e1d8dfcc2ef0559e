"""Our models in lm-eval (EleutherAI's harness, the extra `eval`).

`loglikelihood` follows the rules of lm-eval's own Hugging Face backend, so that
the numbers are comparable. An encoder-decoder gets the context, after BOS, in
its encoder and the continuation, encoded on its own, in its decoder, which
starts from BOS; spaces at the end of the context are moved to the continuation,
EOS is not scored, and an empty context is BOS alone. A decoder-only model gets
both together, after BOS. A context that is too long keeps its last tokens: as
many as the model's config.json allows (`max_position_embeddings`), where theirs
gives any encoder-decoder 2,048. A continuation that is longer than that is an
error.

It differs on purpose where that backend does not suit encoder-decoders:
 - rolling likelihood: the encoder reads the tokens before those that the
   decoder scores, as in PrefixLM (theirs gives the encoder BOS alone), and
   every token is scored once, BOS not;
 - generation: `max_gen_toks` counts generated tokens only; theirs counts the
   context, too.

Process 0 runs lm-eval, which sees one rank; the others `follow` it.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api import instance
from lm_eval.api import model as lm_eval_model
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import model_in_memory, pretrained_files
from encdec_adapt.evaluation.measures import log_likelihoods
from encdec_adapt.inference import engine, sampling
from encdec_adapt.telemetry import progress

# Tokens that are scored at a time, and those before them, in rolling
# likelihoods.
WINDOW = 1024
_MAX_TOKENS = 256  # As in lm-eval.


class Adapter(lm_eval_model.TemplateLM):
  """A model of ours with the interface of lm-eval; see the module."""

  def __init__(
    self,
    loaded: model_in_memory.LoadedModel,
    *,
    batch_size: int = 8,
    report: progress.Report | None = None,
  ):
    """Opens the model's vocabulary.

    Args:
      loaded: a model with a decoder.
      batch_size: rows at a time.
      report: called with the number of requests done and of all, as they end.

    Raises:
      UserError: the model has no tokenizer.
    """
    super().__init__()
    opened = loaded.stored.require_vocabularies()
    self._loaded, self._batch_size = loaded, batch_size
    self._report = report or (lambda done, total: None)
    self._reader = opened.sides[loaded.stored.prompt_side]
    self._writer = opened.decoder
    is_pair = loaded.config.architecture.encodes_prompt
    self.backend = 'seq2seq' if is_pair else 'causal'
    limit = pretrained_files.prompt_room(loaded.stored)
    self.max_length = limit or engine.UNLIMITED
    limit = pretrained_files.decoder_positions(loaded.stored)
    self._positions = limit or engine.UNLIMITED

  # -- What lm-eval asks of a model --------------------------------------------

  @property
  def eot_token_id(self) -> int:
    """EOS of the decoder."""
    return self._writer.eos

  @property
  def prefix_token_id(self) -> int:
    """Context of a text without one: BOS."""
    return self._reader.bos

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **_: Any
  ) -> list[int]:
    """Encodes a context, BOS first, or a continuation without BOS."""
    if add_special_tokens is False:
      return [int(i) for i in self._writer.encode(string)]
    return [self._reader.bos, *(int(i) for i in self._reader.encode(string))]

  def score_choices(
    self, pairs: Sequence[tuple[str, str]], separator: str | None
  ) -> list[tuple[float, bool]]:
    """Scores (context, choice) pairs; see `prompted_task`.

    Args:
      pairs: the texts.
      separator: text between context and choice that a decoder-only model
        reads; None for that of the run.

    Returns:
      Log-likelihood of each choice, and whether greedy decoding gives it.
    """
    if separator is None:
      separator = self._loaded.stored.separator
    if not separator or self.backend != 'causal':
      requests = [
        instance.Instance('loglikelihood', {}, pair, i)
        for i, pair in enumerate(pairs)
      ]
      return self.loglikelihood(requests, disable_tqdm=True)
    between = self.tok_encode(separator, add_special_tokens=False)
    return self._loglikelihood_tokens(
      [
        (
          (context, choice),
          [*self.tok_encode(context), *between],
          self.tok_encode(choice, add_special_tokens=False),
        )
        for context, choice in pairs
      ]
    )

  def _loglikelihood_tokens(
    self, requests: Sequence[Any], **_: Any
  ) -> list[tuple[float, bool]]:
    """Scores (texts, context ids, continuation ids).

    Raises:
      UserError: a continuation has more tokens than the decoder has positions.
    """
    for (_, text), _, continuation in requests:
      if len(continuation) > self._positions:
        raise errors.UserError(
          f'the continuation {text!r:.60} has {len(continuation)} tokens, more'
          f' than the {self._positions} positions of {self._loaded.stored.path}'
          ' (max_position_embeddings of its config.json); shorten the text of'
          ' the task.'
        )
    pairs = [self._truncated(*ids) for _, *ids in requests]
    scored = self._score(pairs)
    return [(one.log_prob, one.greedy) for one in scored]

  def _truncated(
    self, context: Sequence[int], continuation: Sequence[int]
  ) -> log_likelihoods.Pair:
    """Keeps the last tokens of a context that is too long."""
    room = self.max_length
    if self.backend == 'causal':
      room += 1 - len(continuation)
    return log_likelihoods.Pair(list(context)[-room:], list(continuation))

  def _prompt(self, tokens: Sequence[int], generated: int) -> Sequence[int]:
    """Keeps the last tokens of a prompt that is too long to be continued."""
    room = self.max_length - (generated if self.backend == 'causal' else 0)
    if room < 1:
      raise errors.UserError(
        f'a task generates up to {generated} tokens, and the model reads at'
        f' most {self.max_length}; lower max_gen_toks in its generation_kwargs.'
      )
    return tokens[-room:]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    """Scores whole texts, window by window."""
    del disable_tqdm
    pairs, owners = [], []
    for number, request in enumerate(requests):
      (text,) = request.args
      tokens = self.tok_encode(text, add_special_tokens=False)
      size = min(WINDOW, max(1, self.max_length // 2), self._positions)
      for start in range(0, len(tokens), size):
        before = tokens[max(0, start - size) : start]
        if self._reader is not self._writer:
          text_before = self._writer.decode(before, start=False)
          before = self._reader.encode(text_before)[-size:].tolist()
        pairs.append(
          log_likelihoods.Pair(
            [self.prefix_token_id, *before], tokens[start : start + size]
          )
        )
        owners.append(number)
    totals = [0.0] * len(requests)
    for owner, one in zip(owners, self._score(pairs), strict=True):
      totals[owner] += one.log_prob
    return totals

  def generate_until(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[str]:
    """Continues contexts up to one of the texts that end them."""
    del disable_tqdm
    wanted = []
    for request in requests:
      context, options = request.args
      wanted.append([self.tok_encode(context), _read_options(options)])
    return self._together('generate', wanted)

  # -- All processes -----------------------------------------------------------

  def follow(self) -> None:
    """Takes part in what process 0 asks for until it calls `stop`."""
    while self._together('', None) is not None:
      pass

  def stop(self) -> None:
    """Ends `follow` on the other processes."""
    self._together('stop', None)

  def _score(
    self, pairs: Sequence[log_likelihoods.Pair]
  ) -> list[log_likelihoods.Scored]:
    if not pairs:
      return []
    found = self._together('score', [list(pair) for pair in pairs])
    return [log_likelihoods.Scored(*one) for one in found]

  def _together(self, kind: str, work: Any) -> Any:
    """Runs what process 0 asks for on every process."""
    kind, work = distributed.from_lead(lambda: [kind, work], 'evaluation')
    if kind == 'stop':
      return None
    made = self._run_score if kind == 'score' else self._run_generate
    found: list[Any] = [None] * len(work)
    for done, (i, one) in enumerate(made(work), 1):
      found[i] = one
      self._report(done, len(work))
    return found

  def _run_score(self, work: Sequence[Any]) -> Any:
    return log_likelihoods.score(
      self._loaded,
      [log_likelihoods.Pair(*pair) for pair in work],
      batch_size=self._batch_size,
      bos=self._writer.bos,
    )

  def _run_generate(self, work: Sequence[Any]) -> Any:
    made = self._loaded.engine(rows=self._loaded.rows(self._batch_size))
    requests = [
      engine.Request(
        np.array(self._prompt(tokens, options['max_tokens']), np.int32),
        options['max_tokens'],
        sampling.SamplingConfig(
          **options['sampling'], seed=sampling.seed_of(0, i)
        ),
        tuple(options['stop']),
      )
      for i, (tokens, options) in enumerate(work)
    ]
    for i, completion in made.run(requests):
      yield i, completion.text


def _read_options(options: dict[str, Any]) -> dict[str, Any]:
  """Reads lm-eval's options of generation.

  Raises:
    UserError: an option is not supported.
  """
  options = dict(options)
  until = options.pop('until', [])
  stop = [until] if isinstance(until, str) else list(until)
  limits = [
    options.pop(name, None)
    for name in ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_length')
  ]
  drawn = options.pop('do_sample', None)
  chosen = {
    name: value
    for name in ('temperature', 'top_k', 'top_p', 'min_p')
    if (value := options.pop(name, None)) is not None
  }
  penalty = options.pop('repetition_penalty', 1.0)
  if not drawn or not chosen.get('temperature', 1.0):
    chosen = {}
  else:
    chosen.setdefault('temperature', 1.0)
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
