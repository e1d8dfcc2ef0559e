"""A toy encoder-decoder, batches for it, and how to train it."""

import types

import jax
import numpy as np

from encdec_adapt.base import keys
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import build, model_config
from encdec_adapt.objectives import framing, row_fields
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import losses, optimizers, phases, schedules
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.losses import cross_entropy
from encdec_adapt.training.metrics import token_metrics
from encdec_adapt.training.recipes import recipe
from encdec_adapt.training.sections import train_section
from tests import gemma_ids, toy_models

VOCAB = 60
LENGTHS = framing.Lengths(encoder=12, decoder=8)

STACK = toy_models.stack(vocab_size=VOCAB, vocab_multiple=8, pattern=('local',))
PAIR = model_config.encoder_decoder(STACK, STACK)
MODEL = build.build(PAIR)
# Held, so that it is compiled once per mesh: jit forgets the programs of a
# method that nothing refers to.
INIT = MODEL.init
SOURCE = model_config.DecoderOnlyConfig(STACK)


def make_loss(text, **fields):
  """The loss NAME or NAME:KEY=VALUE,.., with small chunks."""
  name, _, options = text.partition(':')
  section = losses.BY_NAME[name]
  values = keys.defaults(section)
  for entry in filter(None, options.split(',')):
    key, value = entry.split('=')
    kind = type(values[key])
    values[key] = value == 'True' if kind is bool else kind(value)
  return keys.make(section, values | {'chunk': 16}, **fields)


def make_recipe(loss, model=PAIR, axes=types.MappingProxyType({})):
  """A recipe of a loss, for rows of pairs unless `axes` says otherwise."""
  rows = recipe.Rows(
    row_fields.PAIRS,
    LENGTHS,
    1,
    LENGTHS.decoder,
    dict(axes),
    compared=loss.name == 'infonce',
  )
  return recipe.Recipe(loss, token_metrics.TargetTokens(), model, rows)


def sums(loss, model, params, batch, frozen=None, **options):
  """Terms of a batch; `frozen` has the parameters of the same model."""
  models = {
    name: x if isinstance(x, tuple) else (model, x)
    for name, x in (frozen or {}).items()
  }
  models = {name: losses.loss.Frozen(*x) for name, x in models.items()}
  return losses.loss.sums(loss, model, params, batch, models, **options)


def value(loss, terms, batch):
  """The loss of a step, of its terms."""
  return loss.objective(terms, losses.loss.divisors_of(loss, batch))


def make_batch(rows: int, seed: int = 0, teacher: bool = False):
  """Packed rows of random pairs with unequal weights."""
  rng = np.random.default_rng(seed)
  framed = []
  for _ in range(rows):
    pairs = [
      framing.Pair(
        rng.integers(5, VOCAB, rng.integers(1, 5), dtype=np.int32),
        rng.integers(5, VOCAB, rng.integers(1, 4), dtype=np.int32),
      )
      for _ in range(2)
    ]
    framed.append(
      framing.frame_row(pairs, LENGTHS, gemma_ids.FRAMING, teacher=teacher)
    )
  batch = framing.stack_rows(framed)
  batch['weights'] *= rng.random(batch['weights'].shape, dtype=np.float32)
  return batch


class Trainer:
  """State and step of the toy model on a mesh."""

  def __init__(
    self,
    mesh=None,
    *,
    microbatches=1,
    warmup=0,
    dropout=0.0,
    loss=None,
    rate=1e-2,
    optimizer=None,
    model=MODEL,
    axes=types.MappingProxyType({}),
    lora=adapters_lib.Options(),
    models=types.MappingProxyType({}),
  ):
    mesh = mesh or mesh_lib.MeshConfig(fsdp=1)
    count = int(np.prod([getattr(mesh, a) for a in mesh_lib.AXES]))
    self.mesh = mesh_lib.make_mesh(mesh, jax.devices()[:count])
    train = train_section.TrainConfig(
      microbatches=microbatches,
      cross_attention_warmup=warmup,
      dropout=dropout,
      lora=lora,
    )
    self.where = state_lib.Placement(
      model,
      self.mesh,
      rules_lib.RULES['fsdp'],
      adapters=adapters_lib.make(model.config, lora),
    )
    self.base = {}
    self.loss = loss or cross_entropy.CrossEntropy(z_loss=1e-3, chunk=16)
    self.phases = phases.Phases(
      self.where,
      make_recipe(self.loss, model.config, axes),
      optimizer
      or optimizers.OptimizerConfig(
        'adamw',
        schedules.ScheduleConfig('constant', rate, 2),
        # Updates that are smooth in the gradient: with a small epsilon the
        # first is its sign, which rounding decides where it is nearly 0.
        eps=1e-3,
        weight_decay=0.1,
      ),
      train,
      models,
    )
    self.schedule = schedules.make_schedule(
      self.phases.optimizer.config.schedule, 100
    )
    self.axes = axes
    self.functions = {}

  def init(self, params=None):
    """State at step 0."""
    if params is None:
      params = self.where.place(INIT, jax.random.key(0))
    return self.phases.create(params)

  def step(self, state, batch, references=None):
    """One step; groups that start there are thawed first."""
    number = int(state.step)
    state = self.phases.thaw(state, number)
    names = tuple(state.groups)
    if names not in self.functions:
      self.functions[names] = self.phases.make_step(self.schedule, number)
    return self.functions[names](
      state,
      step_lib.place_batch(batch, self.where, self.axes),
      references or {},
      self.base,
    )


def host(tree):
  """Flat path -> numpy array."""
  return {
    path: np.asarray(leaf) for path, leaf in state_lib.flatten(tree).items()
  }
