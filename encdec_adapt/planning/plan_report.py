"""Plans of compiled programs, as JSON; plans as text."""

from collections.abc import Mapping
import dataclasses
import time
from typing import Any

import jax
from jax.sharding import Mesh

from encdec_adapt.files import disk
from encdec_adapt.planning import (
  chips,
  hlo,
  kernels,
  out_of_memory,
  programs,
  roofline,
)
from encdec_adapt.sharding import layout_report as sharding_report


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices and reference numbers that a program is planned with.

  Attributes:
    where: slices that are planned for.
    mesh: mesh of their devices.
    budget: bytes of memory that a device may use.
    known: attentions of the model and its teacher.
    model_flops: FLOPs of one run on all devices by the formula of
      `models.model_flops`.
  """

  where: chips.Slice
  mesh: Mesh
  budget: float
  known: list[kernels.Attention]
  model_flops: float


def describe(program: programs.Program, target: Target) -> dict[str, Any]:
  """Compiles a program and returns what it costs on one device.

  Returns:
    JSON with `memory`, `flops`, `collectives`, `kernels`, `roofline`, `mfu`,
    `compile_s`, `trace_s`, `instructions`, `replicated`, `copies` and `fits`.
    If the compiler ran out of device memory, `fits` is false, the peak is what
    the compiler stated, and numbers of a compiled program are None.

  Raises:
    JaxRuntimeError: the compiler fails for another reason.
    UnknownProgramError: the compiled program is not understood.
  """
  began = time.perf_counter()
  lowered = program.lower(target.mesh)
  traced = time.perf_counter()
  try:
    compiled = _compile(lowered, target.mesh)
  except jax.errors.JaxRuntimeError as error:
    needed = out_of_memory.needed(str(error))
    if needed is None:
      raise
    compiled = None
  times = {
    'trace_s': traced - began,
    'compile_s': time.perf_counter() - traced,
  }
  if compiled is None:
    found = _refused(program, target, needed)
  else:
    found = _measured(compiled, program, target)
  return {
    'source': 'compiled',
    'fits': compiled is not None and found['memory']['peak'] <= target.budget,
    **found,
    **times,
    **programs.held_twice(program),
  }


def _refused(program, target: Target, needed: float) -> dict[str, Any]:
  """Returns what is known of a program that the compiler refused."""
  # The limit is the chip's memory, even if the budget is larger.
  memory = {
    'budget': min(target.budget, target.where.chip.hbm_bytes),
    'peak': needed,
    'arguments': programs.tree_bytes(program.arguments),
    'beside': programs.tree_bytes(program.beside),
  }
  unknown = ('flops', 'collectives', 'kernels', 'roofline', 'mfu')
  return {'memory': memory, **dict.fromkeys((*unknown, 'instructions'))}


def _measured(compiled, program, target: Target) -> dict[str, Any]:
  """Returns what is read from a compiled program, and estimates from it."""
  totals = hlo.totals(compiled.as_text())
  peak = target.where.chip.flops
  of_kernels = _kernels(totals, target.known, peak)
  kernel_flops = sum(row['flops'] for row in of_kernels)
  estimate = roofline.estimate(
    totals,
    target.mesh,
    target.where,
    kernel_flops,
    programs.moved_bytes(program),
    programs.host_bytes(program),
  )
  share = target.model_flops / target.mesh.size
  return {
    'memory': _memory(compiled, program, target),
    'flops': {
      'products': totals.flops,
      'kernels': kernel_flops,
      'model': share,
    },
    'collectives': [dataclasses.asdict(t) for t in estimate.traffic],
    'kernels': of_kernels,
    'roofline': {
      'compute_s': estimate.compute,
      'kernels_s': estimate.kernels,
      'collectives_s': estimate.collectives,
      'exposed_s': estimate.exposed,
      'memory_s': estimate.memory,
      'host_s': estimate.host,
      'step_s': estimate.step,
    },
    'mfu': share / peak / estimate.step,
    'instructions': totals.instructions,
  }


def _compile(lowered, mesh: Mesh):
  with jax.set_mesh(mesh):
    return lowered.compile()


def _memory(compiled, program, target) -> dict[str, Any]:
  """Returns bytes on one device; `parts` divide the temporary ones."""
  found = compiled.memory_analysis()
  results = found.output_size_in_bytes - found.alias_size_in_bytes
  code = found.generated_code_size_in_bytes
  temporary = float(found.temp_size_in_bytes)
  parts = programs.tree_bytes(program.made)
  parts['activations'] = max(0.0, temporary - sum(parts.values()))
  beside = programs.tree_bytes(program.beside)
  inside = float(found.argument_size_in_bytes + results + code) + temporary
  return {
    'budget': target.budget,
    'peak': inside + sum(beside.values()),
    'arguments': programs.tree_bytes(program.arguments),
    'beside': beside,
    'temporary': temporary,
    'parts': parts,
    'results': float(results),
    'code': float(code),
  }


def _kernels(totals, known, peak) -> list[dict[str, Any]]:
  """Returns calls, FLOPs and seconds of kernels by name."""
  names: dict[str, list[hlo.Kernel]] = {}
  for kernel in totals.kernels:
    names.setdefault(kernel.name, []).append(kernel)
  rows = []
  for name, calls in sorted(names.items()):
    work = kernels.flops(calls, known)
    rows.append(
      {
        'name': name,
        'calls': sum(call.times for call in calls),
        'flops': work,
        'seconds': work / peak / roofline.KERNEL_EFFICIENCY,
      }
    )
  return rows


def text(plan: Mapping[str, Any]) -> str:
  """Returns the plan of one program for people."""
  memory = plan['memory']
  verdict = 'fits' if plan['fits'] else 'DOES NOT FIT'
  lines = [
    f'memory per device: {disk.format_bytes(memory["peak"])} of'
    f' {disk.format_bytes(memory["budget"])}: {verdict}'
  ]
  if plan['source'] == 'shapes':
    lines.append('from the analytic cost model; nothing was compiled')
  parts = {
    **memory['arguments'],
    **{f'{k} (beside)': v for k, v in memory['beside'].items()},
    **{k: memory[k] for k in ('temporary', 'results', 'code') if k in memory},
    **{f'  {name}': size for name, size in memory.get('parts', {}).items()},
  }
  lines += [f'  {k:<18}{disk.format_bytes(v):>12}' for k, v in parts.items()]
  for one in plan['replicated']:
    lines.append(
      f'  replicated: {one["name"]} {disk.format_bytes(one["bytes"])}'
    )
  lines += [f'  {line}' for line in sharding_report.copies_text(plan['copies'])]
  lines += [
    f'  would fit by the cost model: {way}' for way in plan.get('remedies', ())
  ]
  if plan.get('advice'):
    lines.append(f'  {plan["advice"]}')
  if plan['roofline'] is None:
    lines.append('the compiler ran out of memory: no FLOPs, no times')
  else:
    lines += _times(plan)
  return '\n'.join(lines)


def _times(plan: Mapping[str, Any]) -> list[str]:
  """Returns lines of FLOPs, kernels, collectives and seconds."""
  work, times = plan['flops'], plan['roofline']
  lines = [
    f'FLOPs per device: {work["products"]:.4g} in products,'
    f' {work["kernels"]:.4g} in kernels; {work["model"]:.4g} by the formula'
  ]
  for kernel in plan['kernels'] or ():
    lines.append(
      f'  {kernel["name"]}: {kernel["calls"]} calls, {kernel["flops"]:.3g}'
      f' FLOPs, {kernel["seconds"]:.3f} s'
    )
  for row in plan['collectives']:
    lines.append(
      f'  {row["kind"]:<19}{row["axes"]:<14}{row["count"]:>6} times'
      f' {disk.format_bytes(row["bytes"]):>11} {row["seconds"]:.4f} s,'
      f' {row["exposed"]:.4f} s exposed'
    )
  lines.append(
    f'step, estimated: {times["step_s"]:.4f} s = compute'
    f' {times["compute_s"]:.4f} + kernels {times["kernels_s"]:.4f} + exposed'
    f' collectives {times["exposed_s"]:.4f} (of {times["collectives_s"]:.4f})'
    f' + host {times["host_s"]:.4f}; memory alone {times["memory_s"]:.4f}'
  )
  lines.append(f'MFU, estimated: {plan["mfu"]:.1%}')
  if plan['compile_s'] is not None:
    lines.append(
      f'traced in {plan["trace_s"]:.1f} s, compiled in'
      f' {plan["compile_s"]:.1f} s'
    )
  return lines
