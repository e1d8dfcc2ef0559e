"""Attention during predictions of held-out targets, by layer and head.

For an encoder-decoder, this measures attention to the encoder's keys; for a
decoder-only model, self-attention. The layers are unchanged: Flax interceptors
observe the queries, keys and mask of each, and hide keys of a layer. Rows are
read unchanged, with a share of their inputs masked as in MEAP
(arXiv:2502.07490), and with a layer's attention to the encoder ablated. From
`evaluation`, this module imports only `measures` and `results`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import (
  attention_scores,
  held_out,
  perplexity,
)
from encdec_adapt.evaluation.results import comparisons, results_store
from encdec_adapt.generation import model_in_memory
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import build, layers_index, model_config
from encdec_adapt.objectives import noising
from encdec_adapt.ops import partition
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import progress
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.metrics import held_out_metrics, token_metrics

TASK = 'attention'
MASKED_SHARE = 0.15  # As in MEAP's pretraining.
# Parts of the keys, by number; 0 is padding. BOS is separate: it receives much
# attention for any text.
PARTS = ('', 'bos', *(f'quarter_{i}' for i in range(1, 5)), 'own')
_OWN = PARTS.index('own')  # Targets already read by the decoder.
_SEED = 2502_07490

_Batch = Mapping[str, Any]


def layer_numbers(model: build.Model) -> dict[str, int]:
  """Returns the numbers of the analysed layers by path.

  These are the layers with cross-attention, or all layers of a model without.
  The model must be unrolled.
  """
  stack = model.config.decoder
  crossing = [i for i in range(stack.layers) if _reads_encoder(stack, i)]
  return {
    layers_index.layer_location(stack, i)[0]: i
    for i in crossing or range(stack.layers)
  }


def _reads_encoder(stack: model_config.StackConfig, layer: int) -> bool:
  return stack.reads_encoder(stack.layer_kind(layer))


def intercept(
  model: build.Model, visit: Callable[..., Any] | None, ablated: Any = None
) -> Any:
  """Returns a context that observes and changes attention in a forward pass.

  Args:
    model: unrolled model, without rematerialisation: in a scan or a
      rematerialised layer, an interceptor would leak tracers.
    visit: called with the layer's number, queries, keys, mask and relative
      position bias; None to observe nothing.
    ablated: number of the layer with hidden encoder keys, where cross-attention
      outputs zeros; may be traced. None for none.
  """
  stack, numbers = model.config.decoder, layer_numbers(model)

  def attend(run, args, kwargs, context):
    # Only `attention_layer` modules have this method.
    if context.method_name != 'attend':
      return run(*args, **kwargs)
    (q, source, mask), (*path, name) = args, context.module.path
    layer = numbers.get('/'.join(path))
    if layer is None:
      return run(*args, **kwargs)
    keys = mask.kv_segments.shape[1]
    # In merged attention the last `memory` keys are the encoder's.
    memory = keys if name == 'cross_attention' else mask.memory
    if _reads_encoder(stack, layer) and not memory:
      return run(*args, **kwargs)  # Self-attention of either stack.
    if visit:
      visit(layer, q, source.key, mask, kwargs.get('bias'))
    if ablated is not None:
      # Hidden as padding, in data: `ablated` may be traced, so one compiled
      # program serves all layers.
      hidden = (jnp.arange(keys) >= keys - memory) & (layer == ablated)
      mask = mask.replace(kv_segments=jnp.where(hidden, 0, mask.kv_segments))
    return run(q, source, mask, **kwargs)

  return nn.intercept_methods(attend)


def annotate(
  config: model_config.ModelConfig,
  batch: _Batch,
  mask: int,
  ids: special_ids.SideIds,
) -> dict[str, np.ndarray]:
  """Adds the fields of the analysis to a batch.

  Args:
    config: the model.
    batch: fields of `objectives.framing` on the host.
    mask: the mask token.
    ids: special ids of the vocabulary of the inputs.

  Returns:
    The batch and, for the tokens of the inputs' side, `parts` (indices into
    `PARTS`), `masked` (0 or 1), `noised` (tokens with masks), and `queries`,
    the weight of each decoder position, nonzero if it predicts a target.
  """
  side = config.architecture.inputs_side('encoder_tokens' in batch)
  tokens, segments, positions = (
    np.asarray(batch[f'{side}_{x}'])
    for x in ('tokens', 'segments', 'positions')
  )
  # Packed rows repeat their index; the last batch may have filler rows (-1).
  row_index = batch['row'].reshape(len(tokens), -1)[:, 0]
  weights = np.where(row_index[:, None] >= 0, batch['weights'], 0)
  queries = np.float32(weights > 0)
  head, tail = ids.edges('encoder' if side == 'encoder' else 'decoder')
  is_frame = (
    tokens == ids.eos if tail else (tokens == ids.bos) & (positions == 0)
  )
  frames = (segments > 0) & is_frame
  inputs = (segments > 0) & ~frames
  if side == 'teacher':
    # Inputs and targets share a row; map `queries` to its positions.
    is_input = architectures.inputs_of(jax.tree.map(jnp.asarray, batch))
    inputs &= np.asarray(is_input) > 0
    index, queries = batch['teacher_index'], np.zeros(tokens.shape, np.float32)
    # `add.at`, since padding repeatedly points to position 0: an assignment
    # could overwrite its weight with 0.
    np.add.at(queries, (np.arange(len(index))[:, None], index), weights > 0)
  parts = np.where(segments > 0, _OWN, 0)
  parts[frames] = PARTS.index('bos')
  masked = np.zeros_like(tokens)
  for row, columns in enumerate(map(np.flatnonzero, inputs)):
    # Quarters are per pair of a packed row, since positions restart.
    pair, number = segments[row, columns], positions[row, columns]
    number -= 0 if tail else len(head)
    quarter = 4 * number // np.bincount(pair)[pair]
    parts[row, columns] = PARTS.index('quarter_1') + quarter
    if len(columns):
      # Seeded by record: the masks of a row are independent of the batch and
      # equal for all models. Filler rows are -1, an invalid seed.
      rng = np.random.default_rng([_SEED, max(int(row_index[row]), 0)])
      count = max(int(len(columns) * MASKED_SHARE), 1)
      masked[row, rng.choice(columns, count, replace=False)] = 1
  return {
    **batch,
    'row': row_index,
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
    chunk: number of queries with scores in memory at a time.

  Returns:
    `shares` [B, layers, N, parts] of the attention, by part of the keys;
    `entropy` [B, layers, N]; and `received` [B, S], the attention received by
    each token of the inputs' side, averaged over layers and heads. Layers are
    in the order of `layer_numbers`.
  """
  side = model.architecture.inputs_side('encoder_tokens' in batch)
  if noised:
    batch = {**batch, f'{side}_tokens': batch['noised']}
  parts, layer_sums = batch['parts'], []

  def visit(layer, q, k, mask, bias):
    cfg = model.config.decoder
    sums = attention_scores.received(
      q,
      k,
      mask,
      batch['queries'],
      scale=cfg.query_scale**-0.5,
      softcap=cfg.attention_softcap,
      bias=bias,
      chunk=chunk,
    )
    # In merged attention the decoder's keys come before the encoder's.
    count = k.shape[1] - parts.shape[1]
    key_parts = jnp.pad(parts, ((0, 0), (count, 0)), constant_values=_OWN)
    shares = jnp.einsum(
      'BNS,BSP->BNP', sums.by_key, jax.nn.one_hot(key_parts, len(PARTS))
    )
    # Averaged over heads here to avoid stacking [B, layers, N, S].
    received = sums.by_key[..., count:].mean(1)
    layer_sums.append((shares, sums.entropy, received))

  with intercept(model, visit):
    model.architecture.predict(model, params, batch)
  shares, entropy, received = (
    jnp.stack(x, 1) for x in zip(*layer_sums, strict=True)
  )
  return {'shares': shares, 'entropy': entropy, 'received': received.mean(1)}


def ablated_loss(
  model: build.Model, params: Any, batch: _Batch, layer: jax.Array | int
) -> jax.Array:
  """Returns cross-entropy and weight per row with a layer ablated, [2, B].

  Args:
    model: unrolled encoder-decoder.
    params: parameters of the model.
    batch: fields of `objectives.framing`.
    layer: layer with hidden encoder keys; -1 for none.
  """
  metrics = token_metrics.TargetTokens()
  with intercept(model, None, layer):
    return held_out_metrics.ratios(metrics, model, params, batch, {})[0]


@dataclasses.dataclass(frozen=True)
class AttentionEvaluation(held_out.HeldOutEvaluation):
  """Analyses the attention of models on a sample of records.

  Attributes:
    rows: number of rows, evenly spaced.
  """

  rows: int
  name = TASK

  def options(self) -> results_store.Options:
    """Returns all inputs of the scores: the rows, and the share of masks."""
    return {**super().options(), TASK: ['spaced', self.rows, MASKED_SHARE]}

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model can read the records and has a mask token.

    Raises:
      UserError: it cannot, its vocabulary has no mask token, or it reads
        passages.
    """
    super().check(stored)
    _mask_token(stored)
    if stored.model.prompt_reader.passages.length:
      raise errors.UserError(
        f'--attention analyses inputs of one text, and {stored.path} reads'
        ' passages; leave it out.'
      )

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[results_store.Score]:
    """Analyses a model; arguments as `HeldOutEvaluation.scores`.

    Returns:
      Metrics of the task `TASK`; `evaluation/README.md` lists them.
    """
    placement, record_set = model.placement, self.record_set.spaced(self.rows)
    compute = dataclasses.replace(model.model.compute, remat='none')
    unrolled = build.unroll(build.build(model.config, compute))
    params = build.unroll_params(model.model, model.params)
    layers = list(layer_numbers(unrolled).values())
    mask = _mask_token(model.stored)
    ids = getattr(record_set.framing, model.stored.prompt_side)
    batches = (
      annotate(model.config, batch, mask, ids)
      for batch in held_out.batches(record_set, model, rows, report)
    )
    run = functools.partial(_make_run(unrolled, placement, layers), params)
    measured = perplexity.outputs(run, batches, placement)
    by_row = jax.tree.map(lambda *x: np.concatenate(x), *measured)
    return _summarize(layers, by_row, record_set.groups)


def _mask_token(stored: model_on_disk.StoredModel) -> int:
  side = stored.prompt_side
  return noising.mask_token(TASK, stored.require_vocabularies().sides[side])


def _make_run(
  model: build.Model, placement: state_lib.Placement, layers: Sequence[int]
) -> Callable[[Any, _Batch], dict[str, jax.Array]]:
  def run(params: Any, batch: _Batch) -> dict[str, jax.Array]:
    with partition.use(placement.mesh, placement.rules.as_dict()):
      measured = measure(model, params, batch)
      noised = measure(model, params, batch, noised=True)['received']
      # Also returned: here they hold the rows of all processes.
      names = 'row', 'weights', 'parts', 'masked'
      measured |= {name: batch[name] for name in names}
      if _reads_encoder(model.config.decoder, layers[0]):
        losses_of = functools.partial(ablated_loss, model, params, batch)
        # One pass at a time: `vmap` would hold activations for all ablations.
        measured['losses'] = jnp.moveaxis(
          jax.lax.map(losses_of, jnp.array([-1, *layers])), 2, 0
        )  # [B, 1 + layers, 2]
      return {**measured, 'noised': noised}

  return jax.jit(run, out_shardings=placement_lib.replicated(placement.mesh))


def _summarize(
  layers: Sequence[int],
  by_row: Mapping[str, np.ndarray],
  groups_of: Callable[[np.ndarray], Sequence[str]],
) -> list[results_store.Score]:
  parts, masked = by_row['parts'], by_row['masked'] > 0
  inputs = (parts > PARTS.index('bos')) & (parts < _OWN)
  intact = inputs & ~masked
  # MEAP's measures are means over each kind of position, NaN without any.
  counted = (by_row['weights'] > 0).any(1) & masked.any(1) & intact.any(1)
  if not counted.any():
    raise errors.UserError(
      f'none of {len(counted)} rows has two tokens of inputs, of which one can'
      ' be masked; leave out --attention.'
    )
  by_row = {name: np.asarray(x)[counted] for name, x in by_row.items()}
  inputs, masked, intact = (x[counted] for x in (inputs, masked, intact))
  # Relative to a uniform share over the inputs, to put rows of different
  # lengths on the same scale.
  size = inputs.sum(1, keepdims=True)
  plain, noised = (by_row[name] * size for name in ('received', 'noised'))
  groups = groups_of(by_row['row'])
  return [
    *meap_scores(plain, noised, masked, intact, groups),
    *_by_part(layers, by_row, groups),
    *_ablations(layers, by_row.get('losses', ()), groups),
  ]


def meap_scores(
  plain: np.ndarray,
  noised: np.ndarray,
  masked: np.ndarray,
  intact: np.ndarray,
  groups: Sequence[str] = (),
) -> Iterator[results_store.Score]:
  """Yields MEAP's measures (arXiv:2502.07490), with means over positions.

  `score_decay` is (Att(X_N)[mask=1] - Att(X_M)[mask=1]) / Att(X_N)[mask=1] with
  means over the rows, `variance_increase` is Var(Att(X_M)[mask=0]) -
  Var(Att(X_N)[mask=0]), and the p-values test differences by row.

  Args:
    plain: attention received in the original rows X_N, [B, S].
    noised: attention received in the masked rows X_M.
    masked: bool [B, S], masked positions of X_M.
    intact: the other positions of the inputs.
    groups: document group of every row; empty if each is a separate group.
  """
  for metric, function, mask in (
    ('score_decay', np.mean, masked),
    ('variance_increase', np.var, intact),
  ):
    # X_N and X_M are compared at the same positions.
    old, new = (function(x, axis=1, where=mask) for x in (plain, noised))
    # The decay is a ratio of sums over the rows, the increase a mean.
    by_row = (
      (old - new, old)
      if metric == 'score_decay'
      else (new - old, np.ones(len(old)))
    )
    score = results_store.ratio_score(TASK, metric, *by_row, groups)
    # The denominator differs by model: models differ in the mean over rows.
    yield dataclasses.replace(score, weights=())
    test = comparisons.compare(
      *([results_store.mean_score(TASK, metric, x, groups)] for x in (old, new))
    )
    if test:
      yield results_store.Score(TASK, f'{metric}_p', test.p, None, len(old))


def _by_part(
  layers: Sequence[int],
  by_row: Mapping[str, np.ndarray],
  groups: Sequence[str],
) -> Iterator[results_store.Score]:
  score = functools.partial(results_store.mean_score, TASK, groups=groups)
  shares, entropy = by_row['shares'], by_row['entropy']
  # Cross-attention has no keys of the decoder, so no share of them.
  for i, part in enumerate(PARTS):
    if part and shares[..., i].any():
      yield score(f'share/{part}', shares[..., i].mean((1, 2)))
  inputs = shares[..., PARTS.index('quarter_1') : _OWN].sum(-1)
  for metric, values in (('inputs', inputs), ('entropy', entropy)):
    for j, layer in enumerate(layers):
      name = f'layer_{layer:02}'
      yield score(f'{name}/{metric}', values[:, j].mean(1))
      # Heads are plotted, not compared: no per-row scores.
      for i, mean in enumerate(values[:, j].mean(0)):
        head, mean = f'{name}/head_{i:02}/{metric}', float(mean)
        yield results_store.Score(TASK, head, mean, None, len(values))


def _ablations(
  layers: Sequence[int], sums: np.ndarray, groups: Sequence[str]
) -> list[results_store.Score]:
  if not len(sums):  # A decoder-only model.
    return []
  # The rows' linearised losses: their differences have means and intervals.
  complete, *ablated = (
    np.array(results_store.ratio_score(TASK, 'loss', *rows).scores)
    for rows in np.float64(sums).transpose(1, 2, 0)
  )
  return [
    results_store.mean_score(
      TASK, f'layer_{i:02}/ablation', x - complete, groups
    )
    for i, x in zip(layers, ablated, strict=True)
  ]


def figures(scores: results_store.Scores) -> dict[str, dict[str, Any]]:
  """Returns the content of the figure, for every analysed model.

  Args:
    scores: scores of every model.

  Returns:
    By model: `shares` by part, `layers` (numbers), `inputs` (a row per layer
    with a number per head) and `ablation` (a number per layer; empty for a
    decoder-only model).
  """
  content = {}
  for model, model_scores in scores.items():
    values = {
      tuple(x.metric.split('/')): x.value
      for x in model_scores
      if x.task == TASK
    }
    if not values:
      continue
    # Layers and heads keep the order of `_by_part`.
    heads: dict[str, list[float]] = {}
    for names, value in values.items():
      if len(names) == 3 and names[2] == 'inputs':
        heads.setdefault(names[0], []).append(value)
    content[model] = {
      'shares': {x[1]: y for x, y in values.items() if x[0] == 'share'},
      'layers': [int(name.removeprefix('layer_')) for name in heads],
      'inputs': list(heads.values()),
      'ablation': [y for x, y in values.items() if x[-1] == 'ablation'],
    }
  return content
