"""The base class of losses: its methods are called by step and evaluators.

Imports no module of a loss.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from encdec_adapt.base import errors, keys, option_strings
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import base_model, build, expert_layer, model_config
from encdec_adapt.objectives import example_maker, framing
from encdec_adapt.ops import vocabulary_loss
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training.losses import rollout_options

KIND = 'config.loss.kind'

Batch = Mapping[str, Array]
Objectives = Sequence[example_maker.Objective]
Params = base_model.Params
References = Mapping[str, Params]
Rows = dict[str, np.ndarray]
Terms = dict[str, Array]
Weighted = tuple[option_strings.Part, float | None]


class Outputs(NamedTuple):
  """Results of a model for a batch.

  Attributes:
    hidden: states that predict the targets, [B, T, D].
    table: output table, [V, D].
    config: shape of the stack that computed the states.
  """

  hidden: Array
  table: Array
  config: model_config.StackConfig


@dataclasses.dataclass(frozen=True)
class Loss:
  """Base of the losses; its keys are those of every loss.

  Attributes:
    name: name of the loss in messages.
    forms: names of `kind` that choose the loss, with the dataclasses of their
      options.
    references: names of the frozen models that the loss reads.
    starts_from_reference: whether the model that training starts from is the
      reference where `config.teacher` names none.
    held_out_references: references that held-out metrics need, too.
    accepts: architectures of the references that the loss accepts.
    source_fields: name of a field that sources may have -> whether it is read.
    samples: whether the model is trained on completions that it samples.
    metrics: metric of a step -> 'sum', or its divisor in `divisors`: 'mean' is
      `Loss.weight` of the batch. A loss adds its terms to those here: `loss`,
      `weight` (target tokens of all answers), and for models with experts
      `load_balance` (1 if all experts get equally many tokens) and
      `router_z_loss`, both unweighted means over layers and tokens of a
      microbatch.
    held_out: metrics of held-out rows, in the order of `row_ratios`.
    curves: held-out metrics in the records of a run, `loss` among them.
    selects: the held-out metric that `keep_best` and `patience` follow.
    highest: whether the highest value of it is the best; else the lowest.
    reads_rewards: whether it needs rewards of sampled completions.
    reads_windows: whether a teacher reads the text that spans were cut out of.
    allows_dropout: whether the trained model may have dropout; not where its
      log-probabilities or scores of answers are compared.
    unit: unit of the metric in printed lines.
    joins_rows: whether the rows of a batch are compared with each other, so
      that it has at least 2, and the loss divides it into `parts` itself.
    axes: logical axes of the batch fields that the loss adds or changes.
    models: the reference models by name; set once they are opened.
    rollouts: options of sampling; None where no completions are sampled.
  """

  name: ClassVar[str]
  forms: ClassVar[Mapping[str, type]] = {}
  references: ClassVar[tuple[str, ...]] = ()
  starts_from_reference: ClassVar[bool] = False
  held_out_references: ClassVar[tuple[str, ...]] = ()
  # An encoder predicts masked tokens, a classifier labels.
  accepts: ClassVar[Sequence[Any]] = architectures.GENERATING
  source_fields: ClassVar[Mapping[str, bool]] = {}
  samples: ClassVar[bool] = False
  metrics: ClassVar[Mapping[str, str]] = {
    'loss': 'mean',
    'weight': 'sum',
    'load_balance': 'mean',
    'router_z_loss': 'mean',
  }
  held_out: ClassVar[tuple[str, ...]] = ('loss', 'accuracy', 'exact_match')
  curves: ClassVar[tuple[str, ...]] = ('loss', 'accuracy')
  selects: ClassVar[str] = 'loss'
  highest: ClassVar[bool] = False
  reads_rewards: ClassVar[bool] = False
  reads_windows: ClassVar[bool] = False
  allows_dropout: ClassVar[bool] = True
  unit: ClassVar[str] = 'per target token'
  joins_rows: ClassVar[bool] = False
  axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {}

  kind: str = keys.key(
    '',
    "Preferences: 'dpo:beta=0.1,smoothing=0', 'robust:beta=0.1,smoothing=0.1',"
    " 'hinge:beta=0.1', 'ipo:beta=0.1,log_probs=sum' (or mean),"
    " 'simpo:beta=2,gamma=1' or 'orpo:lambda=0.1', options having these"
    " defaults; with ' + cross_entropy@0.2' a share for the chosen answers."
    " 'reward': a reward model, of the same data."
    " Policies: 'rloo:beta=0.05,clip=0.2' or 'grpo:beta=0,clip=0.2,"
    "divisor=sequence,deviation=group,kl=k3' (policy.py has all options)."
    " Teachers: 'distill:divergence=forward,beta=0.5,on_policy=0' (the README"
    ' has the divergences; on_policy is the share of sampled targets).'
    " Embeddings: 'infonce:temperature=0.05,hardness=0' (infonce.py has all"
    " options). '':"
    ' cross-entropy, or distillation by the key below.',
  )
  load_balance: float = keys.key(
    0.01,
    'Models with experts: weight of the load-balancing loss, per layer over'
    ' the tokens of a microbatch (Switch Transformer: 0.01).',
    at_least=0,
  )
  router_z_loss: float = keys.key(
    0.0,
    "Models with experts: weight of the router's z-loss (ST-MoE: 0.001).",
    at_least=0,
  )
  chunk: int = keys.key(
    1024,
    'Tokens of a device whose logits are in memory at a time. Devices that'
    ' share a table gather theirs: 256 on each of 16 are 4096 rows of logits.',
    at_least=1,
  )
  # Not parameters: a model is static in a compiled step, and its parameters are
  # an argument of it, so that they are not compiled in as constants.
  models: Mapping[str, build.Model] = dataclasses.field(default_factory=dict)
  rollouts: rollout_options.Rollouts | None = None

  def __post_init__(self):
    keys.check(self, 'config.loss.')

  # -- Choice ------------------------------------------------------------------

  def is_chosen(self, model: model_config.ModelConfig) -> bool:
    """Returns whether a job that trains a model has this loss."""
    del model
    return self.kind_name in self.forms

  @property
  def kind_name(self) -> str:
    """The name in `kind`."""
    return re.split('[ :@]', self.kind, maxsplit=1)[0]

  @functools.cached_property
  def kind_parts(self) -> tuple[Any, Sequence[Weighted]]:
    """Options of the name in `kind`, and the parts that are added to it.

    Raises:
      UserError: the name has a weight, or an option is not right.
    """
    (part, weight), *more = option_strings.things(KIND, self.kind, r' \+ ')
    if weight is not None:
      raise part.error('must be a name without a weight')
    section, options = self.forms[self.kind_name], part.partition(':')[1]
    return keys.make(section, options.key_values(keys.defaults(section))), more

  def shape(self, model: model_config.ModelConfig) -> model_config.ModelConfig:
    """Returns the model that a job trains, given that of its configuration."""
    return model

  def for_objectives(self, objectives: Objectives) -> 'Loss':
    """Returns the loss that reads the rows of objectives."""
    del objectives
    return self

  def with_stored_teacher(self, folder: str) -> 'Loss':
    """Returns the loss that reads a stored teacher in the place of a model.

    Args:
      folder: folder of the stored teacher.

    Raises:
      UserError: it reads models only.
    """
    raise errors.UserError(
      f'config.teacher.checkpoint is the stored teacher {folder}, and the loss'
      f" is {self.name}; only config.loss.kind='distill' reads stored"
      ' probabilities.'
    )

  def check(
    self, model: model_config.ModelConfig, objectives: Objectives
  ) -> None:
    """Checks that the loss suits a model and objectives.

    Raises:
      UserError: it does not.
    """

  def sampled_rows(self, rows: int) -> int:
    """Returns the rows of a batch whose prompts the model continues."""
    return rows

  def assumed_reference(
    self, model: model_config.ModelConfig
  ) -> model_config.ModelConfig:
    """Returns the shape of a reference if its path is not given."""
    return model

  # -- Training ----------------------------------------------------------------

  def frame(self, rows: Rows, ids: special_ids.SideIds) -> Rows:
    """Changes a batch of the objective on the host.

    Args:
      rows: fields of `objectives.framing`.
      ids: special ids of the decoder's vocabulary.
    """
    del ids
    return rows

  def row_shape(
    self, lengths: framing.Lengths, answers: int
  ) -> tuple[framing.Lengths, int]:
    """Returns tokens and answers of a training row, given those of records."""
    return lengths, answers

  def logits(self, lengths: framing.Lengths) -> int:
    """Returns the positions of a training row of which logits are computed."""
    return lengths.decoder or lengths.encoder

  def pad_batch(
    self,
    maker: type[example_maker.ExampleMaker],
    lengths: framing.Lengths,
    ids: special_ids.Framing,
    *,
    teacher: bool,
  ) -> Rows:
    """Returns a batch of a row of padding, for the shapes of the fields.

    Args:
      maker: class of the objective's maker.
      lengths: tokens of a row.
      ids: special ids.
      teacher: whether to make the teacher's fields.
    """
    row = maker.frame((), lengths, ids, teacher=teacher)
    return self.frame(framing.stack_rows([row]), ids.decoder)

  def weight(self, batch: Batch) -> Float[Array, '']:
    """Returns the weight of a batch, over which metrics are means."""
    return jnp.sum(batch['weights'])

  def divisors(self, batch: Batch) -> Terms:
    """Returns the divisors that `metrics` names, 1 in place of 0."""
    # A batch of weight zero has zero gradients; avoid 0 / 0.
    weight = self.weight(batch)
    return {'mean': jnp.where(weight > 0, weight, 1.0)}

  def objective(self, terms: Terms, divisors: Terms) -> Float[Array, '']:
    """Returns the part of a step's loss that the sums of a microbatch make."""
    return terms['loss'] / divisors['mean']

  def predict(
    self, model: build.Model, params: Params, batch: Batch, **options: Any
  ) -> Outputs:
    """Computes the states of a model that predict the targets.

    Args:
      model: the trained model or a reference.
      params: its parameters.
      batch: fields of `objectives.framing`.
      **options: of `architecture.Architecture.predict`.
    """
    hidden = model.architecture.predict(model, params, batch, **options)
    return Outputs(hidden, model.head(params), model.config.decoder)

  def reference_batch(self, batch: Batch) -> Batch:
    """Returns a batch as the references read it."""
    return batch

  def answer_log_probs(
    self,
    outputs: Outputs,
    batch: Batch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
  ) -> Any:
    """Computes the log-probability of every token of the answers of rows.

    Args:
      outputs: outputs of a model.
      batch: fields of rows of G answers; targets and weights [P, G, T].
      temperature: divisor of the logits, after the soft-cap.
      entropy: whether to return entropies too.

    Returns:
      Float32 [P, G, T], 0 at tokens of weight 0; with `entropy` a pair.
    """
    shape = batch['targets'].shape
    results = vocabulary_loss.token_log_probs(
      outputs.hidden,
      outputs.table,
      batch['targets'].reshape(-1, shape[-1]),
      vocab_size=outputs.config.outputs,
      softcap=outputs.config.final_softcap,
      temperature=temperature,
      chunk=self.chunk,
      entropy=entropy,
    )
    # Selected, as the gradient of padding's infinite values is NaN.
    counted = batch['weights'] > 0
    return jax.tree.map(
      lambda x: jnp.where(counted, x.reshape(shape), 0.0), results
    )

  def terms(
    self, outputs: Outputs, references: Mapping[str, Outputs], batch: Batch
  ) -> Terms:
    """Computes the metrics of a batch as sums.

    Args:
      outputs: outputs of the trained model.
      references: outputs of the references, by name.
      batch: fields of `objectives.framing`.

    Returns:
      Metric -> sum over the batch; `loss` carries the gradient.
    """
    raise NotImplementedError

  def sums(
    self,
    model: build.Model,
    params: Params,
    batch: Batch,
    references: References | None = None,
    dropout: base_model.Dropout | None = None,
  ) -> Terms:
    """Computes `terms` and `weight` of a batch, and the losses of routers.

    Args:
      model: the trained model.
      params: its parameters.
      batch: fields of `objectives.framing`.
      references: parameters of the references, which no gradient reaches.
      dropout: dropout of the trained model; references have none.
    """
    # Stopped at their parameters: their states then need no backward pass and
    # none of their activations are stored for it.
    read = self.reference_batch(batch)
    outputs = {
      name: self.predict(
        self.models[name], jax.lax.stop_gradient(references[name]), read
      )
      for name in self.references
    }
    routing = []
    trained = self.predict(
      model, params, batch, routing=routing, dropout=dropout
    )
    terms = self.terms(trained, outputs, batch)
    # Target tokens also where `weight` counts examples: the cost of a run is
    # counted by them.
    terms['weight'] = jnp.sum(batch['weights'])
    if not routing:
      return terms
    # Router losses are means; scaled by the weight they add up like the sums.
    weight = self.weight(batch)
    routed = jax.tree.map(
      lambda mean: weight * mean, expert_layer.mean_losses(routing)
    )
    total = terms['loss'] + self.load_balance * routed.balance
    return terms | {
      'loss': total + self.router_z_loss * routed.z,
      'load_balance': routed.balance,
      'router_z_loss': routed.z,
    }

  def averages(self, terms: Terms, divisors: Terms) -> Terms:
    """Returns the metrics of a step.

    Args:
      terms: sums over the whole batch.
      divisors: divisors of the whole batch.
    """
    # Divided once, after all microbatches: their weights are unequal.
    means = {
      name: value
      if self.metrics[name] == 'sum'
      else value / divisors[self.metrics[name]]
      for name, value in terms.items()
    }
    return means | {'loss': self.objective(terms, divisors)}

  # -- Held-out rows -----------------------------------------------------------

  def row_ratios(
    self,
    model: build.Model,
    params: Params,
    batch: Batch,
    references: References | None = None,
  ) -> Float[Array, 'm 2 n']:
    """Computes the held-out metrics as ratios of sums, row by row.

    Args:
      model: the model.
      params: its parameters.
      batch: fields of `objectives.framing`; where `row` is [B, K], each of the
        K segments that a row may have is a row of the result.
      references: parameters of `held_out_references`.

    Returns:
      Numerator and denominator of every metric of `held_out`: here the
      cross-entropy to the data in nats and the weight with the largest logit,
      both over the weight of the targets, and whether greedy decoding gives all
      targets of a row. A row whose first denominator is 0 does not count.
    """
    del references
    outputs = self.predict(model, params, batch)
    nats, correct = vocabulary_loss.per_token(
      outputs.hidden,
      outputs.table,
      batch['targets'],
      vocab_size=outputs.config.outputs,
      softcap=outputs.config.final_softcap,
      chunk=self.chunk,
    )
    weights = batch['weights']  # [B, T]
    # Selected, not only multiplied: padding may have infinite cross-entropy,
    # and 0 times infinity is NaN.
    ignored = weights == 0
    nats = jnp.where(ignored, 0.0, weights * nats)
    wrong = (correct <= 0) & ~ignored
    terms = jnp.stack([nats, weights, weights * correct, wrong])  # [4, B, T]
    if jnp.ndim(batch.get('row', 0)) < 2:
      terms = jnp.sum(terms, axis=2)
    else:
      size = weights.shape[1]
      sums = functools.partial(jax.ops.segment_sum, num_segments=size)
      numbers = batch.get('decoder_segments', batch.get('encoder_segments')) - 1
      terms = jax.vmap(jax.vmap(sums), (0, None))(terms, numbers)
    nats, weight, correct, wrong = terms.reshape(4, -1)
    exact = (wrong == 0).astype(jnp.float32)
    ratios = [nats, weight, correct, weight, exact, jnp.ones_like(exact)]
    return jnp.stack(ratios).reshape(3, 2, -1)

  def rank(self, value: float) -> float:
    """Returns a number that is lowest for the best value of `selects`."""
    return -value if self.highest else value

  def describe(self, value: float) -> str:
    """Names a value of `selects` in printed lines."""
    return f'held-out {self.selects} {value:.4f}'
