"""Where the predictions of held-out targets attend, layer by layer and head.

An encoder-decoder is measured in its attention to the encoder's keys, a
decoder-only model in its self-attention. The layers are not changed: flax's
interceptors see queries, keys and mask of each, and hide keys of one. Rows are
read as they are, with a share of their inputs masked as MEAP does
(arXiv:2502.07490), and with one layer's attention to the encoder dropped.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.conversion import model_in_memory, model_on_disk
from encdec_adapt.evaluation.measures import (
  attention_scores,
  held_out,
  perplexity,
)
from encdec_adapt.evaluation.results import comparisons, results_store
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import build, layers_index, model_config
from encdec_adapt.objectives import noising
from encdec_adapt.ops import partition
from encdec_adapt.sharding import placement
from encdec_adapt.telemetry import progress
from encdec_adapt.training import losses, setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib

TASK = 'attention'
MASKED_SHARE = 0.15
# Segments of the keys, by number; 0 is padding.
PARTS = ('', 'bos', *(f'quarter_{i}' for i in range(1, 5)), 'own')
_OWN = PARTS.index('own')
_SEED = 2502_07490

_Batch = Mapping[str, Any]


def layer_numbers(model: build.Model) -> dict[str, int]:
  """Returns numbers of the layers that are analysed, by their paths.

  Of an unrolled encoder-decoder those are the layers that read the encoder.
  """
  stack, found = model.config.decoder, {}
  for i in range(stack.layers):
    if not _reads_encoder(model) or stack.reads_encoder(stack.layer_kind(i)):
      found[layers_index.layer_location(stack, i)[0]] = i
  return found


def _reads_encoder(model: build.Model) -> bool:
  return model.architecture.encodes_prompt


def intercept(
  model: build.Model, visit: Callable[..., Any] | None, ablated: Any = None
) -> Any:
  """Returns a context that observes and changes the attention in a pass.

  Args:
    model: unrolled model, without rematerialisation.
    visit: called with the layer's number, queries, keys and mask; None to
      observe nothing.
    ablated: number of the layer to which the encoder's keys are hidden, so
      that cross-attention gives zeros; may be traced. None for none.
  """
  numbers = layer_numbers(model)

  def attend(run, args, kwargs, context):
    """Observes and changes one call of a module."""
    # Of the modules only `attention_layer`'s have this method.
    if context.method_name != 'attend':
      return run(*args, **kwargs)
    (q, source, mask), (*path, name) = args, context.module.path
    keys = mask.kv_segments.shape[1]
    memory = keys if name == 'cross_attention' else mask.memory
    if _reads_encoder(model) and not memory:
      return run(*args, **kwargs)
    layer = numbers['/'.join(path)]
    if visit:
      visit(layer, q, source.key, mask)
    if ablated is not None:
      hidden = (jnp.arange(keys) >= keys - memory) & (layer == ablated)
      mask = mask.replace(kv_segments=jnp.where(hidden, 0, mask.kv_segments))
    return run(q, source, mask, **kwargs)

  return nn.intercept_methods(attend)


def _inputs_side(kind: architectures.Architecture, batch: _Batch) -> str:
  """Returns the side of a batch whose tokens are the inputs of a model."""
  return kind.sides('encoder_tokens' in batch)[kind.prompt_stack]


def annotate(
  config: model_config.ModelConfig, batch: _Batch, mask: int, rows: int
) -> dict[str, np.ndarray]:
  """Adds what the analysis needs to a batch.

  Args:
    config: the model.
    batch: fields of `objectives.framing` on the host.
    mask: the mask token.
    rows: record rows from this one on count for nothing.

  Returns:
    The batch and, for the tokens of the inputs' side, `parts` (indices into
    `PARTS`), `masked` (0 or 1), `noised` (tokens with masks), and `queries`,
    the weight of each of the decoder's positions as one that predicts a
    target.
  """
  side = _inputs_side(config.architecture, batch)
  tokens, segments, positions = (
    np.asarray(batch[f'{side}_{x}'])
    for x in ('tokens', 'segments', 'positions')
  )
  counts = (batch['row'] >= 0) & (batch['row'] < rows)
  weights = np.where(counts[:, None], batch['weights'], 0)
  queries = np.float32(weights > 0)
  inputs = (segments > 0) & (positions > 0)
  if side == 'teacher':
    of_pairs = architectures.inputs_of(jax.tree.map(jnp.asarray, batch))
    inputs &= np.asarray(of_pairs) > 0
    at, queries = batch['teacher_index'], np.zeros(tokens.shape, np.float32)
    np.add.at(queries, (np.arange(len(at))[:, None], at), weights > 0)
  parts = np.where(segments > 0, _OWN, 0)
  parts[(segments > 0) & (positions == 0)] = PARTS.index('bos')
  masked = np.zeros_like(tokens)
  for row, places in enumerate(map(np.flatnonzero, inputs)):
    number = segments[row, places]
    quarter = 4 * (positions[row, places] - 1) // np.bincount(number)[number]
    parts[row, places] = PARTS.index('quarter_1') + quarter
    if len(places):
      rng = np.random.default_rng([_SEED, max(int(batch['row'][row]), 0)])
      count = max(int(len(places) * MASKED_SHARE), 1)
      masked[row, rng.choice(places, count, replace=False)] = 1
  return {
    **{name: x for name, x in batch.items() if name != 'row'},
    'weights': np.float32(weights),
    'parts': np.int32(parts),
    'masked': masked,
    'noised': np.where(masked, np.int32(mask), tokens),
    'queries': queries / np.maximum(queries.sum(1, keepdims=True), 1),
  }


def measure(
  model: build.Model,
  params: Any,
  batch: _Batch,
  noised: bool = False,
  chunk: int = 256,
) -> dict[str, jax.Array]:
  """Runs an unrolled model on an annotated batch; see `intercept`.

  Args:
    model: unrolled model.
    params: parameters of the model.
    batch: result of `annotate`, on the devices.
    noised: whether to read the inputs with masks.
    chunk: queries whose scores are in memory at a time.

  Returns:
    `shares` [B, layers, N, parts] of the attention, by part of the keys;
    `entropy` [B, layers, N]; and `received` [B, S], the mean over layers and
    heads of what each token of the inputs' side receives. Layers are those
    that are analysed.
  """
  side = _inputs_side(model.architecture, batch)
  if noised:
    batch = {**batch, f'{side}_tokens': batch['noised']}
  parts, found = batch['parts'], []

  def visit(layer, q, k, mask):
    """Sums the attention of a layer by key, and by part of the keys."""
    cfg = model.config.decoder
    sums = attention_scores.received(
      q,
      k,
      mask,
      batch['queries'],
      scale=cfg.query_scale**-0.5,
      softcap=cfg.attention_softcap,
      chunk=chunk,
    )
    own = k.shape[1] - parts.shape[1]  # The decoder's, in merged attention.
    every = jnp.pad(parts, ((0, 0), (own, 0)), constant_values=_OWN)
    shares = jnp.einsum(
      'BNS,BSP->BNP', sums.by_key, jax.nn.one_hot(every, len(PARTS))
    )
    found.append((shares, sums.entropy, sums.by_key[..., own:].mean(1)))

  with intercept(model, visit):
    model.architecture.predict(model, params, batch)
  shares, entropy, received = (
    jnp.stack(x, 1) for x in zip(*found, strict=True)
  )
  received = received.mean(1)
  return {'shares': shares, 'entropy': entropy, 'received': received}


def ablated_loss(
  model: build.Model, params: Any, batch: _Batch, layer: jax.Array | int
) -> jax.Array:
  """Returns the cross-entropy and weight of every row without a layer, [2, B].

  Args:
    model: unrolled encoder-decoder.
    params: parameters of the model.
    batch: fields of `objectives.framing`.
    layer: layer that does not read the encoder; -1 for none.
  """
  with intercept(model, None, layer):
    return losses.cross_entropy.CrossEntropy().row_ratios(model, params, batch)[
      0
    ]


@dataclasses.dataclass(frozen=True)
class AttentionEvaluation(held_out.HeldOutEvaluation):
  """Analyses the attention of models on the first rows of records.

  Attributes:
    rows: number of rows.
  """

  rows: int
  name = TASK

  def options(self) -> results_store.Options:
    """Returns what decides the scores: the rows, and the share of masks."""
    return {**super().options(), TASK: [self.rows, MASKED_SHARE]}

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model can read the records and has a mask token.

    Raises:
      UserError: it cannot, or it has none.
    """
    super().check(stored)
    _mask_token(stored)

  def scores(
    self,
    loaded: model_in_memory.LoadedModel,
    rows: int,
    report: progress.Report,
  ) -> list[results_store.Score]:
    """Analyses a model; arguments as `HeldOutEvaluation.scores`.

    Returns:
      Metrics of the task `TASK`; `evaluation/README.md` lists them.
    """
    where, count = loaded.where, min(self.rows, len(self.record_set))
    compute = dataclasses.replace(loaded.model.compute, remat='none')
    model = build.unroll(build.build(loaded.config, compute))
    params = build.unroll_params(loaded.model, loaded.params)
    layers = list(layer_numbers(model).values())
    run = _make_run(model, where, layers)
    mask = _mask_token(loaded.stored)
    lengths = self.record_set.spec.lengths
    teacher = setup.reads_teacher_row(lengths, loaded.config)
    batches = setup.evaluation_batches(
      self.record_set, rows, where, teacher=teacher
    )
    found = []
    # Zip asks for no batch after the last of the range.
    for done, batch in zip(range(0, count, rows), batches, strict=False):
      report(done, count)
      batch = annotate(loaded.config, batch, mask, count)
      batch = step_lib.place_batch(batch, where)
      found.append(jax.device_get(run(params, batch)))
    return _summarize(
      layers, jax.tree.map(lambda *x: np.concatenate(x), *found)
    )


def _mask_token(stored: model_on_disk.StoredModel) -> int:
  side = stored.prompt_side
  return noising.mask_token(TASK, stored.require_vocabularies().sides[side])


def _make_run(
  model: build.Model, where: state_lib.Placement, layers: Sequence[int]
) -> Callable[[Any, _Batch], dict[str, jax.Array]]:
  """Returns a function of parameters and a batch that measures every row."""

  def run(params: Any, batch: _Batch) -> dict[str, jax.Array]:
    """Measures the rows of a batch."""
    with partition.use(where.mesh, where.rules.as_dict()):
      found = measure(model, params, batch)
      noised = measure(model, params, batch, noised=True)['received']
      found |= {name: batch[name] for name in ('weights', 'parts', 'masked')}
      if _reads_encoder(model):
        losses_of = functools.partial(ablated_loss, model, params, batch)
        found['losses'] = jnp.moveaxis(
          jax.lax.map(losses_of, jnp.array([-1, *layers])), 2, 0
        )  # [B, 1 + layers, 2]
      return {**found, 'noised': noised}

  return jax.jit(run, out_shardings=placement.replicated(where.mesh))


def _summarize(
  layers: Sequence[int], by_row: Mapping[str, np.ndarray]
) -> list[results_store.Score]:
  """Returns the scores of measurements by row."""
  parts, masked = by_row['parts'], by_row['masked'] > 0
  inputs = (parts > PARTS.index('bos')) & (parts < _OWN)
  kept = inputs & ~masked
  counted = (by_row['weights'] > 0).any(1) & masked.any(1) & kept.any(1)
  if not counted.any():
    raise errors.UserError(
      f'none of {len(counted)} rows has two tokens of inputs, of which one can'
      ' be masked; leave out --attention.'
    )
  by_row = {name: np.asarray(x)[counted] for name, x in by_row.items()}
  inputs, masked, kept = (x[counted] for x in (inputs, masked, kept))
  # An even share over the inputs of a row is 1.
  size = inputs.sum(1, keepdims=True)
  plain, noised = (by_row[name] * size for name in ('received', 'noised'))
  scored = meap_scores(plain, noised, masked, kept)
  scored += _by_part(layers, by_row)
  return scored + _ablations(layers, by_row.get('losses', ()))


_score = functools.partial(results_store.mean_score, TASK)


def meap_scores(
  plain: np.ndarray, noised: np.ndarray, masked: np.ndarray, kept: np.ndarray
) -> list[results_store.Score]:
  """Returns MEAP's measures (arXiv:2502.07490), with means over positions.

  `score_decay` is (Att(X_N)[mask=1] - Att(X_M)[mask=1]) / Att(X_N)[mask=1] of
  the means over the rows, `variance_increase` Var(Att(X_M)[mask=0]) -
  Var(Att(X_N)[mask=0]), and the p-values are of differences by row.

  Args:
    plain: attention received in the original rows X_N, [B, S].
    noised: attention received in the rows with masks X_M.
    masked: bool [B, S], positions that are masked in X_M.
    kept: the others that count.
  """
  found = []
  for metric, function, where in (
    ('score_decay', np.mean, masked),
    ('variance_increase', np.var, kept),
  ):
    before, after = (function(x, axis=1, where=where) for x in (plain, noised))
    scores = after - before
    if metric == 'score_decay':
      # The linearisation of a ratio of sums, as `perplexity.Result.scores`.
      ratio = 1 - after.sum() / before.sum()
      scores = ratio + ((1 - ratio) * before - after) / before.mean()
    found.append(_score(metric, scores))
    test = comparisons.compare(_score(metric, before), _score(metric, after))
    if test:
      found.append(
        results_store.Score(TASK, f'{metric}_p', test.p, None, test.n)
      )
  return found


def _by_part(
  layers: Sequence[int], by_row: Mapping[str, np.ndarray]
) -> list[results_store.Score]:
  """Returns shares of attention, and mass on inputs and entropy by head."""
  shares, entropy = by_row['shares'], by_row['entropy']
  found = [
    _score(f'share/{part}', shares[..., i].mean((1, 2)))
    for i, part in enumerate(PARTS)
    if part and shares[..., i].any()
  ]
  inputs = shares[..., PARTS.index('quarter_1') : _OWN].sum(-1)
  for metric, values in (('inputs', inputs), ('entropy', entropy)):
    for j, layer in enumerate(layers):
      name = f'layer_{layer:02}'
      found.append(_score(f'{name}/{metric}', values[:, j].mean(1)))
      for head, mean in enumerate(values[:, j].mean(0)):
        metric_of = f'{name}/head_{head:02}/{metric}'
        found.append(
          results_store.Score(TASK, metric_of, float(mean), None, len(values))
        )
  return found


def _ablations(
  layers: Sequence[int], sums: np.ndarray
) -> list[results_store.Score]:
  """Returns by how much the loss grows without each layer's cross-attention."""
  if not len(sums):  # A decoder-only model.
    return []
  whole, *ablated = (
    np.array(perplexity.ratio(TASK, 'loss', *rows).scores)
    for rows in np.float64(sums).transpose(1, 2, 0)
  )
  found = zip(layers, ablated, strict=True)
  return [_score(f'layer_{i:02}/ablation', x - whole) for i, x in found]


def figures(
  scores: Mapping[str, Sequence[results_store.Score]],
) -> dict[str, dict[str, Any]]:
  """Returns what the figure shows of every model that was analysed.

  Args:
    scores: scores of every model.

  Returns:
    By model: `shares` by part, `layers` (numbers), `inputs` (a row per layer
    of a number per head) and `ablation` (a number per layer; none of a
    decoder-only model).
  """
  found = {}
  for model, own in scores.items():
    own = [x for x in own if x.task == TASK]
    values = {tuple(x.metric.split('/')): x.value for x in own}
    heads: dict[str, list[float]] = {}
    for names, value in values.items():
      if len(names) == 3 and names[2] == 'inputs':
        heads.setdefault(names[0], []).append(value)
    found[model] = values and {
      'shares': {x[1]: y for x, y in values.items() if x[0] == 'share'},
      'layers': [int(name.removeprefix('layer_')) for name in heads],
      'inputs': list(heads.values()),
      'ablation': [y for x, y in values.items() if x[-1] == 'ablation'],
    }
  return {model: shown for model, shown in found.items() if shown}
