"""Contrastive (InfoNCE) loss of embedding models.

For a query q with positive p and temperature t, over the documents d
(positives and negatives) of the global batch:

    -log exp(q.p / t) / (exp(q.p / t) + sum_d w_d exp(q.d / t))

w_d is exp(hardness * stop_gradient(q.d)) for negatives of the query's
example, else 1 (EmbeddingGemma, arXiv:2509.20354, section 2.2; its sum has the
positives of other examples, here their negatives too). False negatives are
masked out: documents equal to p, and positives of queries equal to q. The loss
is a mean over queries. Further terms:

- `spread_out`: mean squared dot product of pairs of queries and of pairs of
  positives (global orthogonal regulariser, arXiv:1708.06320, in the form of
  EmbeddingGemma);
- Matryoshka (arXiv:2205.13147): both losses again for every prefix of the
  vectors in the head's dimensions, normalised;
- `scores`: KL divergence from softmax(q.d / t) over the positive and negatives
  of an example to the softmax of their `scores`;
- `vectors`, `teacher`: half the squared distance to the rows' vectors
  (`vectors=E` of the objective) and to those of the embedding model
  `config.teacher.checkpoint`, summed over the texts of an example.

The loss compares texts across the global batch, so it is not a sum over
microbatches: `predict` embeds them in sequence, and the backward pass
recomputes their activations (gradient caching, arXiv:2101.06983). Every text
has separate dropout masks; the teacher and held-out texts have no dropout.
"""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.base import errors, keys
from encdec_adapt.models import embedding_head
from encdec_adapt.objectives import embeddings
from encdec_adapt.ops import kernel_forms, partition
from encdec_adapt.training.losses import loss

# Below every logit, and finite: infinities have NaN gradients.
_HIDDEN = -1e30
_LOWEST = 0.01  # Lower bound of a learnt temperature, as in CLIP.


@dataclasses.dataclass(frozen=True)
class InfoNce(loss.Loss):
  """InfoNCE; see the module's docstring.

  Metrics are means over queries: `loss`, and `accuracy`, whether the positive
  is the nearest document of the batch.
  """

  name: ClassVar[str] = 'infonce'
  metrics: ClassVar[Mapping[str, str]] = {
    **loss.Loss.metrics,
    'accuracy': 'mean',
  }

  temperature: float = keys.key(
    0.05, 'Temperature of the similarities.', above=0
  )
  learn_temperature: bool = keys.key(
    False, 'Whether the temperature is trained, from the value above on.'
  )
  hardness: float = keys.key(
    0.0, 'Weighting of negatives by their similarity.', at_least=0
  )
  spread_out: float = keys.key(
    0.0, 'Weight of the global orthogonal regulariser.', at_least=0
  )
  scores: float = keys.key(
    0.0, "Weight of the divergence from the rows' scores.", at_least=0
  )
  vectors: float = keys.key(
    0.0, "Weight of the distance to the rows' vectors.", at_least=0
  )
  teacher: float = keys.key(
    0.0, "Weight of the distance to the teacher's vectors.", at_least=0
  )

  @property
  def references(self) -> tuple[str, ...]:
    """The teacher, if the loss has a distance to its vectors."""
    return (loss.TEACHER,) if self.teacher > 0 else ()

  def predict(self, model, params, batch, routing=None, dropout=None, parts=1):
    """Computes the vectors of texts, [B, M, E].

    Args:
      model: the trained model or a frozen model.
      params: its parameters.
      batch: fields of `objectives.framing`.
      routing: list for the router losses of the layers; None to skip them.
      dropout: rate and key of dropout; None for none.
      parts: microbatches that the batch is embedded in.
    """
    names = ('tokens', 'segments', 'positions')
    fields = [batch[f'encoder_{name}'] for name in names]
    head = model.config.decoder.head

    def embed(fields, key, index=None):
      fields = [partition.shard(x, 'batch', 'length') for x in fields]
      # A no-op forward; constrains the shardings of each part's gradients.
      # `ops.kernel_forms` kernels are skipped: frozen, with small adapters.
      flat = traverse_util.flatten_dict(params, sep='/')
      flat |= {
        path: partition.shard(x, *model.table[path].axes)
        for path, x in flat.items()
        if isinstance(x, jax.Array)
      }
      if index is not None:
        flat = {k: kernel_forms.for_part(x, index) for k, x in flat.items()}
      tree = traverse_util.unflatten_dict(flat, sep='/')
      routes = None if routing is None else []
      masks = dropout and dropout._replace(key=key)
      states = model.architecture.encode(
        model, tree, fields, routing=routes, dropout=masks
      )
      texts = batch['roles'].shape[1]
      embedded = embedding_head.vectors(
        head, tree['decoder'], states, fields[1], texts, head.pooling
      )
      return embedded, routes

    key = dropout.key if dropout else jax.random.key(0)
    if parts == 1:
      vectors, collected = embed(fields, key)
    else:
      split = [partition.split_rows(x, parts) for x in fields]
      vectors, collected = jax.lax.map(
        lambda part: jax.checkpoint(embed)(*part),
        (split, jax.random.split(key, parts), jnp.arange(parts)),
      )
      vectors = partition.join_rows(vectors)
    if routing is not None:
      routing.extend(collected)
    temperature = params['decoder'].get('embedding', {}).get('log_temperature')
    return loss.Outputs(vectors, temperature, model.config.decoder)

  def terms(self, outputs, frozen, batch):
    """Computes the sums of the loss and its metrics; see `loss.Loss.terms`."""
    stack, vectors = outputs.config, outputs.hidden
    weights, roles = batch['weights'], batch['roles']
    count, total = jnp.maximum(jnp.sum(weights), 2), 0.0
    for size in reversed(stack.head.sizes(stack.width)):
      part = embedding_head.normalised(vectors[..., :size])
      values = self.compare(outputs, part, batch)
      total += jnp.sum(values[0])
      for role in (embeddings.QUERY, embeddings.POSITIVE):
        # Mean over pairs times queries: the step divides by the queries.
        squares = _squared_products(part * (roles == role)[..., None])
        total += self.spread_out * squares / (count - 1)
    if self.scores:
      total += self.scores * self._divergence(outputs, batch)
    weighted = [(self.vectors, embedding_head.normalised(batch['vectors']))]
    if self.teacher:
      teacher = frozen[loss.TEACHER](batch)
      weighted.append((self.teacher, teacher.hidden))
    for weight, targets in weighted:
      if weight and targets.shape != vectors.shape:
        raise errors.UserError(
          f'the vectors of config.teacher.checkpoint have {targets.shape[-1]}'
          f" numbers and the model's {vectors.shape[-1]}; change"
          ' its projections (config.model.head).'
        )
      if weight:
        distances = jnp.sum(jnp.square(vectors - targets), axis=-1) / 2
        total += weight * jnp.sum(
          jnp.where(roles > embeddings.NONE, distances, 0)
        )
    return {'loss': total, 'accuracy': jnp.sum(values[1])}

  def _logits(self, outputs: loss.Outputs, similarity: Array) -> Array:
    if outputs.table is None:
      return similarity / self.temperature
    return similarity / jnp.maximum(jnp.exp(outputs.table[0]), _LOWEST)

  def compare(
    self, outputs: loss.Outputs, vectors: Float[Array, 'B M E'], batch
  ) -> tuple[Float[Array, 'B M'], Float[Array, 'B M']]:
    """Returns InfoNCE per query, and whether its positive is nearest.

    Both are 0 at texts other than queries.
    """
    rows, slots, _ = vectors.shape
    x = vectors.reshape(rows * slots, -1)
    # Queries stay sharded, documents are replicated.
    documents = partition.shard(x, None, None)
    x = partition.shard(x, 'batch', None)
    similarity = jnp.matmul(
      x, documents.T, precision=embedding_head.EXACT
    )  # [B M, B M]
    owners = jnp.arange(rows)[:, None] * slots + batch['owners']
    fields = owners, batch['roles'], batch['keys']
    owners, roles, checksums = (
      partition.shard(x.ravel(), None) for x in fields
    )
    in_example = owners == owners[:, None]
    positive = in_example & (roles == embeddings.POSITIVE)
    # The positive follows its query.
    duplicates = checksums == jnp.roll(checksums, -1)[:, None]
    duplicates |= (roles == embeddings.POSITIVE) & (
      checksums[owners] == checksums[:, None]
    )
    counted = positive | ((roles >= embeddings.POSITIVE) & ~duplicates)
    logits = jnp.where(counted, self._logits(outputs, similarity), _HIDDEN)
    positive_logit = jnp.sum(jnp.where(positive, logits, 0), axis=1)
    nearest = positive_logit >= jnp.max(logits, axis=1)
    hard = in_example & (roles == embeddings.NEGATIVE)
    logits += self.hardness * jnp.where(
      hard, jax.lax.stop_gradient(similarity), 0
    )
    losses = jax.nn.logsumexp(logits, axis=1) - positive_logit
    return tuple(
      jnp.where(batch['weights'] > 0, x.reshape(rows, slots), 0.0)
      for x in (losses, nearest)
    )

  def _divergence(self, outputs: loss.Outputs, batch: loss.Batch) -> Array:
    x, owners = outputs.hidden, batch['owners']
    in_example = (owners[:, None] == owners[..., None]) & (
      batch['roles'] >= embeddings.POSITIVE
    )[:, None]
    similarity = jnp.einsum(
      'BQE,BME->BQM', x, x, precision=embedding_head.EXACT
    )
    logits = jnp.where(in_example, self._logits(outputs, similarity), _HIDDEN)
    targets = jnp.where(in_example, batch['relevance'][:, None], 0.0)
    values = jax.scipy.special.xlogy(targets, targets) - jnp.where(
      in_example, targets * jax.nn.log_softmax(logits), 0.0
    )
    return jnp.sum(values * batch['weights'][..., None])


def _squared_products(x: Float[Array, 'B M E']) -> Float[Array, '']:
  """Sums squared products over ordered pairs of different vectors."""
  # X X^T and X^T X have the same Frobenius norm; the latter is only [E, E].
  product = jnp.einsum('BMD,BME->DE', x, x, precision=embedding_head.EXACT)
  norms = jnp.sum(jnp.square(x), axis=-1)
  return jnp.sum(jnp.square(product)) - jnp.sum(jnp.square(norms))
