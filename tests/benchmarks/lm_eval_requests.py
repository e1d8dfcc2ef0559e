"""Log-likelihood requests of lm-eval per second, against its own backend.

Both score the same requests with the same T5Gemma in fp32: `--contexts` texts
of mixed lengths with four short continuations each, as a multiple-choice task
asks them. They take turns, tokenization included, compiling left out, and their
log-likelihoods are checked to be within 1e-3. lm-eval's backend runs
transformers on `--device`; where ours has a GPU, give --device=cuda, and set
XLA_PYTHON_CLIENT_PREALLOCATE=false so that both fit. Needs `pip install -e
.[peer,eval]`.
"""

from collections.abc import Sequence
import pathlib
import tempfile
from typing import Any

import numpy as np

from tests.benchmarks import generation, results


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__,
    **generation.SIZES,
    contexts=64,
    longest=128,
    batch_size=16,
    steps=3,
    device='cpu',
  ).parse_args(argv)
  from lm_eval.api import instance
  from lm_eval.models import huggingface
  from tokenizers import processors
  import torch
  import transformers

  import encdec_adapt
  from encdec_adapt.evaluation.tasks import lm_eval_adapter
  from encdec_adapt.huggingface import config_json
  from encdec_adapt.models import model_config as configs
  from tests import tiny_tokenizers
  from tests.parity import tiny_models

  sizes = {name: getattr(arguments, name) for name in generation.SIZES}
  stack = configs.StackConfig(
    **sizes, query_scale=float(arguments.head_dim), window=4096
  )
  raw, _ = config_json.raw_from_model(configs.encoder_decoder(stack, stack))
  torch.manual_seed(0)
  theirs = transformers.AutoModelForSeq2SeqLM.from_config(
    transformers.T5GemmaConfig.from_dict(raw), attn_implementation='eager'
  ).eval()
  with tempfile.TemporaryDirectory() as place:
    folder = tiny_models.save_tokenizer(pathlib.Path(place) / 'model', 'gemma')
    theirs.save_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    # As Gemma's tokenizer does.
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
      single='<bos> $A', special_tokens=[('<bos>', tokens.bos_token_id)]
    )
    sides = {
      'ours': lm_eval_adapter.Adapter(
        encdec_adapt.load(folder), batch_size=arguments.batch_size
      ),
      'lm-eval': huggingface.HFLM(
        pretrained=theirs.to(arguments.device),
        tokenizer=tokens,
        device=arguments.device,
        batch_size=arguments.batch_size,
        add_bos_token=True,
      ),
    }
    requests = [
      instance.Instance('loglikelihood', {}, pair, 0)
      for pair in _pairs(tiny_tokenizers.TEXTS, arguments)
    ]
    found: dict[str, list[tuple[float, bool]]] = {}

    def run(side: str) -> None:
      """Scores all requests."""
      found[side] = sides[side].loglikelihood(requests, disable_tqdm=True)

    times = results.take_turns(
      {
        side: lambda side=side: results.seconds(lambda: run(side))
        for side in sides
      },
      arguments.steps,
    )
  apart = np.abs(
    np.subtract(*([value for value, _ in found[side]] for side in sides))
  ).max()
  if apart > 1e-3:
    raise SystemExit(f'the log-likelihoods are up to {apart} apart.')
  ours, peer = (len(requests) / np.median(times[side][1:]) for side in sides)
  row = {
    'requests': len(requests),
    'requests/s': float(ours),
    'lm-eval': float(peer),
    'ratio': float(ours / peer),
    'largest difference': float(apart),
  }
  return results.report('lm_eval_requests', [row], arguments)


def _pairs(texts: Sequence[str], arguments: Any) -> list[tuple[str, str]]:
  """Returns contexts of up to `--longest` words, four continuations of each."""
  rng = np.random.default_rng(0)
  words = ' '.join(texts).split()

  def draw(count: int) -> str:
    """Returns consecutive words."""
    start = int(rng.integers(len(words) - count))
    return ' '.join(words[start : start + count])

  return [
    (context, f' {draw(int(rng.integers(1, 6)))}')
    for _ in range(arguments.contexts)
    for context in [draw(int(rng.integers(4, arguments.longest)))]
    for _ in range(4)
  ]


if __name__ == '__main__':
  main()
