"""Compares two models on disk: parameters (`diff`), predictions (`verify`).

Returns values; `convert` prints them and decides on the exit status.
"""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from encdec_adapt.base import errors, packages
from encdec_adapt.exchange import inspection
from encdec_adapt.files import atomic
from encdec_adapt.generation import model_in_memory
from encdec_adapt.huggingface import config_json, tensor_folder, torch_export
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import heads, layer_leaves, model_config
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import tokenizer_writer

# In most vocabularies, lower ids are special: padding, EOS, BOS, unknown.
_FIRST_DRAWN = 4
_CONTINUED = 16  # Maximum length of a greedy continuation.


@dataclasses.dataclass(frozen=True)
class LeafDifference:
  """Difference of a parameter between two models.

  Attributes:
    leaf: name of the parameter (`models.layer_leaves`).
    kinds: dtype and shape in each model, without padding rows of tables;
      'absent' if a model has no such parameter.
    largest: maximum absolute difference; None if shapes differ.
  """

  leaf: str
  kinds: tuple[str, ...]
  largest: float | None

  def __str__(self) -> str:
    kinds = ' -> '.join(dict.fromkeys(self.kinds))
    value = {None: 'not comparable', 0: 'equal'}.get(
      self.largest, f'{self.largest or 0:.3e}'
    )
    return f'{self.leaf:<58} {kinds:<32} {value}'


def diff(
  model_a: model_on_disk.StoredModel, model_b: model_on_disk.StoredModel
) -> Iterator[LeafDifference]:
  """Compares two models parameter by parameter, layer by layer.

  Args:
    model_a: the first model.
    model_b: the second; may have another config or layer pattern.

  Yields:
    The difference of each parameter of either model.
  """
  sides = [_Leaves(model_a), _Leaves(model_b)]
  # Concatenated lists, as a set would lose the order of layers.
  for leaf in dict.fromkeys([*sides[0].leaves, *sides[1].leaves]):
    arrays = [side.leaf(leaf) for side in sides]
    kinds = tuple(
      'absent' if a is None else f'{a.dtype}{list(a.shape)}' for a in arrays
    )
    largest = None
    if len({None if a is None else a.shape for a in arrays}) == 1:
      # Compares values across dtypes, which are reported separately.
      a, b = (np.asarray(array, np.float32) for array in arrays)
      largest = float(np.max(np.abs(a - b), initial=0.0))
    yield LeafDifference(leaf, kinds, largest)


class _Leaves:
  """Parameters of a stored model by layer."""

  def __init__(self, stored: model_on_disk.StoredModel):
    self.leaves = layer_leaves.leaves_of(stored.model)
    self._arrays = stored.arrays()
    self._stacks = stored.model.stacks

  def leaf(self, name: str) -> np.ndarray | None:
    """Reads a parameter without padding rows; None if there is none."""
    if name not in self.leaves:
      return None
    leaf = self.leaves[name]
    array = self._arrays[leaf.path]
    value = np.asarray(array) if leaf.index is None else array[leaf.index]
    # The padding depends on the mesh; no token uses these rows.
    if name.endswith(('/table', '/logits_bias')):
      value = value[: self._stacks[name.split('/')[0]].vocab_size]
    return value


@dataclasses.dataclass(frozen=True)
class Agreement:
  """Agreement of two models' predictions.

  Attributes:
    tokens: number of predictions compared.
    largest: maximum absolute difference of logits.
    kl: mean KL(first || second) per prediction, in nats.
    top1: fraction of predictions with the same top-1 token.
  """

  tokens: int
  largest: float
  kl: float
  top1: float


def verify(
  model_a: model_on_disk.StoredModel,
  model_b: model_on_disk.StoredModel,
  *,
  rows: int,
  length: int,
  seed: int,
  with_transformers: bool = False,
) -> Agreement:
  """Compares the logits of two models on random tokens, in float32.

  Args:
    model_a: the first model.
    model_b: the second.
    rows: number of rows.
    length: tokens per row.
    seed: seed of the tokens.
    with_transformers: whether to run the second model, a local folder, in
      `transformers`, and to compare its token ids and continuations of texts.
      Runs the code in a folder of the native layout.

  Raises:
    UserError: the models differ in stacks, vocabulary sizes, ids of a text or
      its continuation, a row or such a text is longer than learned positions,
      or `transformers` cannot load the second.
  """
  # Vocabulary sizes, not table sizes: the padding may differ.
  sizes, sizes_b = (
    {name: stack.vocab_size for name, stack in stored.model.stacks.items()}
    for stored in (model_a, model_b)
  )
  if sizes != sizes_b:
    raise errors.UserError(
      f'{model_a.path} and {model_b.path} have no tokens in common to be'
      f' compared on: their vocabulary sizes are {sizes} and {sizes_b}.'
    )
  for model in (model_a.model, model_b.model):
    lengths = dict.fromkeys(sizes, length)
    model_config.check_positions(model, lengths, 'shorten --length')
  rng = np.random.default_rng(seed)
  tokens = {
    name: rng.integers(min(_FIRST_DRAWN, size - 1), size, (rows, length), 'i4')
    for name, size in sizes.items()
  }
  if isinstance(model_a.model.decoder.head, heads.Labels) and len(tokens) > 1:
    text = tokens['encoder']
    if with_transformers:
      # BART's classifier reads labels at EOS, one in each row.
      eos = model_a.require_vocabularies().decoder.ids.eos
      text[text == eos] -= 1
      text[:, -1] = eos
    tokens['decoder'] = np.roll(text, 1, axis=1)
  # In sequence, so that memory holds a single model (two copies of the second
  # while `transformers` continues a text). The second comes first, as
  # `transformers` may refuse it.
  compute = _logits
  if with_transformers:
    compute = functools.partial(_transformers_logits, model_a)
  second = compute(model_b, tokens)
  first = _logits(model_a, tokens)
  if second.ndim == 2:  # Sequence classifiers return only the last output.
    first = first[:, -1]
  outputs = first, second
  # In float64, as a KL near 0 suffers from cancellation.
  logits = [np.float64(x).reshape(-1, x.shape[-1]) for x in outputs]
  p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in logits)
  return Agreement(
    tokens=len(p),
    largest=float(np.max(np.abs(logits[0] - logits[1]))),
    kl=float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1))),
    top1=float(np.mean(p.argmax(-1) == q.argmax(-1))),
  )


def _logits(
  stored: model_on_disk.StoredModel, tokens: Mapping[str, np.ndarray]
) -> np.ndarray:
  model = model_in_memory.read(stored)
  # By default, TPUs and GPUs round the inputs of float32 matmuls.
  with jax.default_matmul_precision('highest'):
    return np.asarray(model.logits(tokens['decoder'], tokens.get('encoder')))


def _transformers_logits(
  ours: model_on_disk.StoredModel,
  stored: model_on_disk.StoredModel,
  tokens: Mapping[str, np.ndarray],
) -> np.ndarray:
  """Computes the logits in torch, with the class named in config.json.

  Also prints the result of `_compare_texts`.

  Raises:
    UserError: the extra is not installed, transformers cannot load the model,
      or its class has no logits.
  """
  packages.require('--with=transformers', 'peer', 'torch', 'transformers')
  inspection.require_exported(stored)
  raw = atomic.read_json(stored.path / tensor_folder.CONFIG)
  is_native = raw['model_type'] == config_json.NATIVE_TYPE
  if is_native and (problem := torch_export.problem(stored.model)):
    raise errors.UserError(
      f'{stored.path} has no code for transformers: {problem}.'
      ' Leave out --with.'
    )
  # Local import: torch is optional.
  import torch
  import transformers

  try:
    name = 'AutoModelForSeq2SeqLM' if is_native else raw['architectures'][0]
    model = getattr(transformers, name).from_pretrained(
      stored.path,
      dtype=torch.float32,
      attn_implementation='eager',  # As in the parity tests.
      trust_remote_code=is_native,
    )
  except (AttributeError, LookupError, ImportError, OSError, ValueError) as e:
    raise errors.UserError(
      f'transformers cannot load {stored.path}: {e}'
    ) from e
  inputs = {'input_ids': tokens['decoder']}
  if 'encoder' in tokens:
    inputs = {'decoder_input_ids': tokens['decoder']}
    inputs |= {'input_ids': tokens['encoder']}
  with torch.no_grad():
    tensors = {k: torch.tensor(v).long() for k, v in inputs.items()}
    outputs = model.eval()(**tensors)
  if 'logits' not in outputs:
    raise errors.UserError(
      f'{name} of {stored.path} returns states, not logits. Leave out --with.'
    )
  print(_compare_texts(ours, stored, model))
  return outputs.logits.numpy()


def _compare_texts(
  ours: model_on_disk.StoredModel, folder: model_on_disk.StoredModel, model: Any
) -> str:
  """Compares token ids and a greedy continuation with transformers'.

  Args:
    ours: the model with the vocabularies that frame texts.
    folder: the exported folder; both continuations use its parameters.
    model: the folder in torch.

  Returns:
    A description of the comparison, for users.

  Raises:
    UserError: ids differ (names the text and both lists of ids), or a text and
      its continuation are longer than learned positions.
  """
  import torch
  import transformers

  opened = ours.open_vocabularies()
  if not opened or not folder.vocabularies:
    return 'no tokenizer: logits alone were compared'
  reader, writer = opened.sides[ours.prompt_side], opened.decoder
  # Else transformers asks for the code that is in a folder of our own layout.
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    folder.path, trust_remote_code=False
  )
  # ByT5's tokenizer has no backend.
  backend = getattr(tokenizer, 'backend_tokenizer', None)
  is_unigram = backend and type(backend.model).__name__ == 'Unigram'
  prompt, rows = [], []  # Verb, text, our ids, transformers' ids.
  for text in ('', *tokenizer_writer.TEXTS):
    prompt = reader.encode(text).tolist()
    # Our decoders read BOS in place of an empty prompt; Qwen's tokenizer adds
    # none.
    if tokenizer('').input_ids or reader.ids.ends_with_eos:
      prompt = reader.ids.frame(prompt, ours.framing_side)
    rows.append(('encodes', text, prompt, tokenizer(text).input_ids))
  if model.can_generate():
    lengths = collections.Counter({ours.prompt_side: len(prompt)})
    lengths['decoder'] += _CONTINUED - 1  # The last token is not read.
    model_config.check_positions(ours.model, lengths, 'leave out --with')
    options = {'max_new_tokens': _CONTINUED, 'do_sample': False, 'num_beams': 1}
    with torch.no_grad():
      theirs = model.generate(torch.tensor([prompt]), **options)[0].tolist()
    # A decoder-only model continues from the last token of the prompt.
    kind = ours.model.architecture
    start = kind.scoring_input(prompt, [0], writer.bos).tokens
    loaded = dataclasses.replace(model_in_memory.read(folder), stored=ours)
    request = engine_lib.Request(np.array(prompt, np.int32), _CONTINUED)
    with jax.default_matmul_precision('highest'):
      ((_, completion),) = loaded.engine(rows=1).run([request])
    tokens = completion.tokens.tolist()
    rows.append(('continues', text, [*start, *tokens], theirs))
  for verb, text, ids, theirs in rows:
    # Unigram segmentations with equal scores may order ids differently.
    key = sorted if is_unigram and verb == 'encodes' else list
    if key(ids) != key(theirs):
      raise errors.UserError(
        f'{folder.path}: transformers {verb} {text!r} as {theirs}, and'
        f' {ours.path} as {ids}; export the model again.'
      )
  return f'{len(rows)} lists of ids of texts are equal'
