"""The contrastive loss of embedding models (`kind='infonce'`).

For a query q with the positive p, at the temperature t, over the documents d
(positives and negatives) of the whole batch, on all devices,

    -log exp(q.p / t) / (exp(q.p / t) + sum_d w_d exp(q.d / t))

w_d is exp(hardness * stop_gradient(q.d)) for negatives of the query's own
example and 1 for others (EmbeddingGemma, arXiv:2509.20354, section 2.2, which
has other examples' positives in the sum; here their negatives are, too). False
negatives are left out: documents that are equal to p, and positives of queries
that are equal to q. The mean is over queries. Added to it are

- `spread_out`: the mean of the squared products of two queries, and of two
  positives (the global orthogonal regulariser, arXiv:1708.06320, in the form of
  EmbeddingGemma);
- for every part of a vector that is a vector too (Matryoshka,
  arXiv:2205.13147), both again for the part, normalised;
- `scores`: the KL divergence from softmax(q.d / t) over the positive and
  negatives of an example to the softmax of their `scores`;
- `vectors`, `teacher`: half the squared distances of the texts' vectors to
  given ones (`vectors=E` of the objective) and to those of the embedding model
  `config.teacher.checkpoint`, summed over the texts of an example.

Every text is compared with those of the whole batch, so microbatches are no
parts of the loss: their vectors are computed in turn without keeping
activations, which the backward pass computes again, microbatch by microbatch
(gradient caching, arXiv:2101.06983).
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import ClassVar

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.base import errors, keys
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import base_model, build, embedding_head, model_config
from encdec_adapt.objectives import embeddings, framing
from encdec_adapt.ops import partition
from encdec_adapt.training.losses import loss

_TEACHER = 'teacher'
_HIDDEN = -1e30  # Below every logit, and finite.
_LOWEST = 0.01  # Temperature that a learnt one does not fall below, as in CLIP.


@dataclasses.dataclass(frozen=True)
class Form:
  """Options of the loss."""

  temperature: float = keys.key(0.05, 'Of the similarities.', above=0)
  learn_temperature: int = keys.key(0, 'Train it.', one_of=(0, 1))
  hardness: float = keys.key(0.0, 'Weighting of negatives.', at_least=0)
  spread_out: float = keys.key(0.0, 'Weight of the regulariser.', at_least=0)
  scores: float = keys.key(0.0, 'Weight of given scores.', at_least=0)
  vectors: float = keys.key(0.0, 'Weight of given vectors.', at_least=0)
  teacher: float = keys.key(0.0, "Weight of the teacher's.", at_least=0)

  def __post_init__(self):
    keys.check(self, f'{loss.KIND}: ')


@dataclasses.dataclass(frozen=True)
class InfoNce(loss.Loss):
  """The loss; see the module's docstring.

  Metrics are means over queries: `loss`, and `accuracy`, whether no document of
  the batch is nearer than the positive. Held-out rows are compared with those
  of their batch (`config.train.eval_batch_size`), by whole vectors.

  Attributes:
    parts: parts of a training batch of which activations are in memory.
  """

  name: ClassVar[str] = 'infonce'
  forms: ClassVar[Mapping[str, type]] = {'infonce': Form}
  joins_rows: ClassVar[bool] = True
  metrics: ClassVar[Mapping[str, str]] = loss.Loss.metrics | {
    'accuracy': 'mean'
  }
  held_out: ClassVar[tuple[str, ...]] = ('loss', 'accuracy')
  unit: ClassVar[str] = 'per query'

  parts: int = 1

  def __post_init__(self):
    super().__post_init__()
    if self.kind_name in self.forms:
      for part, _ in self.kind_parts[1]:
        raise part.error('must be an option of infonce, or be left out')

  @functools.cached_property
  def form(self) -> Form:
    """The options in `kind`."""
    return self.kind_parts[0]

  @property
  def references(self) -> tuple[str, ...]:
    """The teacher, if its vectors are learnt."""
    return (_TEACHER,) * (self.form.teacher > 0)

  @property
  def accepts(self) -> tuple[architectures.Architecture, ...]:
    """Embedding models."""
    return tuple(
      architectures.of_stack(role, embeds=True)
      for role in ('causal', 'bidirectional')
    )

  def shape(self, model: model_config.ModelConfig) -> model_config.ModelConfig:
    """Returns the model with a temperature among its parameters, if learnt."""
    head = model.decoder.embedding
    if head is None or not self.form.learn_temperature:
      return model
    head = dataclasses.replace(head, temperature=self.form.temperature)
    stack = dataclasses.replace(model.decoder, embedding=head)
    return model_config.DecoderOnlyConfig(stack)

  def check(
    self, model: model_config.ModelConfig, objectives: loss.Objectives
  ) -> None:
    """Checks that rows have texts to embed, and vectors if they are learnt.

    Raises:
      UserError: they have not, or vectors of another size than the model's.
    """
    if any(objective.rows != 'texts' for objective in objectives):
      raise errors.UserError(
        f'config.loss.kind is {self.kind!r} and config.data.objective is'
        f' {" | ".join(map(str, objectives))!r}, whose rows have no queries and'
        " documents; choose the objective 'embed'."
      )
    size = model.decoder.embedding.size(model.decoder.width)
    given = {x.options.get('vectors', 0) for x in objectives}
    if self.form.vectors and given != {size}:
      raise errors.UserError(
        f'config.loss.kind is {self.kind!r}, which learns given vectors, and'
        f' config.data.objective has vectors={max(given)}; they must have the'
        f" {size} numbers of the model's own: change the records, or the"
        f' projections in {embedding_head.LABEL}.'
      )

  def check_reference(
    self, model: model_config.ModelConfig, reference: model_config.ModelConfig
  ) -> None:
    """Checks the size of the teacher's vectors.

    Raises:
      UserError: it is not that of the model.
    """
    sizes = [
      x.decoder.embedding.size(x.decoder.width) for x in (model, reference)
    ]
    if sizes[0] != sizes[1]:
      raise errors.UserError(
        f'the vectors of config.teacher.checkpoint have {sizes[1]} numbers and'
        f" those of the model {sizes[0]}; give the model's"
        f' {embedding_head.LABEL} projections=..+{sizes[1]}.'
      )

  def logits(self, lengths: framing.Lengths) -> int:
    """Returns 0: an embedding model has no logits."""
    return 0

  def predict(
    self,
    model: build.Model,
    params: base_model.Params,
    batch: loss.Batch,
    routing: base_model.Routing = None,
    dropout: base_model.Dropout | None = None,
  ) -> loss.Outputs:
    """Computes the vectors of texts, [B, M, E], in `parts`."""
    names = ('tokens', 'segments', 'positions')
    fields = [batch[f'encoder_{name}'] for name in names]
    slots = batch['roles'].shape[1]
    head = model.config.decoder.embedding

    def embed(fields, key):
      options = {'routing': None if routing is None else []}
      if dropout:
        options['dropout'] = dropout._replace(key=key)
      fields = [partition.shard(x, 'batch', 'length') for x in fields]
      # No change here, but gradients of each part then have these shardings.
      flat = traverse_util.flatten_dict(params, sep='/')
      sharded = {
        path: partition.shard(x, *model.table[path].axes)
        for path, x in flat.items()
      }
      tree = traverse_util.unflatten_dict(sharded, sep='/')
      states = model.architecture.encode(model, tree, fields, **options)
      pooled = embedding_head.pool(states, fields[1], slots, head.pooling)
      vectors = embedding_head.project(head, tree['decoder'], pooled)
      return vectors, options['routing']

    key = dropout.key if dropout else jax.random.key(0)
    if self.parts == 1:
      vectors, collected = embed(fields, key)
    else:
      parts = [partition.split_rows(x, self.parts) for x in fields]
      parts = parts, jax.random.split(key, self.parts)
      vectors, collected = jax.lax.map(
        lambda part: jax.checkpoint(embed)(*part), parts
      )
      vectors = partition.join_rows(vectors)
    if routing is not None:
      routing.extend(collected)
    temperature = params['decoder'].get('embedding', {}).get('log_temperature')
    return loss.Outputs(vectors, temperature, model.config.decoder)

  def terms(
    self,
    outputs: loss.Outputs,
    references: Mapping[str, loss.Outputs],
    batch: loss.Batch,
  ) -> loss.Terms:
    """Computes the sums of the loss and its metrics; see `loss.Loss.terms`."""
    form, head = self.form, outputs.config.embedding
    whole, *smaller = head.sizes(outputs.config.width)
    del whole
    losses, accuracy = self._compare(outputs, outputs.hidden, batch)
    count = jnp.maximum(jnp.sum(batch['weights']), 2)
    total = jnp.sum(losses)
    for vectors in (
      outputs.hidden,
      *(embedding_head.normalised(outputs.hidden[..., :n]) for n in smaller),
    ):
      if vectors is not outputs.hidden:
        total += jnp.sum(self._compare(outputs, vectors, batch)[0])
      if form.spread_out:
        for slots in ('queries', 'positives'):
          x = _take(vectors, batch[slots]) * batch['weights'][..., None]
          squares = _squared_products(x.reshape(-1, x.shape[-1]))
          # Of the mean over pairs, times the queries, as it is divided later.
          total += form.spread_out * squares / (count - 1)
    if form.scores:
      total += form.scores * self._divergence(outputs, batch)
    is_text = batch['roles'] > embeddings.NONE
    for weight, targets in (
      (form.vectors, lambda: embedding_head.normalised(batch['vectors'])),
      (form.teacher, lambda: references[_TEACHER].hidden),
    ):
      if weight:
        distances = jnp.sum(jnp.square(outputs.hidden - targets()), axis=-1)
        total += weight * jnp.sum(jnp.where(is_text, distances / 2, 0))
    return {'loss': total, 'accuracy': jnp.sum(accuracy)}

  def row_ratios(
    self,
    model: build.Model,
    params: base_model.Params,
    batch: loss.Batch,
    references: loss.References | None = None,
  ) -> Float[Array, 'm 2 B']:
    """Computes held-out metrics row by row; see `loss.Loss.row_ratios`."""
    del references
    loss = dataclasses.replace(self, parts=1)
    outputs = loss.predict(model, params, batch)
    values = self._compare(outputs, outputs.hidden, batch)
    weight = jnp.sum(batch['weights'], axis=1)
    ratios = [[jnp.sum(value, axis=1), weight] for value in values]
    return jnp.stack([jnp.stack(ratio) for ratio in ratios])

  def _temperature(self, outputs: loss.Outputs) -> Array | float:
    if outputs.table is None:
      return self.form.temperature
    return jnp.maximum(jnp.exp(outputs.table[0]), _LOWEST)

  def _compare(
    self, outputs: loss.Outputs, vectors: Float[Array, 'B M E'], batch
  ) -> tuple[Float[Array, 'B Q'], Float[Array, 'B Q']]:
    """Returns InfoNCE of every query, and whether its positive is nearest.

    Both are 0 where there is no query.
    """
    queries, weights = batch['queries'], batch['weights']
    rows, count = queries.shape
    q = _take(vectors, queries).reshape(rows * count, -1)
    # Queries stay on their devices, and each device reads all documents.
    q = partition.shard(q, 'batch', None)
    documents = partition.shard(
      vectors.reshape(-1, vectors.shape[-1]), None, None
    )
    similarity = jnp.matmul(  # [B Q, B M]
      q, documents.T, precision=jax.lax.Precision.HIGHEST
    )
    roles, keys_ = (
      partition.shard(batch[name].reshape(-1), None)
      for name in ('roles', 'keys')
    )
    owner = jnp.arange(rows)[:, None] * count + batch['owners']
    owner = partition.shard(owner.reshape(-1), None)  # [B M]
    own = owner == jnp.arange(rows * count)[:, None]  # [B Q, B M]
    key_of = {
      name: jnp.take_along_axis(batch['keys'], batch[name], 1).reshape(-1)
      for name in ('queries', 'positives')
    }
    is_positive = roles == embeddings.POSITIVE
    positive = own & is_positive
    equal = keys_ == key_of['positives'][:, None]
    equal |= is_positive & (
      key_of['queries'][owner] == key_of['queries'][:, None]
    )
    counted = positive | ((roles >= embeddings.POSITIVE) & ~equal)
    logits = similarity / self._temperature(outputs)
    hard = own & (roles == embeddings.NEGATIVE)
    weighted = logits + self.form.hardness * jnp.where(
      hard, jax.lax.stop_gradient(similarity), 0
    )
    own_logit = jnp.sum(jnp.where(positive, logits, 0), axis=1)
    # Finite, as a query of padding has no documents: infinities are NaN in
    # gradients.
    weighted, logits = (
      jnp.where(counted, x, _HIDDEN) for x in (weighted, logits)
    )
    losses = jax.nn.logsumexp(weighted, axis=1) - own_logit
    nearest = jnp.max(logits, axis=1)
    exists = weights > 0
    return tuple(
      jnp.where(exists, x.reshape(rows, count), 0.0)
      for x in (losses, own_logit >= nearest)
    )

  def _divergence(self, outputs: loss.Outputs, batch: loss.Batch) -> Array:
    """Returns the sum of KL divergences to the softmax of given scores."""
    q = _take(outputs.hidden, batch['queries'])
    similarity = jnp.einsum(
      'BQE,BME->BQM', q, outputs.hidden, precision=jax.lax.Precision.HIGHEST
    )
    own = batch['owners'][:, None] == jnp.arange(q.shape[1])[:, None]
    own &= (batch['roles'] >= embeddings.POSITIVE)[:, None]
    logits = jnp.where(own, similarity / self._temperature(outputs), _HIDDEN)
    predicted = jax.nn.log_softmax(logits, axis=-1)
    targets = jnp.where(own, batch['relevance'][:, None], 0.0)
    # 0 log 0 is 0.
    entropy = jnp.sum(jax.scipy.special.xlogy(targets, targets))
    return entropy - jnp.sum(jnp.where(own, targets * predicted, 0.0))


def _take(vectors: Float[Array, 'B M E'], slots: Array) -> Array:
  """Returns the vectors at slots [B, Q] of each row."""
  return jnp.take_along_axis(vectors, slots[..., None], axis=1)


def _squared_products(x: Float[Array, 'N E']) -> Float[Array, '']:
  """Returns the sum of the squared products of two different vectors."""
  # By the matrix [E, E], whose squared norm is that of all products [N, N].
  precision = jax.lax.Precision.HIGHEST
  square = jnp.sum(jnp.square(jnp.matmul(x.T, x, precision=precision)))
  return square - jnp.sum(jnp.square(jnp.sum(jnp.square(x), axis=-1)))
