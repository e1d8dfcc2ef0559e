"""Plans of compiled programs as JSON, and text of any plan.

This module must not import `plan_search` or `analytic_estimate`. Plans of the
latter have the same keys, so `text` formats either.
"""

from collections.abc import Mapping
import os
import pathlib
import re
import tempfile
import time
from typing import Any

import jax

from encdec_adapt.files import disk
from encdec_adapt.planner import (
  chips,
  hlo,
  kernels,
  program_shapes,
  programs,
  reward_models,
  roofline,
  timeline,
)
from encdec_adapt.sharding import compiler, layout_report
from encdec_adapt.training import remat_choice


def describe(
  job: programs.Job, hardware: chips.Slice, program: program_shapes.Program
) -> dict[str, Any]:
  """Compiles a program and returns its per-device costs.

  Args:
    job: the job, on a mesh of these chips.
    hardware: target chips.
    program: the program of the job.

  Returns:
    JSON with `source`, `fits`, `memory`, the entries of `roofline.describe`,
    `resources` of GPU kernels, `trace_s` and `compile_s`. If the compiler ran
    out of device memory, `fits` is false, the peak comes from its message, and
    numbers of a compiled program are None.

  Raises:
    JaxRuntimeError: the compiler fails for another reason.
    UnknownProgramError: the compiled program has an unsupported form.
  """
  began = time.perf_counter()
  lowered = program.lower(job.mesh)
  traced = time.perf_counter()
  try:
    compiled, resources = _compile(lowered, job.mesh)
  except jax.errors.JaxRuntimeError as error:
    peak = compiler.needed_bytes(str(error))
    if peak is None:
      raise
    memory = {
      'budget': hardware.chip.hbm_bytes,
      'peak': peak,
      'arguments': program_shapes.tree_bytes(program.arguments),
      'beside': program_shapes.tree_bytes(program.beside),
    }
    # It does not fit, whatever the budget: there is no program to run.
    unknown = ('flops', 'collectives', 'kernels', 'roofline', 'mfu')
    estimates = {'fits': False, 'memory': memory, **dict.fromkeys(unknown)}
  else:
    totals = hlo.totals(compiled.as_text(), 1 / job.examples)
    memory = _memory(compiled, program, hardware.chip.hbm_bytes)
    estimates = {
      'fits': memory['peak'] <= memory['budget'],
      'memory': memory,
      **work(totals, job, hardware, program),
    }
    if hardware.chip.kind == 'gpu':
      estimates['resources'] = resources
  return {
    'source': 'compiled',
    **estimates,
    'trace_s': traced - began,
    'compile_s': time.perf_counter() - traced,
  }


def _compile(
  lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh
) -> tuple[jax.stages.Compiled, list[dict[str, Any]]]:
  variable = 'MOSAIC_GPU_DUMP_TO'
  with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
    # Makes Mosaic write the `ptxas` output of each kernel.
    os.environ[variable] = folder
    try:
      compiled = lowered.compile()
    finally:
      del os.environ[variable]
    paths = sorted(pathlib.Path(folder).glob('*.ptxas'))
    return compiled, [_resources(path.stem, path.read_text()) for path in paths]


def _resources(name: str, text: str) -> dict[str, Any]:
  counts = [
    int(re.search(pattern, text)[1])
    for pattern in (r'Used (\d+) registers', r'(\d+) bytes spill stores')
  ]
  return {'name': name, 'registers': counts[0], 'spilled': counts[1]}


def _memory(
  compiled: jax.stages.Compiled, program: program_shapes.Program, budget: float
) -> dict[str, Any]:
  analysis = compiled.memory_analysis()
  # Results in donated memory are counted as arguments.
  results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  code = analysis.generated_code_size_in_bytes
  temporary = float(analysis.temp_size_in_bytes)
  parts = program_shapes.tree_bytes(program.temporaries)
  # The compiler reports a single number. It may be below the gradients' size,
  # since XLA need not hold all of them at once.
  parts['activations'] = max(0.0, temporary - sum(parts.values()))
  beside = program_shapes.tree_bytes(program.beside)
  return {
    'budget': budget,
    'peak': compiler.device_bytes(compiled) + sum(beside.values()),
    'arguments': program_shapes.tree_bytes(program.arguments),
    'beside': beside,
    'temporary': temporary,
    'parts': parts,
    'results': float(results),
    'repeats': remat_choice.repeats_work(compiled.as_text()),
    'code': float(code),
  }


def work(
  totals: hlo.Totals,
  job: programs.Job,
  hardware: chips.Slice,
  program: program_shapes.Program,
) -> dict[str, Any]:
  """Returns the `roofline.describe` entries of a compiled program's plan."""
  rows, compute, traffic = _timed(totals, job, hardware)
  return roofline.describe(
    job,
    hardware,
    products=totals.flops,
    kernels=rows,
    traffic=traffic,
    compute=compute,
    moved=program.moved_bytes(),
    host=program.host_bytes(),
  )


def _timed(
  totals: hlo.Totals, job: programs.Job, hardware: chips.Slice
) -> tuple[list[roofline.Row], float, list[roofline.Row]]:
  shards = job.settings.rules.on(job.mesh).size('length')
  attentions = kernels.attentions(job.models, job.lengths, shards)

  def row(call: hlo.Kernel) -> roofline.Row:
    flops = kernels.flops([call], attentions)
    if hardware.chip.kind == 'gpu':
      flops /= job.examples
    head_dim = kernels.head_dim(call)
    return roofline.kernel_row(call.name, call.times, flops, hardware, head_dim)

  rows: dict[str, roofline.Row] = {}
  for part in map(row, totals.kernels):
    summed = rows.setdefault(part['name'], {'name': part['name']})
    for key in ('calls', 'flops', 'seconds'):
      summed[key] = summed.get(key, 0) + part[key]
  by_name = [rows[name] for name in sorted(rows)]
  if hardware.chip.kind == 'gpu':
    network = roofline.Network(job.mesh, hardware)
    return by_name, *timeline.simulate(
      totals, network, lambda call: row(call)['seconds']
    )
  compute = sum(roofline.compute_seconds(totals, hardware).values())
  seconds = sum(row['seconds'] for row in by_name)
  traffic = roofline.collectives(totals, job.mesh, hardware, seconds)
  return by_name, compute, traffic


def text(plan: Mapping[str, Any]) -> str:
  """Formats the plan of a program as text."""
  memory = plan['memory']
  verdict = 'fits' if plan['fits'] else 'DOES NOT FIT'
  lines = [
    f'memory per device: {disk.format_bytes(memory["peak"])} of'
    f' {disk.format_bytes(memory["budget"])}: {verdict}'
  ]
  for policy, values in plan.get('policies', {}).items():
    seconds = values['seconds']
    lines.append(
      f'  compute.remat={policy}: {disk.format_bytes(values["bytes"])},'
      f' {"no time" if seconds is None else f"{seconds:.4f} s"}'
    )
  if plan['source'] == 'shapes':
    lines.append(
      'from the analytic cost model; nothing was compiled, as that needs a'
      " GPU's compiler: pip install -e '.[cuda13,gpu]' (Python from 3.12)"
    )
  parts = {
    **memory['arguments'],
    **{f'{k} (beside)': v for k, v in memory['beside'].items()},
    # Absent if the compiler ran out of memory; partial in analytic plans.
    **{k: memory[k] for k in ('temporary', 'results', 'code') if k in memory},
    **{f'  {name}': size for name, size in memory.get('parts', {}).items()},
  }
  lines += [f'  {k:<18}{disk.format_bytes(v):>12}' for k, v in parts.items()]
  replicated = layout_report.replicated_text(plan['replicated'])
  lines += [f'  {line}' for line in replicated]
  missing = plan['missing_rewards']
  lines += [f'  {line}' for line in reward_models.missing_text(missing)]
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
  if 'resources' in plan:
    lines.append(
      'products are not autotuned without a card: their time is an estimate'
    )
  for kernel in plan.get('resources', ()):
    lines.append(
      f'  {kernel["name"]}: {kernel["registers"]} registers,'
      f' {kernel["spilled"]} bytes spilled'
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
