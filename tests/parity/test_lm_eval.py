"""Log-likelihoods equal those of lm-eval's own Hugging Face backend."""

import numpy as np
import pytest
from tokenizers import processors

import encdec_adapt
from tests.parity import tiny_models

pytestmark = pytest.mark.parity
_REASON = "needs lm-eval: pip install -e '.[eval]'"
instance = pytest.importorskip('lm_eval.api.instance', reason=_REASON)

TEXTS = [
  ('The quick brown fox', ' jumps over the lazy dog'),
  ('The quick brown fox ', 'jumps'),
  ('', 'A text without a context'),
  ('two cats  ', ' and a dog\n'),
  ('A longer context, with several clauses, and numbers: 1, 2, 3.', ' Yes'),
  ('A longer context, with several clauses, and numbers: 1, 2, 3.', ' No'),
]


def _t5(folder):
  """Saves a tokenizer; returns it, and the config of a model."""
  tokens = tiny_models.save_t5_tokenizer(folder)
  fields = tiny_models.T5 | {'vocab_size': len(tokens)}
  return tokens, tiny_models.transformers.T5Config(**fields)


def _gemma(name, folder):
  """The same for Gemma 2 and T5Gemma."""
  tiny_models.save_tokenizer(folder, 'gemma')
  tokens = tiny_models.transformers.AutoTokenizer.from_pretrained(folder)
  # As Gemma's tokenizer does.
  tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
    single='<bos> $A', special_tokens=[('<bos>', tokens.bos_token_id)]
  )
  # A window that holds every text: the rules of windows differ.
  shape = {**tiny_models.SHAPE, **tiny_models.GEMMA2}
  shape |= {'vocab_size': len(tokens), 'sliding_window': 4096}
  settings = tiny_models.transformers.Gemma2Config(**shape)
  if name == 't5gemma':
    settings = tiny_models.t5gemma_settings(shape, {}, {})
  return tokens, settings


@pytest.mark.long
@pytest.mark.parametrize('name', ['t5gemma', 'gemma2', 't5'])
def test_loglikelihoods(name, tmp_path):
  from lm_eval.models import huggingface

  from encdec_adapt.evaluation.tasks import lm_eval_adapter

  folder = tmp_path / 'model'
  tokens, settings = _t5(folder) if name == 't5' else _gemma(name, folder)
  theirs = tiny_models.make(tiny_models.CASES[name], settings=settings)
  theirs.save_pretrained(folder)
  backend = huggingface.HFLM(
    pretrained=theirs, tokenizer=tokens, device='cpu', add_bos_token=True
  )
  ours = lm_eval_adapter.Adapter(encdec_adapt.load(folder), batch_size=4)
  requests = [instance.Instance('loglikelihood', {}, t, 0) for t in TEXTS]
  found = ours.loglikelihood(requests, disable_tqdm=True)
  want = backend.loglikelihood(requests, disable_tqdm=True)
  assert ours.backend == backend.backend
  for (log_prob, greedy), (other, other_greedy) in zip(
    found, want, strict=True
  ):
    assert log_prob == pytest.approx(other, abs=1e-3)
    assert greedy == other_greedy
  assert np.std([log_prob for log_prob, _ in found]) > 1
