"""Totals of a compiled TPU program, read from its optimised HLO text.

XLA's own `cost_analysis` counts the body of a loop once and kernels not at
all. Here every instruction counts as often as it runs: bodies of loops times
their trip count, which stands in the condition. Of a fusion the compiler
states `estimated_cycles`; products inside it are counted by their shapes.

A collective that overlaps with products is cut into several fusions that
share its channel: it is counted once. A reduce-scatter is written
as a fusion of an all-reduce and a slice. A program of several slices is that
of one of them; what crosses slices is sent to the host and received from it.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import re

_BYTES = {
  'pred': 1,
  's4': 0.5,
  'u4': 0.5,
  's8': 1,
  'u8': 1,
  'f8e4m3fn': 1,
  'f8e5m2': 1,
  's16': 2,
  'u16': 2,
  'f16': 2,
  'bf16': 2,
  's32': 4,
  'u32': 4,
  'f32': 4,
  's64': 8,
  'u64': 8,
  'f64': 8,
}
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\]')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%([\w.\-]+) = (.*)$')
_COMPUTATION = re.compile(r'^(?:ENTRY )?%([\w.\-]+) \(')
_REDUCE_SCATTER = 'all-reduce-scatter'  # Such a fusion's computation.
_COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
)
KERNEL = 'tpu_custom_call'
SLICES = 'slices'
_ACROSS = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: without the percent sign.
    type: text of the result's type.
    opcode: such as 'fusion'.
    operands: names of the operands.
    attributes: text after the operands.
    is_root: whether it is the computation's result.
  """

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  def attribute(self, name: str) -> str | None:
    """Text of `name={...}` or `name=word`, without braces."""
    found = re.search(
      rf'\b{name}=(?:\{{([^}}]*)\}}|([^\s,]+))', self.attributes
    )
    return found and next(x for x in found.groups() if x is not None)

  def called(self, name: str) -> str | None:
    """The computation that an attribute names."""
    value = self.attribute(name)
    return value and value.strip().lstrip('%')

  @property
  def op_name(self) -> str:
    """Where in the source program it comes from."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
    return found[1] if found else ''

  @property
  def cycles(self) -> int:
    """What the compiler expects it to take; 0 where it says nothing."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
    return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective, as often as it runs.

  Attributes:
    kind: 'all-gather', 'all-reduce', ...
    bytes: of the array that is whole: an all-gather's result, the operand of
      the others (one slice's part of what crosses slices); on one device, in
      one run.
    groups: text of its replica groups, or `SLICES`: one device of each slice.
    times: how often it runs.
    overlapped: whether the compiler runs it beside other work.
    computation: where it stands.
    op_name: where it comes from.
  """

  kind: str
  bytes: float
  groups: str
  times: int
  overlapped: bool
  computation: str
  op_name: str


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One Pallas kernel call, as often as it runs.

  Attributes:
    name: of the kernel.
    op_name: where in the source program it is called.
    operands: shapes of its operands.
    results: how many arrays it makes.
    times: how often it runs.
    computation: where it stands.
  """

  name: str
  op_name: str
  operands: tuple[tuple[int, ...], ...]
  results: int
  times: int
  computation: str


@dataclasses.dataclass
class Totals:
  """What one device does in one run of the program.

  Attributes:
    flops: of products (2 per multiplication and addition), kernels apart.
    cycles: of everything but kernels and collectives, as estimated by the
      compiler, by computation; loop bodies as often as they run.
    collectives: each of them once.
    kernels: every call.
    instructions: number of instructions in the text, as a measure of size.
  """

  flops: float = 0.0
  cycles: dict[str, float] = dataclasses.field(default_factory=dict)
  collectives: dict[tuple, Collective] = dataclasses.field(default_factory=dict)
  kernels: list[Kernel] = dataclasses.field(default_factory=list)
  instructions: int = 0


class UnknownProgramError(ValueError):
  """The text has a form that this module does not understand."""


def totals(text: str) -> Totals:
  """Reads a module's text (`compiled.as_text()`).

  Raises:
    UnknownProgramError: a loop's trip count cannot be found, something runs
      where nothing is looked for, or there is no entry computation.
  """
  computations, entry = parse(text)
  result = Totals(instructions=sum(map(len, computations.values())))
  _Walk(computations, result).computation(entry, 1)
  return result


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Computations by name, and the name of the entry.

  Raises:
    UnknownProgramError: there is no entry computation.
  """
  computations: dict[str, list[Instruction]] = {}
  entry, current = None, None
  for line in text.splitlines():
    if not line.startswith(' ') and line.endswith('{'):
      found = _COMPUTATION.match(line)
      if found:
        current = computations.setdefault(found[1], [])
        entry = found[1] if line.startswith('ENTRY') else entry
      continue
    found = _INSTRUCTION.match(line)
    if found and current is not None:
      current.append(_instruction(found[2], found[3], bool(found[1])))
  if entry is None:
    raise UnknownProgramError('the text has no entry computation')
  return computations, entry


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
  """Takes `TYPE opcode(operands), attributes` apart."""
  end = _closing(rest, 0) + 1 if rest.startswith('(') else rest.index(' ')
  kind, rest = rest[:end], rest[end:].lstrip()
  start = rest.index('(')
  stop = _closing(rest, start)
  operands = tuple(re.findall(r'%([\w.\-]+)', rest[start:stop]))
  if rest[:start] == 'constant':
    operands = (rest[start + 1 : stop],)
  return Instruction(
    name, kind, rest[:start], operands, rest[stop + 1 :], is_root
  )


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for index in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[index], 0)
    if depth == 0:
      return index
  raise UnknownProgramError(f'parentheses do not close in {text[:80]!r}')


def arrays(kind: str) -> list[tuple[str, tuple[int, ...]]]:
  """Dtype and shape of every array of a type; tokens and such have none."""
  return [
    (dtype, tuple(int(n) for n in dims.split(',') if n))
    for dtype, dims in _ARRAY.findall(kind)
    if dtype in _BYTES
  ]


def nbytes(kind: str) -> float:
  """Bytes of all arrays of a type."""
  return sum(_BYTES[dtype] * math.prod(s) for dtype, s in arrays(kind))


class _Walk:
  """Adds up a module from its entry."""

  def __init__(
    self, computations: Mapping[str, list[Instruction]], result: Totals
  ):
    self.computations = computations
    self.result = result

  def computation(self, name: str, times: int) -> None:
    """Counts a computation that runs `times` times."""
    types = {i.name: i.type for i in self.computations[name]}
    for instruction in self.computations[name]:
      self._instruction(name, instruction, types, times)

  def _instruction(self, where, it, types, times) -> None:
    result = self.result
    if it.opcode == 'while':
      body, condition = it.called('body'), it.called('condition')
      trips = trip_count(self.computations, it, condition, where)
      self.computation(body, times * trips)
      return
    if it.opcode == 'conditional':
      for branch in _branches(it):  # Which one runs, nobody knows: all count.
        self.computation(branch, times)
    if it.opcode == 'call':
      self.computation(it.called('to_apply'), times)
    if it.opcode in ('fusion', 'async-start'):
      self._inside(where, it.called('calls'), times)
    if it.opcode == 'custom-call' and f'"{KERNEL}"' in it.attributes:
      operands = tuple(arrays(types[o])[0][1] for o in it.operands)
      name = it.name.rstrip('0123456789').rstrip('.')
      made = len(arrays(it.type))
      result.kernels.append(
        Kernel(name, it.op_name, operands, made, times, where)
      )
    elif not self._collective(where, it, types, times, fused=False):
      cycles = result.cycles.get(where, 0.0) + it.cycles * times
      result.cycles[where] = cycles
      result.flops += product_flops(it, types) * times

  def _inside(self, where: str, name: str, times: int) -> None:
    """Products and collectives in what a fusion of `where` calls."""
    types = {i.name: i.type for i in self.computations[name]}
    scattered = name.startswith(_REDUCE_SCATTER)
    for it in self.computations[name]:
      if scattered and it.opcode == 'all-reduce':
        it = dataclasses.replace(it, opcode='reduce-scatter')
      self._collective(where, it, types, times, fused=not scattered)
      self.result.flops += product_flops(it, types) * times
      if it.opcode == 'fusion':
        self._inside(where, it.called('calls'), times)
      elif it.opcode in ('while', 'conditional', 'call'):
        raise UnknownProgramError(f'{name} has a {it.opcode} in it')

  def _collective(self, where, it, types, times, *, fused) -> bool:
    """Records a collective; whether it is one."""
    kind = it.opcode.removesuffix('-start')
    across = _ACROSS.search(it.attributes) if kind == 'send' else None
    if across:
      kind = across[1].lower().replace('_', '-')
    if kind not in _COLLECTIVES:
      return it.opcode.removesuffix('-done') in _COLLECTIVES
    size = nbytes(it.type)
    if across or kind != 'all-gather':
      size = sum(nbytes(types[o]) for o in it.operands if o in types)
    elif it.opcode.endswith('-start'):
      size = max(_BYTES[d] * math.prod(s) for d, s in arrays(it.type))
    groups = SLICES if across else _groups(it.attributes)
    channel = it.attribute('channel_id')
    # Parts of one that is cut up stand in one computation and share its
    # channel, as unlike ones may.
    key = (where, kind, size, groups, channel) if fused else (where, it.name)
    known = self.result.collectives.get(key)
    self.result.collectives[key] = Collective(
      kind,
      size,
      groups,
      max(times, known.times if known else 0),
      bool(across) or fused or it.opcode.endswith('-start'),
      where,
      it.op_name,
    )
    return True


def _branches(it: Instruction) -> list[str]:
  """Computations of a conditional; of a predicate's, XLA names the two."""
  several = it.attribute('branch_computations')
  if several is not None:
    return re.findall(r'%([\w.\-]+)', several)
  found = [it.called(f'{word}_computation') for word in ('true', 'false')]
  if None in found:
    raise UnknownProgramError(f'{it.name} has no branches that are understood')
  return found


def _groups(attributes: str) -> str:
  """Text of the replica groups or, for a permutation, of its pairs."""
  found = re.search(
    r'(?:replica_groups|source_target_pairs)='
    r'(mesh\[[^\]]*\] \{[^}]*\}|\{\{.*?\}\}'
    r'|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)',
    attributes,
  )
  return found[1] if found else ''


def trip_count(
  computations: Mapping[str, list[Instruction]],
  loop: Instruction,
  condition: str,
  where: str,
) -> int:
  """How often a loop runs that counts up by one, from zero to a constant.

  That is what XLA makes of a scan; a start elsewhere is not looked for.

  Raises:
    UnknownProgramError: it is another kind of loop.
  """
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
  if known:
    return int(known[1])
  constants = {
    i.name: int(i.operands[0])
    for i in computations[condition]
    if i.opcode == 'constant' and re.fullmatch(r'-?\d+', i.operands[0])
  }
  for it in computations[condition]:
    if it.opcode == 'compare':
      bounds = [constants[o] for o in it.operands if o in constants]
      if len(bounds) == 1 and it.attribute('direction') in ('LT', 'GT'):
        return bounds[0]
  raise UnknownProgramError(
    f'the trip count of loop {loop.name} in {where} is not a constant'
  )


def product_flops(it: Instruction, types: Mapping[str, str]) -> float:
  """FLOPs of one product: a dot, or the convolution that XLA makes of it."""
  if it.opcode not in ('dot', 'convolution'):
    return 0.0
  out = arrays(it.type)[0][1]
  left, right = (arrays(types[o])[0][1] for o in it.operands[:2])
  if it.opcode == 'dot':
    contracted = it.attribute('lhs_contracting_dims') or ''
    inner = math.prod(left[int(i)] for i in contracted.split(',') if i)
    return 2.0 * math.prod(out) * inner
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', it.attributes)
  lhs, rhs, result = labels.groups()
  total = 2.0 * out[result.index('b')] * out[result.index('f')]
  total *= right[rhs.index('i')]
  for index, window in enumerate(_windows(it)):
    size = left[lhs.index(str(index))]
    total *= _valid_pairs(out[result.index(str(index))], size, window)
  return total


def _windows(it: Instruction) -> Iterator[dict[str, str]]:
  """Fields of every spatial dimension of a convolution's window."""
  text = it.attribute('window')
  if not text:
    return
  fields = dict(part.split('=') for part in text.split())
  columns = {k: v.split('x') for k, v in fields.items()}
  for index in range(len(columns['size'])):
    yield {name: values[index] for name, values in columns.items()}


def _valid_pairs(out: int, size: int, window: Mapping[str, str]) -> int:
  """Pairs (output, kernel position) that read an element, not padding.

  XLA writes batch dimensions of a product as spatial ones, mostly padding.
  """
  stride = int(window.get('stride', 1))
  dilation = int(window.get('rhs_dilate', 1))
  holes = int(window.get('lhs_dilate', 1))
  low = int(window.get('pad', '0_0').split('_')[0])
  last = (size - 1) * holes
  count = 0
  for tap in range(int(window['size'])):
    for position in range(out):
      at = position * stride + tap * dilation - low
      count += 0 <= at <= last and at % holes == 0
  return count
