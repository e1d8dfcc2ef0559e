"""Programs of a job as shapes, which a plan compiles.

Nothing here reads weights or data. If no path of a teacher is given, it is
assumed to be a decoder-only model of the decoder's shape.
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
from encdec_adapt.ops import partition
from encdec_adapt.sharding import compiler, placement
from encdec_adapt.sharding import layout_report as sharding_report
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function and the shapes, with shardings, of its arguments.

  Attributes:
    function: the jitted function.
    arguments: trees of ShapeDtypeStruct by part: 'parameters', 'optimizer',
      'teacher', 'batch', 'caches'.
    call: returns the arguments in the function's order.
    donated: parts whose memory the results reuse.
    axes: trees of the arguments' logical axes by part, a tuple for each leaf;
      empty if no report lists them.
    made: trees that live inside the program, by part: 'gradients'.
    beside: trees that the job holds in memory and that are not arguments.
  """

  function: Any
  arguments: Mapping[str, Any]
  call: Callable[[Mapping[str, Any]], tuple[Any, ...]]
  donated: tuple[str, ...] = ()
  axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  made: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def lower(self, mesh: Mesh) -> jax.stages.Lowered:
    """Traces the program for the platform of a mesh."""
    platform = mesh.devices.flat[0].platform
    with jax.set_mesh(mesh):
      traced = self.function.trace(*self.call(self.arguments))
      return traced.lower(lowering_platforms=(platform,))


def train(settings: config_lib.Settings, mesh: Mesh) -> Program:
  """Returns a training step that updates every parameter.

  Raises:
    UserError: the attention backend does not support the model.
    ValueError: an array does not divide over the mesh.
  """
  where = _place(settings, settings.model, mesh)
  placed_teacher = teacher(settings, mesh)
  phases = setup.make_phases(
    where,
    settings.loss,
    settings.optimizer,
    settings.train,
    placed_teacher.model if placed_teacher else None,
  )
  state = phases.abstract()
  arguments = {
    'parameters': state.params,
    **_kept(state, placed_teacher),
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
      'teacher': placed_teacher.axes(arguments['teacher'])
      if placed_teacher
      else {},
      'batch': _batch_axes(arguments['batch']),
    },
    made={'gradients': [state.params] * gradients(settings)},
  )


def _kept(state, placed_teacher) -> dict[str, Any]:
  """Returns trees that a job holds in addition to its parameters."""
  return {
    'optimizer': state.groups,
    'teacher': placed_teacher.abstract_params() if placed_teacher else {},
  }


def gradients(settings: config_lib.Settings) -> int:
  """Returns how many trees of gradients a step holds, with their sum."""
  return 2 if settings.train.microbatches > 1 else 1


def evaluate(settings: config_lib.Settings, mesh: Mesh) -> Program:
  """Returns the loss of one held-out batch, as computed inside a job."""
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
  """Returns one step of generation at the end of a full cache.

  It has the rows of an evaluation batch, and parameters in the compute dtype.
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
    """Caches of self-attention and, with an encoder, of cross-attention."""
    cache = model.init_cache(rows, lengths.decoder)
    if not isinstance(settings.model, model_config.EncoderDecoderConfig):
      return cache, None
    width = settings.model.encoder.width
    encoded = jnp.zeros((rows, lengths.encoder, width), dtype)
    segments = jnp.zeros((rows, lengths.encoder), jnp.int32)
    return cache, model.prefill_cross(params, encoded, segments)

  def step(params, tokens, cache, cross):
    """One token of every row, which sees all earlier ones."""
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
  """Returns FLOPs of a program on all devices by `models.model_flops`."""
  if name == 'train':
    placed_teacher = teacher(settings, mesh)
    return setup.step_flops(
      settings.model,
      settings.data.train.lengths,
      settings.train.batch_size,
      placed_teacher.model.config if placed_teacher else None,
    )
  lengths, rows = settings.data.train.lengths, settings.train.eval_batch_size
  sizes = lengths.encoder, lengths.decoder
  if name == 'decode':
    return float(rows * formula.decoding(settings.model, *sizes))
  return float(rows * formula.forward(settings.model, *sizes, lengths.teacher))


def _batch_axes(fields: Mapping[str, jax.ShapeDtypeStruct]):
  return {k: placement.batch_axes(v.shape) for k, v in fields.items()}


def tree_bytes(trees: Mapping[str, Any]) -> dict[str, float]:
  """Returns bytes in one device's memory of trees by part."""
  found = {k: sharding_report.device_bytes(v) for k, v in trees.items()}
  return {name: size for name, size in found.items() if size}


def host_bytes(program: Program) -> float:
  """Returns bytes that one device copies from and to its host's memory.

  Arguments in the host's memory are read; donated ones are written back.
  """
  return sum(
    sharding_report.device_bytes(tree, host=True)
    * (1 + (name in program.donated))
    for name, tree in program.arguments.items()
  )


def moved_bytes(program: Program) -> float:
  """Returns the least bytes of arguments that one device reads and writes.

  All are read once, and donated ones written; of caches only one entry is.
  """
  return sum(
    size * (1 + (name in program.donated and name != 'caches'))
    for name, size in tree_bytes(program.arguments).items()
  )


def held_twice(program: Program) -> dict[str, list[dict[str, Any]]]:
  """Returns `replicated` and `copies` of `sharding.layout_report`."""
  described = rows(program)
  return {
    'replicated': sharding_report.replicated(described),
    'copies': sharding_report.copies(described),
  }


def rows(program: Program) -> list[sharding_report.Row]:
  """Returns a row of the sharding report for every argument."""
  return sharding_report.describe(program.arguments, program.axes)


def teacher(
  settings: config_lib.Settings, mesh: Mesh
) -> state_lib.Placement | None:
  """Returns the teacher's model, or None without distillation."""
  if not settings.loss.distillation:
    return None
  if settings.teacher.checkpoint:
    return initial_state.open_teacher(settings, mesh).where
  decoder = without_cross_attention(settings.model.decoder)
  return initial_state.place_teacher(decoder, settings, mesh)


def _place(
  settings: config_lib.Settings, model: model_config.ModelConfig, mesh: Mesh
) -> state_lib.Placement:
  return setup.place_model(model, settings.compute, mesh, settings.rules)


def without_cross_attention(
  decoder: model_config.StackConfig,
) -> model_config.DecoderOnlyConfig:
  """Returns a decoder as a decoder-only model, without cross-attention."""
  stack = dataclasses.replace(
    decoder, cross_width=None, cross_merged=False, cross_layers='all'
  )
  return model_config.DecoderOnlyConfig(stack)


def batch(
  settings: config_lib.Settings, where: state_lib.Placement, rows: int
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the fields of a batch of some rows; see `data.batch`."""
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
