"""Cost analysis of a compiled program from its optimised HLO text.

XLA's `cost_analysis` counts a loop body once and omits kernels. This module
multiplies loop bodies by their trip count, derived from the condition and the
counter's increment. For a data-dependent trip count it takes the upper bound in
the loop's name, for a data-dependent conditional the largest branch. FLOPs of
matmuls follow from their shapes, inside fusions too. XLA:TPU reports
`estimated_cycles` per fusion; XLA:GPU reports none, so `timeline` simulates the
instruction schedule.

XLA:TPU splits a collective overlapped with matmuls into several fusions with
the same channel; these are counted once. A reduce-scatter is a fusion of an
all-reduce and a slice. The HLO of a multi-slice program covers a single slice;
data crosses slices with sends to the host and receives from it.

This module reads text: it must not import jax, jobs or chips.
"""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import math
import re

import numpy as np

# The dtypes are explicit: a token (as in the result of `send`) is printed like
# an array but has no bytes.
_ARRAY = re.compile(r'\b(pred|bf16|[suf]\d+\w*)\[([\d,]*)\]')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%([\w.\-]+) = (.*)$')
_COMPUTATION = re.compile(r'^(?:ENTRY )?%([\w.\-]+) \(')
_REDUCE_SCATTER = 'all-reduce-scatter'  # Computation of such a fusion.
_COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
)
# Pallas kernels: on TPUs; Mosaic and Triton on GPUs.
_KERNEL = re.compile(
  r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton)"'
)
SLICES = 'slices'
# A `send` to the host belongs to a cross-slice collective only with this
# attribute, the kind of the collective.
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: name without the percent sign.
    type: text of the result's type.
    opcode: name of the operation, such as 'fusion'.
    operands: names of the operands.
    attributes: text after the operands.
    is_root: whether it is the root of the computation.
  """

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  def attribute(self, name: str) -> str | None:
    """Returns the text of `name={...}`, `name=word` or `name=%computation`."""
    pattern = rf'\b{name}=(?:\{{([^}}]*)\}}|%?([^\s,]+))'
    match = re.search(pattern, self.attributes)
    return match and next(x for x in match.groups() if x is not None)


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective operation and its number of runs.

  Attributes:
    kind: 'all-gather', 'all-reduce', ...
    bytes: per-device bytes of the larger array in a single run: the result of
      an all-gather, else the operand (a single slice's part across slices).
    groups: text of the replica groups, or `SLICES`: one device per slice.
    times: number of runs.
    overlapped: whether the compiler overlaps it with other work.
    computation: name of the enclosing computation.
  """

  kind: str
  bytes: float
  groups: str
  times: float
  overlapped: bool
  computation: str


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A call of a Pallas kernel.

  Attributes:
    name: name of the kernel.
    operands: shapes of the operands.
    results: number of returned arrays.
    times: number of runs.
    computation: name of the enclosing computation.
  """

  name: str
  operands: tuple[tuple[int, ...], ...]
  results: int
  times: float
  computation: str


@dataclasses.dataclass(frozen=True)
class Step:
  """A scheduled instruction, outside of fusions.

  Attributes:
    op: the instruction.
    types: result types of its computation, by instruction name.
    computation: name of the enclosing computation.
    times: number of runs.
    flops: FLOPs of its matmuls over all runs.
    kernel: the kernel it calls, directly or in a fusion with slices of the
      operands; None for other instructions.
  """

  op: Instruction
  types: Mapping[str, str]
  computation: str
  times: float
  flops: float
  kernel: Kernel | None = None


class UnknownProgramError(ValueError):
  """The HLO text has an unsupported form."""


@dataclasses.dataclass
class Totals:
  """Per-device work of a single run of the program.

  Attributes:
    computations: instructions by computation.
    share: see `totals`.
    flops: FLOPs of matmuls (2 per multiply-add), without kernels.
    cycles: the compiler's cycle estimates by computation, without kernels and
      collectives; loop bodies are multiplied by their trip count.
    collectives: collectives without duplicates; the key of an unfused one is
      (computation, name).
    kernels: all kernel calls.
    schedule: the instructions in order; loop bodies appear once.
  """

  computations: Mapping[str, list[Instruction]]
  share: float
  flops: float = 0.0
  cycles: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  collectives: dict[tuple, Collective] = dataclasses.field(default_factory=dict)
  kernels: list[Kernel] = dataclasses.field(default_factory=list)
  schedule: list[Step] = dataclasses.field(default_factory=list)

  def add_computation(self, name: str, times: float) -> None:
    """Adds `times` runs of a computation."""
    types = {op.name: op.type for op in self.computations[name]}
    for op in self.computations[name]:
      self._add_instruction(name, op, types, times)

  def _add_instruction(self, computation, op, types, times) -> None:
    if op.opcode == 'while':
      # The condition only compares scalars: not counted.
      trips, depends_on_data = _trip_count(self.computations, op)
      if depends_on_data:
        trips = max(trips * self.share, math.sqrt(trips))
      self.add_computation(op.attribute('body'), times * trips)
      return
    if op.opcode == 'conditional':
      # Counts the largest branch: the choice depends on data.
      self.add_computation(max(_branches(op), key=self._work), times)
    if op.opcode == 'call':
      self.add_computation(op.attribute('to_apply'), times)
    flops, kernels = self.flops, len(self.kernels)
    if op.opcode in ('fusion', 'fusion-start', 'async-start'):
      self._add_fused(computation, op.attribute('calls'), times)
    if not self._add_kernel(
      computation, op, types, times
    ) and not self._add_collective(computation, op, types, times):
      # Cycles are summed by computation: a collective overlaps only with work
      # of its own computation (see `roofline.collectives`).
      estimate = re.search(r'"estimated_cycles":"(\d+)"', op.attributes)
      cycles = int(estimate[1]) if estimate else 0
      self.cycles[computation] += cycles * times
      self.flops += product_flops(op, types) * times
    work = self.flops - flops
    calls = self.kernels[kernels:]
    step = Step(op, types, computation, times, work, *calls)
    self.schedule.append(step)

  def _work(self, name: str) -> tuple[float, ...]:
    totals = Totals(self.computations, self.share)
    totals.add_computation(name, 1)
    kernels = sum(x.times for x in totals.kernels)
    sent = sum(x.bytes * x.times for x in totals.collectives.values())
    # Branches without matmuls differ only in the bytes they write.
    made = sum(sum(sizes(x.op.type)) * x.times for x in totals.schedule)
    return totals.flops, kernels, sent, totals.cycles.total(), made

  def _add_kernel(self, computation, op, types, times) -> bool:
    target = op.opcode == 'custom-call' and _KERNEL.search(op.attributes)
    if target:
      operands = tuple(arrays(types[o])[0][1] for o in op.operands)
      name, results = _kernel_name(op, target[1]), len(arrays(op.type))
      kernel = Kernel(name, operands, results, times, computation)
      self.kernels.append(kernel)
    return bool(target)

  def _add_fused(self, computation: str, name: str, times: int) -> None:
    """Adds the work inside fusion `name`; its cycles are added separately."""
    types = {op.name: op.type for op in self.computations[name]}
    is_scatter = name.startswith(_REDUCE_SCATTER)
    for op in self.computations[name]:
      if is_scatter and op.opcode == 'all-reduce':
        op = dataclasses.replace(op, opcode='reduce-scatter')
      # A reduce-scatter fusion holds a whole collective, not a piece.
      self._add_collective(computation, op, types, times, not is_scatter)
      self._add_kernel(computation, op, types, times)
      self.flops += product_flops(op, types) * times
      if op.opcode == 'fusion':
        self._add_fused(computation, op.attribute('calls'), times)
      elif op.opcode in ('while', 'conditional', 'call'):
        # The totals would silently miss their work.
        raise UnknownProgramError(f'{name} has a {op.opcode} in it')

  def _add_collective(
    self, computation, op, types, times, is_piece=False
  ) -> bool:
    """Adds a collective; returns whether the instruction is part of one."""
    is_start = op.opcode.endswith('-start')
    kind = op.opcode.removesuffix('-start')
    transfer = _TRANSFER.search(op.attributes) if kind == 'send' else None
    if transfer:
      kind = transfer[1].lower().replace('_', '-')
    if kind not in _COLLECTIVES:
      # `-done` waits for data already counted at `-start`.
      return op.opcode.removesuffix('-done') in _COLLECTIVES
    operands = sum(sum(sizes(types.get(name, ''))) for name in op.operands)
    if kind == 'all-gather' and not transfer:
      # A start returns its operands along with the gathered arrays.
      size = sum(sizes(op.type)) - (operands if is_start else 0)
    else:
      size = operands
    groups = SLICES if transfer else _groups(op.attributes)
    # Pieces of a collective share a computation and a channel, but so may
    # different collectives; kind, size and groups distinguish them.
    key = (computation, op.name)
    if is_piece:
      key = (computation, kind, size, groups, op.attribute('channel_id'))
    collective = self.collectives.get(key)
    self.collectives[key] = Collective(
      kind,
      size,
      groups,
      max(times, collective.times if collective else 0),
      bool(transfer) or is_piece or is_start,
      computation,
    )
    return True


def totals(text: str, share: float = 1.0) -> Totals:
  """Returns the totals of an HLO module.

  Args:
    text: HLO text (`compiled.as_text()`).
    share: fraction of a row's keys in the same example as a query. It scales
      the trip counts of loops over (block, tile) pairs
      (`ops.attention_tiles`), down to one iteration per block.

  Raises:
    UnknownProgramError: a trip count is not found, a fusion contains a loop,
      call or conditional, or there is no entry computation.
  """
  computations, entry = parse(text)
  result = Totals(computations, share)
  result.add_computation(entry, 1)
  return result


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Parses HLO text into computations by name, and the entry's name.

  Raises:
    UnknownProgramError: there is no entry computation.
  """
  computations: dict[str, list[Instruction]] = {}
  entry, current = None, None
  for line in text.splitlines():
    # Only instructions are indented; headers of computations end in a brace.
    if not line.startswith(' ') and line.endswith('{'):
      if header := _COMPUTATION.match(line):
        current = computations.setdefault(header[1], [])
        entry = header[1] if line.startswith('ENTRY') else entry
      continue
    match = _INSTRUCTION.match(line)
    if match and current is not None:
      current.append(_instruction(match[2], match[3], bool(match[1])))
  if entry is None:
    raise UnknownProgramError('the text has no entry computation')
  return computations, entry


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
  """Parses `TYPE opcode(operands), attributes`."""
  # Tuple types contain spaces, array types do not.
  end = _closing(text, 0) + 1 if text.startswith('(') else text.index(' ')
  kind, call = text[:end], text[end:].lstrip()
  start = call.index('(')
  stop = _closing(call, start)
  operands = tuple(re.findall(r'%([\w.\-]+)', call[start:stop]))
  opcode, attributes = call[:start], call[stop + 1 :]
  # The parentheses of a constant hold its value, needed for trip counts.
  if opcode == 'constant':
    operands = (call[start + 1 : stop],)
  return Instruction(name, kind, opcode, operands, attributes, is_root)


def _closing(text: str, start: int) -> int:
  depth = 0
  for index in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[index], 0)
    if depth == 0:
      return index
  raise UnknownProgramError(f'parentheses do not close in {text[:80]!r}')


def arrays(kind: str) -> list[tuple[str, tuple[int, ...]]]:
  """Returns the dtype and shape of every array in a type."""
  return [
    (dtype, tuple(int(n) for n in dims.split(',') if n))
    for dtype, dims in _ARRAY.findall(kind)
  ]


def sizes(kind: str) -> Iterator[float]:
  """Yields the bytes of every array in a type."""
  for dtype, shape in arrays(kind):
    # The first number in a dtype is its bits, also in f8e4m3fn. Sizes are
    # floats, since two s4 elements share a byte.
    bits = 8 if dtype == 'pred' else int(re.search(r'\d+', dtype)[0])
    yield bits / 8 * math.prod(shape)


def _kernel_name(op: Instruction, target: str) -> str:
  if target == 'tpu_custom_call':
    # XLA numbers the calls.
    return op.name.rstrip('0123456789').rstrip('.')
  # On GPUs the name is in the call's path: '.../NAME/pallas_call'.
  path = re.search(r'op_name="([^"]*)"', op.attributes)
  name = path[1].split('/')[-2] if path else op.name
  if name in ('anonymous', 'batched_body'):
    # tokamax leaves the gradient kernels (dq, dkv) unnamed on Hopper.
    name = 'attention_dq' if len(arrays(op.type)) == 1 else 'attention_dkv'
  return name


def _branches(op: Instruction) -> list[str]:
  # A conditional on a predicate names its two branches; others list them.
  branches = re.findall(
    r'%([\w.\-]+)', op.attribute('branch_computations') or ''
  ) or re.findall(r'(?:true|false)_computation=%([\w.\-]+)', op.attributes)
  if not branches:
    raise UnknownProgramError(f'{op.name} has no branches that are understood')
  return branches


def _groups(attributes: str) -> str:
  """Returns the text of the replica groups or source-target pairs.

  Raises:
    UnknownProgramError: the text has an unknown form.
  """
  # `Instruction.attribute` would stop at the first closing brace.
  stated = re.search(r'(?:replica_groups|source_target_pairs)=(.*)', attributes)
  if not stated:
    return ''
  match = re.match(
    r'mesh\[[^\]]*\](?:, device_ids=\(\[[\d,]+\]T\([\d,]+\)\))? \{[^}]*\}'
    r'|\{\{.*?\}\}|\{\}'
    r'|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?',
    stated[1],
  )
  if not match:
    raise UnknownProgramError(
      f'replica groups {stated[1][:80]!r} are not understood'
    )
  return match[0]


def _trip_count(
  computations: Mapping[str, list[Instruction]], loop: Instruction
) -> tuple[int, bool]:
  """Returns the trip count of a loop from zero to a constant.

  XLA emits scans in this form. It unrolls the loops of collective matmuls:
  their counter grows by the number of unrolled iterations.

  Returns:
    The count, and whether it is an upper bound for a data-dependent one.

  Raises:
    UnknownProgramError: the loop has another form.
  """
  # `at_most_N_turns` is a name scope of `ops.attention_tiles`.
  stated = re.search(
    r'"known_trip_count":\{"n":"(\d+)"\}|at_most_(\d+)_turns/while"',
    loop.attributes,
  )
  if stated:
    return int(stated[1] or stated[2]), not stated[1]
  condition = {op.name: op for op in computations[loop.attribute('condition')]}
  for test in condition.values():
    # The counter and its bound come in either order.
    if test.opcode == 'compare' and test.attribute('direction') in ('LT', 'GT'):
      operands = [condition[name] for name in test.operands]
      bounds = [n for n in map(_constant, operands) if n is not None]
      indices = [n for op in operands if (n := op.attribute('index'))]
      if len(bounds) == len(indices) == 1:
        body = {op.name: op for op in computations[loop.attribute('body')]}
        # Rounded up: the loop runs while the counter is below its bound.
        return -(-bounds[0] // _increment(body, int(indices[0]))), False
  raise UnknownProgramError(
    f'the trip count of loop {loop.name} is not a constant'
  )


def _constant(op: Instruction) -> int | None:
  if op.opcode == 'constant' and re.fullmatch(r'-?\d+', op.operands[0]):
    return int(op.operands[0])
  return None


def _increment(body: Mapping[str, Instruction], index: int) -> int:
  """Returns the increment of a loop counter in one run of the body.

  Args:
    body: instructions of the body by name.
    index: index of the counter in the loop's carry tuple.

  Raises:
    UnknownProgramError: the body does not add a positive constant.
  """

  def value(name: str) -> int:
    # An unrolled loop may increment its counter several times, with copies in
    # between, so the sum is traced back to the value at the body's start.
    op = body[name]
    if op.opcode == 'add':
      return sum(map(value, op.operands))
    if op.opcode == 'get-tuple-element' and op.attribute('index') == str(index):
      return 0
    if op.opcode in ('copy', 'bitcast'):
      return value(op.operands[0])
    constant = _constant(op)
    if constant is None:
      raise UnknownProgramError(f'{name} is not understood in a loop counter')
    return constant

  root = next(op for op in body.values() if op.is_root)
  if root.opcode != 'tuple' or (step := value(root.operands[index])) < 1:
    raise UnknownProgramError(f'{root.name} does not count a loop up')
  return step


def product_flops(op: Instruction, types: Mapping[str, str]) -> float:
  """Returns the FLOPs of a matmul: a dot, convolution or cuBLAS call.

  XLA rewrites dots to convolutions on TPUs, and to cuBLAS calls on GPUs.
  """
  is_call = op.opcode == 'custom-call' and '"__cublas$' in op.attributes
  if op.opcode not in ('dot', 'convolution') and not is_call:
    return 0.0
  out = arrays(op.type)[0][1]
  lhs, rhs = (arrays(types[name])[0][1] for name in op.operands[:2])
  if op.opcode != 'convolution':
    contracted = re.search(
      r'lhs_contracting_dim\w*(?:=\{|":\[)([^}\]]*)', op.attributes
    )
    dims = re.findall(r'\d+', contracted[1] if contracted else '')
    inner = math.prod(lhs[int(i)] for i in dims)
    return 2.0 * math.prod(out) * inner
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', op.attributes)
  lhs_dims, rhs_dims, out_dims = labels.groups()
  flops = 2.0 * out[out_dims.index('b')] * out[out_dims.index('f')]
  flops *= rhs[rhs_dims.index('i')]
  fields = re.findall(r'(\w+)=(\S+)', op.attribute('window') or '')
  values = zip(*(value.split('x') for _, value in fields), strict=True)
  for index, numbers in enumerate(values):
    window = dict(zip((name for name, _ in fields), numbers, strict=True))
    size = lhs[lhs_dims.index(str(index))]
    flops *= _valid_pairs(out[out_dims.index(str(index))], size, window)
  return flops


def _valid_pairs(out: int, size: int, window: Mapping[str, str]) -> int:
  """Counts (output, kernel position) pairs that read no padding.

  XLA turns batch dimensions of a matmul into spatial ones, mostly padding.
  """
  stride = int(window.get('stride', 1))
  dilation = int(window.get('rhs_dilate', 1))
  # `lhs_dilate` inserts zeros between elements, which need no work either.
  spacing = int(window.get('lhs_dilate', 1))
  padding = int(window.get('pad', '0_0').split('_')[0])
  taps = np.arange(int(window['size']))[:, None] * dilation
  positions = np.arange(out) * stride + taps - padding
  valid = (positions >= 0) & (positions <= (size - 1) * spacing)
  return int(np.sum(valid & (positions % spacing == 0)))
