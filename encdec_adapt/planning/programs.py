"""The programs of a job as shapes: what a plan compiles.

Nothing here reads weights or data. A teacher whose path is not given is taken
to be a decoder-only model of the decoder's own shape, which is what a pair is
adapted from.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh

from encdec_adapt import config as config_lib
from encdec_adapt.conversion import initial_state
from encdec_adapt.evaluation import perplexity
from encdec_adapt.models import cache as caches
from encdec_adapt.models import model_config
from encdec_adapt.models import model_flops as formula
from encdec_adapt.ops import partition, vocabulary_loss
from encdec_adapt.sharding import compiler, placement
from encdec_adapt.sharding import layout_report as sharding_report
from encdec_adapt.training import losses, setup
from encdec_adapt.training import state as state_lib


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function and the shapes, with shardings, that it is called on.

  Attributes:
    function: the jitted function.
    arguments: trees of ShapeDtypeStruct, by what they are: 'parameters',
      'optimizer', 'teacher', 'batch', 'caches'.
    call: puts them in the function's order.
    donated: names of arguments whose memory the results take over.
    axes: trees of the arguments' logical axes, a tuple for each leaf; empty
      of a program whose arguments nobody lists.
    made: trees that live inside the program, by what they are: 'gradients'.
    beside: trees that are in memory meanwhile, but no arguments.
  """

  function: Any
  arguments: Mapping[str, Any]
  call: Callable[[Mapping[str, Any]], tuple[Any, ...]]
  donated: tuple[str, ...] = ()
  axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  made: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def lower(self, mesh: Mesh) -> jax.stages.Lowered:
    """Traces it for the mesh's own platform."""
    platform = mesh.devices.flat[0].platform
    with jax.set_mesh(mesh):
      traced = self.function.trace(*self.call(self.arguments))
      return traced.lower(lowering_platforms=(platform,))


def train(settings: config_lib.Settings, mesh: Mesh) -> Program:
  """One step in which every parameter moves.

  Raises:
    UserError: the attention takes no such model.
    ValueError: an array does not divide over the mesh; names it.
  """
  where = _place(settings, settings.model, mesh)
  taught = teacher(settings, mesh)
  phases = setup.make_phases(
    where,
    settings.loss,
    settings.optimizer,
    settings.train,
    taught.model if taught else None,
  )
  state = phases.abstract()
  arguments = {
    'parameters': state.params,
    **_kept(state, taught),
    'batch': batch(settings, where, settings.train.batch_size),
  }
  return Program(
    phases.make_step(),
    arguments,
    lambda a: (
      state.replace(params=a['parameters'], groups=a['optimizer']),
      a['batch'],
      a['teacher'],
    ),
    donated=('parameters', 'optimizer'),
    axes={
      'parameters': where.axes(arguments['parameters']),
      'optimizer': where.axes(arguments['optimizer']),
      'teacher': taught.axes(arguments['teacher']) if taught else {},
      'batch': _batch_axes(arguments['batch']),
    },
    made={'gradients': [state.params] * gradients(settings)},
  )


def _kept(state, taught) -> dict[str, Any]:
  """What a job has in memory from its first step to its last, but the model."""
  return {
    'optimizer': state.groups,
    'teacher': taught.abstract_params() if taught else {},
  }


def gradients(settings: config_lib.Settings) -> int:
  """Trees of gradients that a step holds: those of a part, and their sum."""
  return 2 if settings.train.microbatches > 1 else 1


def loss(settings: config_lib.Settings, mesh: Mesh) -> Program:
  """The vocabulary's part of a microbatch's loss, and its gradients, alone."""
  where = _place(settings, settings.model, mesh)
  taught = teacher(settings, mesh)
  rows = settings.train.batch_size // settings.train.microbatches
  used = _targets(settings, where, rows)
  students = _states_and_table(settings, where, rows)
  teachers = _states_and_table(settings, taught, rows) if taught else {}

  def total(students, teachers, batch):
    """What a microbatch adds to the loss, of its states alone."""
    with partition.use(mesh, settings.rules.as_dict()):
      source = None
      if taught:
        source = (taught.model.config.decoder, *teachers.values())
      sums = losses.vocabulary_sums(
        where.model.config.decoder,
        *students.values(),
        batch,
        settings.loss,
        source,
      )
    return sums.total

  return Program(
    jax.jit(jax.grad(total), compiler_options=compiler.options(mesh)),
    {'parameters': students, 'teacher': teachers, 'batch': used},
    lambda a: (a['parameters'], a['teacher'], a['batch']),
  )


def evaluation_loss(settings: config_lib.Settings, mesh: Mesh) -> Program:
  """The vocabulary's part of an evaluation batch's loss, alone."""
  where = _place(settings, settings.model, mesh)
  rows, stack = settings.train.eval_batch_size, where.model.config.decoder

  def total(students, batch):
    """The sums of an evaluation, of its states alone."""
    with partition.use(mesh, settings.rules.as_dict()):
      return vocabulary_loss.cross_entropy(
        *students.values(),
        batch['targets'],
        batch['weights'],
        vocab_size=stack.vocab_size,
        softcap=stack.final_softcap,
        chunk=settings.loss.chunk,
      )

  return Program(
    jax.jit(total, compiler_options=compiler.options(mesh)),
    {
      'parameters': _states_and_table(settings, where, rows),
      'batch': _targets(settings, where, rows),
    },
    lambda a: (a['parameters'], a['batch']),
  )


def _targets(settings, where, rows: int):
  """What a loss reads of a batch."""
  fields = batch(settings, where, rows)
  return {name: fields[name] for name in ('targets', 'weights')}


def _states_and_table(settings, where, rows: int):
  """A decoder's states of a batch's targets, and its table."""
  length = settings.data.train.lengths.decoder
  names = ('batch', 'length', 'act_embed')
  spec = settings.rules.on(where.mesh).spec(*names)
  hidden = jax.ShapeDtypeStruct(
    (rows, length, where.model.config.decoder.width),
    jnp.dtype(settings.compute.dtype),
    sharding=jax.NamedSharding(where.mesh, spec),
  )
  table = where.model.head(where.abstract_params())
  return {'hidden': hidden, 'table': table}


def evaluate(settings: config_lib.Settings, mesh: Mesh) -> Program:
  """The loss of one held-out batch, as it is measured inside a job."""
  where = _place(settings, settings.model, mesh)
  evaluator = perplexity.Evaluator(where, settings.loss.chunk)
  params = where.abstract_params()
  fields = batch(settings, where, settings.train.eval_batch_size)
  state = setup.make_phases(
    where, settings.loss, settings.optimizer, settings.train
  ).abstract()
  return Program(
    evaluator.sums,
    {'parameters': params, 'batch': fields},
    lambda a: (a['parameters'], a['batch']),
    axes={'parameters': where.axes(params), 'batch': _batch_axes(fields)},
    beside=_kept(state, teacher(settings, mesh)),
  )


def decode(settings: config_lib.Settings, mesh: Mesh) -> Program:
  """One step of generation at the end of a full cache.

  The rows are those of an evaluation batch, parameters in the dtype that is
  computed in.
  """
  where = _place(settings, settings.model, mesh)
  model, rows = where.model, settings.train.eval_batch_size
  dtype = jnp.dtype(settings.compute.dtype)
  params = jax.tree.map(
    lambda p: jax.ShapeDtypeStruct(p.shape, dtype, sharding=p.sharding),
    where.abstract_params(),
  )
  lengths = settings.data.train.lengths

  def make_caches(params):
    """Those of the decoder, and of the encoder's states where there is one."""
    cache = model.init_cache(rows, lengths.decoder)
    if not isinstance(settings.model, model_config.EncoderDecoderConfig):
      return cache, None
    width = settings.model.encoder.width
    encoded = jnp.zeros((rows, lengths.encoder, width), dtype)
    segments = jnp.zeros((rows, lengths.encoder), jnp.int32)
    return cache, model.prefill_cross(params, encoded, segments)

  def step(params, tokens, cache, cross):
    """One token of every row, which sees all before it."""
    with partition.use(mesh, settings.rules.as_dict()):
      options = {} if cross is None else {'cross': cross}
      hidden, cache = model.decode_step(
        params,
        tokens,
        segments=jnp.ones_like(tokens),
        positions=jnp.full_like(tokens, lengths.decoder - 1),
        cache=cache,
        **options,
      )
      return model.logits(params, hidden), cache

  shapes = jax.eval_shape(make_caches, params)
  axes = (caches.axes(settings.model.decoder), None)
  if shapes[1] is not None:
    axes = (axes[0], caches.cross_axes(settings.model.decoder))
  cache, cross = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    shapes,
    placement.shardings(shapes, axes, mesh, where.rules),
  )
  tokens = jax.ShapeDtypeStruct(
    (rows, 1),
    jnp.int32,
    sharding=jax.NamedSharding(mesh, where.rules.on(mesh).spec('batch')),
  )
  return Program(
    jax.jit(step, donate_argnums=2, compiler_options=compiler.options(mesh)),
    {'parameters': params, 'batch': tokens, 'caches': (cache, cross)},
    lambda a: (a['parameters'], a['batch'], *a['caches']),
    donated=('caches',),
    axes={
      'parameters': where.axes(params),
      'batch': ('batch', None),
      'caches': axes,
    },
  )


PROGRAMS: Mapping[str, Callable[[config_lib.Settings, Mesh], Program]] = {
  'train': train,
  'eval': evaluate,
  'decode': decode,
}


def model_flops(name: str, settings: config_lib.Settings, mesh: Mesh) -> float:
  """FLOPs of one run of a program on all devices, by the stated formula."""
  if name == 'train':
    taught = teacher(settings, mesh)
    return setup.step_flops(
      settings.model,
      settings.data.train.lengths,
      settings.train.batch_size,
      taught.model.config if taught else None,
    )
  lengths, rows = settings.data.train.lengths, settings.train.eval_batch_size
  sizes = lengths.encoder, lengths.decoder
  if name == 'decode':
    return float(rows * formula.decoding(settings.model, *sizes))
  return float(rows * formula.forward(settings.model, *sizes, lengths.teacher))


def _batch_axes(fields: Mapping[str, jax.ShapeDtypeStruct]):
  return {k: placement.batch_axes(v.shape) for k, v in fields.items()}


def argument_bytes(program: Program) -> dict[str, float]:
  """Bytes of the arguments in one device's memory, by what they are."""
  return tree_bytes(program.arguments)


def tree_bytes(trees: Mapping[str, Any]) -> dict[str, float]:
  """Bytes in one device's memory of named trees of abstract arrays."""
  found = {k: sharding_report.device_bytes(v) for k, v in trees.items()}
  return {name: size for name, size in found.items() if size}


def host_bytes(program: Program) -> float:
  """Bytes that one device's share of the program copies from and to its host.

  Arguments in the host's memory are read; whose memory the results take over,
  are written back.
  """
  return sum(
    sharding_report.device_bytes(tree, host=True)
    * (1 + (name in program.donated))
    for name, tree in program.arguments.items()
  )


def moved_bytes(program: Program) -> float:
  """Bytes of its arguments that one device reads and writes at least.

  All are read once. Those whose memory the results take over are written, of
  caches one entry of many.
  """
  return sum(
    size * (1 + (name in program.donated and name != 'caches'))
    for name, size in argument_bytes(program).items()
  )


def held_twice(program: Program) -> dict[str, list[dict[str, Any]]]:
  """Arguments that several devices hold the same of.

  Returns:
    `replicated`: large ones that every device holds whole; `copies`: see
    `sharding.layout_report.copies`.
  """
  described = rows(program)
  return {
    'replicated': sharding_report.replicated(described),
    'copies': sharding_report.copies(described),
  }


def rows(program: Program) -> list[sharding_report.Row]:
  """How every argument is sharded."""
  return sharding_report.describe(program.arguments, program.axes)


def teacher(
  settings: config_lib.Settings, mesh: Mesh
) -> state_lib.Placement | None:
  """The teacher's model, or None where nothing is distilled."""
  if not settings.loss.distillation:
    return None
  if settings.teacher.checkpoint:
    return initial_state.open_teacher(settings, mesh).where
  decoder = alone(settings.model.decoder)
  return initial_state.place_teacher(decoder, settings, mesh)


def _place(
  settings: config_lib.Settings, model: model_config.ModelConfig, mesh: Mesh
) -> state_lib.Placement:
  return setup.place_model(model, settings.compute, mesh, settings.rules)


def alone(
  decoder: model_config.StackConfig,
) -> model_config.DecoderOnlyConfig:
  """The decoder-only model whose stack a decoder is, less what reads."""
  stack = dataclasses.replace(
    decoder, cross_width=None, cross_merged=False, cross_layers='all'
  )
  return model_config.DecoderOnlyConfig(stack)


def batch(
  settings: config_lib.Settings, where: state_lib.Placement, rows: int
) -> dict[str, jax.ShapeDtypeStruct]:
  """Fields of a batch of this many rows; see `data.batch`."""
  lengths = settings.data.train.lengths
  sides = {'decoder': lengths.decoder}
  if lengths.encoder:
    sides['encoder'] = lengths.encoder
  fields = {'targets': lengths.decoder, 'weights': lengths.decoder}
  if setup.reads_teacher_row(
    settings.model, lengths, settings.loss.distillation
  ):
    sides['teacher'] = lengths.teacher
    fields['teacher_index'] = lengths.decoder
  for side, length in sides.items():
    for field in ('tokens', 'segments', 'positions'):
      fields[f'{side}_{field}'] = length
  shapes = {
    name: jax.ShapeDtypeStruct(
      (rows, length), jnp.float32 if name == 'weights' else jnp.int32
    )
    for name, length in fields.items()
  }
  shardings = placement.batch_sharding(where.mesh, where.rules, shapes)
  return {
    name: jax.ShapeDtypeStruct(
      shape.shape, shape.dtype, sharding=shardings[name]
    )
    for name, shape in shapes.items()
  }
