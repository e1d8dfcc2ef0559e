"""What makes a program fit that needs more memory than a device has.

A training step keeps its batch, which is a part of the recipe: first the
mesh, rematerialisation and microbatches change, then what the optimizer keeps.
Evaluation and decoding have none of these: there the mesh changes, then the
rows that are worked on at a time.

All is by shapes (`planning.shapes`), or in proportion; nothing is compiled.
"""

from collections.abc import Mapping
import dataclasses
import itertools
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.models import execution
from encdec_adapt.planning import chips, programs, search, shapes
from encdec_adapt.sharding import mesh as mesh_lib

_MOST = 3  # Remedies that are named.
# What the optimizer keeps, ever less of it in a device's memory. The last two
# are named together: one costs time, the other is another recipe.
_OPTIMIZERS = (
  ({},),
  ({'moment_dtype': 'bfloat16'},),
  ({'offload': True}, {'kind': 'adafactor', 'moment_dtype': 'float32'}),
)
_TRIED = {
  True: 'mesh, remat policy, number of microbatches and optimizer',
  False: 'mesh and config.train.eval_batch_size',
}


def find(
  name: str,
  settings: config_lib.Settings,
  plan: Mapping[str, Any],
  where: chips.Slice,
  devices,
) -> dict[str, Any]:
  """Says with which flags the same chips would do.

  Args:
    name: of the program, in `programs.PROGRAMS`.
    settings: of the job.
    plan: of the program, which does not fit; where it was compiled, it
      decides how far estimates by shapes are trusted.
    where: the chips.
    devices: of the chips, or as many others.

  Returns:
    `remedies`, the flags of up to three ways, the best first; and `advice`,
    what to do where there is none, or None.
  """
  train = name == 'train'
  if train:
    found, least = _of_training(settings, plan, where, devices)
  else:
    found, least = _of_rows(name, settings, plan, where, devices)
  if found:
    return {'remedies': [' '.join(flags) for flags in found], 'advice': None}
  budget = plan['memory']['budget']
  advice = search.nothing_fits(where, _TRIED[train], least, budget)
  return {'remedies': [], 'advice': advice}


def _of_training(settings, plan, where, devices):
  """Flags of the fastest ways that keep the batch; the least bytes of any."""
  budget, least = plan['memory']['budget'], plan['memory']['peak']
  mesh = mesh_lib.make_mesh(settings.mesh, devices)
  asked = shapes.describe('train', settings, mesh, where, budget)
  # What was compiled knows better.
  doubt = max(1.0, plan['memory']['peak'] / asked['memory']['peak'])
  for changes in _OPTIMIZERS:
    found = []
    for changed, words in _with_optimizers(settings, changes):
      every = list(_candidates(changed, where, devices, budget / doubt))
      peaks = [doubt * one.plan['memory']['peak'] for one in every]
      least = min([least, *peaks])
      # Once each: a mesh's least may be among what fits.
      fit = {one.flags: one for one in every if one.plan['fits']}
      ordered = sorted(fit.values(), key=lambda one: -one.rate)
      found.append([words + one.flags for one in ordered[:_MOST]])
    # The best of each, then the second of each.
    mixed = itertools.chain(*itertools.zip_longest(*found))
    found = [flags for flags in mixed if flags][:_MOST]
    if found:
      return found, least
  return [], least


def _with_optimizers(settings, changes):
  """The job with each of these optimizers that it has not, and their flags."""
  for change in changes:
    if 'moment_dtype' in change and settings.optimizer.kind == 'adafactor':
      continue
    changed = dataclasses.replace(
      settings, optimizer=dataclasses.replace(settings.optimizer, **change)
    )
    if not change or changed != settings:
      yield (
        changed,
        tuple(
          f'--config.optimizer.{key}={value}'
          for key, value in change.items()
          if value != getattr(settings.optimizer, key)
        ),
      )


def _candidates(settings, where, devices, budget):
  """Meshes and remat policies, with as few microbatches as they fit with."""
  arguments = search.Known(devices)
  for on_mesh, words in search.on_meshes(settings, where):
    shards = on_mesh.mesh.replica * on_mesh.mesh.fsdp
    if settings.train.batch_size % shards == 0:
      yield from _on_mesh(on_mesh, words, where, budget, arguments)


def _on_mesh(settings, words, where, budget, arguments: search.Known):
  """The candidates of one mesh; of one that is too small, its least only."""
  given, mesh = arguments.of(settings)
  batch = settings.train.batch_size

  def candidate(remat: str, microbatches: int) -> search.Candidate:
    """The job with these, and its plan."""
    changed = search.with_remat(settings, remat, batch, microbatches)
    plan = shapes.describe('train', changed, mesh, where, budget, given)
    return search.Candidate(changed, words + search.training(changed), plan)

  parts = _divisors(batch // settings.mesh.replica // settings.mesh.fsdp)
  smallest = [candidate('full', n) for n in {parts[0], parts[-1]}]
  yield from smallest
  if not any(one.plan['fits'] for one in smallest):
    return
  for remat in execution.REMAT_POLICIES:
    tried = (candidate(remat, n) for n in parts)
    fits = next((one for one in tried if one.plan['fits']), None)
    if fits:
      yield fits


def _divisors(rows: int) -> list[int]:
  """1, 2, 4 and so on, as long as they divide, and the rows themselves."""
  powers = [2**n for n in range(rows.bit_length()) if rows % 2**n == 0]
  return sorted({*powers, rows})


def _of_rows(name, settings, plan, where, devices):
  """Flags of meshes with the most rows at a time; the least bytes of any.

  What a device holds is exact of parameters; all else is taken to grow with
  its share of the rows.
  """
  memory, rows = plan['memory'], settings.train.eval_batch_size
  mesh = mesh_lib.make_mesh(settings.mesh, devices)
  known = memory['arguments']['parameters'] + sum(memory['beside'].values())
  others = max(0.0, memory['peak'] - known)
  of_row = others / rows * _shards(dict(mesh.shape))
  found, least = [], memory['peak']
  for on_mesh, words in search.on_meshes(settings, where):
    sizes = {axis: getattr(on_mesh.mesh, axis) for axis in mesh_lib.AXES}
    placed = mesh_lib.make_mesh(on_mesh.mesh, devices)
    program = programs.PROGRAMS[name](on_mesh, placed)
    fixed = programs.argument_bytes(program)['parameters']
    fixed += sum(programs.tree_bytes(program.beside).values())
    shards = sizes['replica'] * sizes['fsdp']
    words = [w for w in words if 'eval_batch_size' not in w]
    largest = max(shards, rows - rows % shards)
    for batch in (largest // n for n in _divisors(largest // shards)):
      needed = fixed + of_row * batch / _shards(sizes)
      least = min(least, needed)
      if needed <= memory['budget']:
        size = f'--config.train.eval_batch_size={batch}'
        # Shards of heads and lengths exchange the most.
        cost = sizes['tensor'] * sizes['sequence']
        found.append(((-batch, cost, needed), (*words, size)))
        break
  found.sort()
  return [flags for _, flags in found[:_MOST]], least


def _shards(sizes: Mapping[str, int]) -> int:
  """Devices that have tokens of their own."""
  return sizes['replica'] * sizes['fsdp'] * sizes['sequence']
