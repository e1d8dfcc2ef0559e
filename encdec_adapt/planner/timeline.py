"""Time of a compiled GPU program: a roofline over its schedule.

An operation takes the longer of its memory and matmul times; the caller times
the kernels. Collectives run in sequence on the links. An asynchronous
collective is exposed while its `-done` waits, a synchronous collective fully.
Launches take no time. This module must not import jobs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from encdec_adapt.planner import hlo, roofline

_NO_WORK = {
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast',
  'partition-id', 'replica-id', 'after-all',
}  # fmt: skip
# These read only as much of their first operand as they return.
_SLICES = {'slice', 'dynamic-slice', 'gather'}
_UPDATE = 'dynamic-update-slice'  # Writes its second operand into its first.


def simulate(
  totals: hlo.Totals,
  network: roofline.Network,
  kernel_seconds: Callable[[hlo.Kernel], float],
) -> tuple[float, list[roofline.Row]]:
  """Simulates a program's schedule.

  Args:
    totals: totals of the program.
    network: links of its devices.
    kernel_seconds: returns the seconds of all runs of a kernel.

  Returns:
    Seconds of work without kernels and collectives, and rows of collectives as
    in `roofline.collectives`.
  """
  # All runs of an instruction count at once: a loop is simulated as one pass
  # over its body.
  clock = work = link = 0.0
  entries, pending = [], {}
  for step in totals.schedule:
    op, place = step.op, step.computation
    collective = totals.collectives.get((place, op.name))
    if collective:
      axes, sent, seconds = network.cost(collective)
      end = link = max(clock, link) + seconds * step.times
      entry = [collective, axes, sent, seconds, 0.0]
      entries.append(entry)
      pending[place, op.name] = end, entry
    waits = op.opcode.endswith('-done')
    # A synchronous collective waits at once.
    key = place, op.operands[0] if waits else op.name
    if waits or (collective and not op.opcode.endswith('-start')):
      end, entry = pending.pop(key, (clock, None))
      if entry:
        entry[-1] = max(0.0, end - clock)
        clock += entry[-1]
    elif step.kernel:
      clock += kernel_seconds(step.kernel)
    elif not collective and op.opcode not in _NO_WORK:
      seconds = _seconds(step, totals.computations, network.hardware.chip)
      clock, work = clock + seconds, work + seconds
  return work, roofline.rows_of(entries)


def _seconds(step: hlo.Step, computations, chip) -> float:
  memory = step.times * moved_bytes(step.op, step.types, computations)
  memory /= chip.hbm_bandwidth * roofline.GPU_MEMORY
  return max(memory, step.flops / chip.flops / roofline.GPU_PRODUCTS)


def moved_bytes(
  op: hlo.Instruction,
  types: Mapping[str, str],
  computations: Mapping[str, Sequence[hlo.Instruction]],
) -> float:
  """Returns bytes read and written by an operation in a single run.

  Args:
    op: the operation, possibly a fusion.
    types: result types of its computation, by instruction name.
    computations: instructions of each computation.
  """
  if not op.opcode.startswith('fusion'):
    return sum(_read(op, name, types) for name in op.operands) + _written(
      op, types
    )
  body = {inner.name: inner for inner in computations[op.attribute('calls')]}
  types = {inner.name: inner.type for inner in body.values()}
  root = next(inner for inner in body.values() if inner.is_root)
  results = [root]
  if root.opcode == 'tuple':
    results = [body[name] for name in root.operands]
  written = 0.0
  for result in results:
    while result.opcode == 'bitcast':
      result = body[result.operands[0]]
    written += _written(result, types)
  parameters = [inner for inner in body.values() if inner.opcode == 'parameter']
  # An array read by several operations is loaded from memory once.
  return written + sum(
    min(
      sum(hlo.sizes(parameter.type)),
      sum(_reads(parameter.name, body.values(), types)),
    )
    for parameter in parameters
  )


def _reads(name: str, body, types: Mapping[str, str]) -> Iterator[float]:
  """Yields the bytes of an array read by each of its users in a fusion."""
  for inner in body:
    if name in inner.operands:
      if inner.opcode == 'bitcast':
        yield from _reads(inner.name, body, types)
      else:
        yield _read(inner, name, types)


def _read(op: hlo.Instruction, name: str, types: Mapping[str, str]) -> float:
  if name == op.operands[0] and op.opcode == _UPDATE:
    return 0.0
  whole = name != op.operands[0] or op.opcode not in _SLICES
  return sum(hlo.sizes(types[name] if whole else op.type))


def _written(op: hlo.Instruction, types: Mapping[str, str]) -> float:
  return sum(
    hlo.sizes(types[op.operands[1]] if op.opcode == _UPDATE else op.type)
  )
