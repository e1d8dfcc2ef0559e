"""Generation against the same T5Gemma in transformers on torch.

Greedy and beam search in fp32. Latency: one prompt, tokens after each other
until `--tokens`. Throughput: a file of `--prompts` prompts of mixed lengths,
whose continuations end at mixed lengths too: of the tokens that the model
generates one in `--ends` is an EOS, and a repetition penalty keeps a random
model from repeating itself. The engine refills its rows; transformers runs
batches of prompts sorted by length, padded, each until its last row has ended.
Both generate the same tokens (checked), and take turns. Compiling is left out.
Ratios are the peer's seconds over ours. Needs `pip install -e .[peer]`.

`--ctranslate2` compares with CTranslate2 instead, on such a model without
soft-caps and with a window that holds every text, the only ones whose scores
its T5Gemma has right; forced to `--tokens` tokens, on as many threads, fp32.
Needs `pip install -e .[peer,ctranslate2]`.

`--int8` also measures our engine with 8-bit kernels, and prints how many
greedy tokens agree with fp32 and the difference of log-probabilities.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib
import tempfile
from typing import Any

import numpy as np

from encdec_adapt.inference import engine as engine_lib
from tests.benchmarks import results

SIZES = {
  'layers': 4,
  'width': 128,
  'mlp_width': 512,
  'heads': 4,
  'kv_heads': 2,
  'head_dim': 32,
  'vocab_size': 4096,
}
PAD, EOS, BOS = 0, 1, 2
IDS = engine_lib.SpecialIds(bos=BOS, eos=(-1,), pad=PAD)  # Nothing ends.


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__,
    **SIZES,
    prompts=64,
    penalty=1.5,
    longest=256,
    tokens=64,
    ends=40,
    batch_size=8,
    beams=4,
    beam_prompts=8,
    steps=3,
    int8=False,
    ctranslate2=False,
  ).parse_args(argv)
  if arguments.ctranslate2:
    rows = _ctranslate2(arguments)
    return results.report('generation', rows, arguments)
  import torch
  import transformers

  import encdec_adapt
  from encdec_adapt.huggingface import config_json
  from encdec_adapt.models import model_config as configs

  sizes = {name: getattr(arguments, name) for name in SIZES}
  stack = configs.StackConfig(**sizes, query_scale=float(arguments.head_dim))
  raw, _ = config_json.raw_from_model(configs.encoder_decoder(stack, stack))
  torch.manual_seed(0)
  theirs = transformers.AutoModelForSeq2SeqLM.from_config(
    transformers.T5GemmaConfig.from_dict(raw), attn_implementation='eager'
  ).eval()
  with torch.no_grad():
    for parameter in theirs.parameters():
      if parameter.ndim > 1:  # Otherwise one token follows everywhere.
        parameter.mul_(3)
  with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(pathlib.Path(folder))
    ours = encdec_adapt.load(folder, encoder_window='inclusive')
  rng = np.random.default_rng(0)
  lengths = rng.integers(8, arguments.longest, arguments.prompts)
  prompts = [
    np.array([BOS, *rng.integers(3, sizes['vocab_size'], n)]) for n in lengths
  ]
  compared = _Compared(ours, theirs, arguments)
  ends = compared.draw_ends(prompts, rng)
  rows = [
    compared.row('latency, greedy', prompts[:1], batch=1, ends=()),
    compared.row(
      f'latency, {arguments.beams} beams',
      prompts[:1],
      batch=1,
      ends=(),
      beams=arguments.beams,
    ),
    compared.row(
      'file, greedy',
      prompts,
      batch=arguments.batch_size,
      ends=ends,
    ),
    compared.row(
      f'file, {arguments.beams} beams',
      prompts[: arguments.beam_prompts],
      batch=arguments.batch_size,
      ends=ends,
      beams=arguments.beams,
    ),
  ]
  if arguments.int8:
    rows.append(compared.int8(prompts))
  return results.report('generation', rows, arguments)


def _ctranslate2(arguments: Any) -> list[dict[str, Any]]:
  """Compares with CTranslate2 on batches of prompts of one length."""
  import os

  import ctranslate2
  import transformers

  from encdec_adapt.models import model_config as configs
  from tests import tiny_tokenizers, toy_models

  count = arguments.tokens
  rng = np.random.default_rng(0)
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    place = pathlib.Path(folder)
    tiny_tokenizers.save(place / 'tokens', 'gemma', tiny_tokenizers.TEXTS, 400)
    tokens = transformers.AutoTokenizer.from_pretrained(str(place / 'tokens'))
    sizes = {name: getattr(arguments, name) for name in SIZES}
    stack = configs.StackConfig(
      **{**sizes, 'vocab_size': len(tokens)},
      query_scale=float(arguments.head_dim),
      attention_softcap=None,
      final_softcap=None,
      window=4096,
    )
    ours = toy_models.save(
      place / 'model', configs.encoder_decoder(stack, stack), scale=0.1
    )
    converter = ctranslate2.converters.TransformersConverter(
      str(place / 'model')
    )
    converter.convert(str(place / 'converted'))
    peer = ctranslate2.Translator(
      str(place / 'converted'),
      compute_type='float32',
      inter_threads=1,
      intra_threads=os.cpu_count(),
    )
    for batch in (1, arguments.batch_size):
      prompts = [
        np.array([BOS, *rng.integers(150, 400, arguments.longest // 2 - 1)])
        for _ in range(batch)
      ]
      engine = ours.engine(rows=batch, ids=IDS)
      requests = [engine_lib.Request(prompt, count) for prompt in prompts]
      sources = [tokens.convert_ids_to_tokens(p.tolist()) for p in prompts]
      found: dict[str, list[list[int]]] = {}

      def run_ours(engine=engine, requests=requests, found=found) -> None:
        texts = {i: c.tokens.tolist() for i, c in engine.run(requests)}
        found['ours'] = [texts[i] for i in range(len(requests))]

      def run_peer(sources=sources, found=found) -> None:
        answers = peer.translate_batch(
          sources,
          beam_size=1,
          max_decoding_length=count,
          min_decoding_length=count,
          max_input_length=0,
        )
        found['peer'] = [
          tokens.convert_tokens_to_ids(a.hypotheses[0]) for a in answers
        ]

      run_ours()
      run_peer()
      if found['ours'] != found['peer']:
        raise SystemExit(f'{batch} rows: the tokens differ; nothing to time.')

      times = results.take_turns(
        {
          'ours': functools.partial(results.rested_seconds, run_ours),
          'peer': functools.partial(results.rested_seconds, run_peer),
        },
        arguments.steps,
      )
      ours_s, peer_s = (np.median(times[name][1:]) for name in times)
      rows.append(
        {
          'task': f'{batch} rows',
          'tokens/s': float(batch * count / ours_s),
          'ctranslate2': float(batch * count / peer_s),
          'ratio': float(peer_s / ours_s),
        }
      )
  return rows


class _Compared:
  """Both implementations of one model."""

  def __init__(self, ours: Any, theirs: Any, arguments: Any):
    self._ours, self._theirs, self._arguments = ours, theirs, arguments

  def draw_ends(self, prompts: Sequence[np.ndarray], rng) -> list[int]:
    """Returns one in `--ends` of the tokens that follow the prompts."""
    found: dict[str, list[list[int]]] = {}
    self._our_run(prompts, self._arguments.batch_size, (-1,), 1, found)()
    tokens = np.unique(np.concatenate(found['ours']))
    count = -(-len(tokens) // self._arguments.ends)
    return rng.choice(tokens, count, replace=False).tolist()

  def row(
    self,
    name: str,
    prompts: Sequence[np.ndarray],
    *,
    batch: int,
    ends: Sequence[int],
    beams: int = 1,
  ) -> dict[str, Any]:
    """Measures one task in turns and checks that the tokens are equal."""
    ends = (EOS, *ends) if len(ends) else (-1,)
    found: dict[str, list[list[int]]] = {}
    runs = {
      'ours': self._our_run(prompts, batch, ends, beams, found),
      'transformers': self._their_run(prompts, batch, ends, beams, found),
    }
    # The first call compiles.
    seconds = {
      side: np.median(some[1:])
      for side, some in results.take_turns(
        {
          side: lambda run=run: results.seconds(run)
          for side, run in runs.items()
        },
        self._arguments.steps,
      ).items()
    }
    tokens = sum(len(some) for some in found['ours'])
    same = sum(
      one == other
      for one, other in zip(found['ours'], found['transformers'], strict=True)
    )
    return {
      'task': name,
      'tokens': tokens,
      'longest': max(map(len, found['ours'])),
      'tokens/s': float(tokens / seconds['ours']),
      'transformers': float(tokens / seconds['transformers']),
      'ratio': float(seconds['transformers'] / seconds['ours']),
      'equal texts': f'{same} of {len(prompts)}',
    }

  def _our_run(self, prompts, batch, ends, beams, found) -> Callable[[], None]:
    from encdec_adapt.inference import beam_search, sampling

    count = self._arguments.tokens
    chosen = sampling.SamplingConfig(
      repetition_penalty=self._penalty(prompts, beams)
    )
    ids = dataclasses.replace(IDS, eos=tuple(ends))
    engine = self._ours.engine(rows=batch, ids=ids)

    def run() -> None:
      """Generates all texts."""
      if beams > 1:
        completions = beam_search.search(
          engine, prompts, beams=beams, max_tokens=count
        )
      else:
        completions = engine.run(
          engine_lib.Request(prompt, count, chosen) for prompt in prompts
        )
      texts = {i: list(map(int, c.tokens)) for i, c in completions}
      found['ours'] = [texts[i] for i in range(len(prompts))]

    return run

  def _their_run(
    self, prompts, batch, ends, beams, found
  ) -> Callable[[], None]:
    import torch

    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    at_once = max(1, batch // beams)
    eos = [end for end in ends if end >= 0] or None

    def run() -> None:
      """Generates all texts."""
      texts = {}
      for start in range(0, len(order), at_once):
        chosen = order[start : start + at_once]
        longest = max(len(prompts[i]) for i in chosen)
        ids = torch.zeros((len(chosen), longest), dtype=torch.long)
        for row, i in enumerate(chosen):
          ids[row, : len(prompts[i])] = torch.from_numpy(prompts[i])
        with torch.no_grad():
          generated = self._theirs.generate(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            max_new_tokens=self._arguments.tokens,
            do_sample=False,
            num_beams=beams,
            repetition_penalty=self._penalty(prompts, beams),
            eos_token_id=eos,
            pad_token_id=PAD,
            decoder_start_token_id=BOS,
          )
        for row, i in enumerate(chosen):
          text = generated[row, 1:].tolist()
          stop = [n for n, token in enumerate(text) if token in ends]
          texts[i] = text[: stop[0] + 1] if stop else text
      found['transformers'] = [texts[i] for i in range(len(prompts))]

    return run

  def _penalty(self, prompts: Sequence[np.ndarray], beams: int) -> float:
    """Returns the repetition penalty of a task: of greedy files only."""
    return self._arguments.penalty if len(prompts) > 1 and beams == 1 else 1.0

  def int8(self, prompts: Sequence[np.ndarray]) -> dict[str, Any]:
    """Compares 8-bit kernels with fp32 ones on the same forced tokens."""
    texts = []
    for int8 in (False, True):
      engine = self._ours.engine(
        rows=self._arguments.batch_size, int8=int8, ids=IDS
      )
      requests = [engine_lib.Request(p, 16) for p in prompts]
      texts.append(dict(engine.run(requests)))
    first = [[texts[k][i] for i in range(len(prompts))] for k in range(2)]
    same = np.mean(
      [
        np.cumprod(a.tokens == b.tokens).mean()
        for a, b in zip(*first, strict=True)
      ]
    )
    change = np.mean(
      [
        abs(a.log_probs[0] - b.log_probs[0])
        for a, b in zip(*first, strict=True)
        if a.tokens[0] == b.tokens[0]
      ]
    )
    return {
      'task': 'int8, 16 tokens',
      'share of tokens until the first other one': float(same),
      'change of log p of the first token': float(change),
    }


if __name__ == '__main__':
  main()
