"""Totals of a compiled TPU program, read from its optimised HLO text.

XLA's `cost_analysis` counts the body of a loop once and omits kernels. Here
every instruction counts as often as it runs: bodies of loops are multiplied by
their trip count, which follows from the condition and the counter's increment.
For a fusion the compiler states `estimated_cycles`; products inside it are
counted by their shapes.

A collective that overlaps with products is split into several fusions with the
same channel, and is counted once. A reduce-scatter is a fusion of an
all-reduce and a slice. A program for several slices is that of one slice; data
that crosses slices is sent to the host and received from it.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import re

_ARRAY = re.compile(r'\b(pred|bf16|[suf]\d+\w*)\[([\d,]*)\]')
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
    name: name without the percent sign.
    type: text of the result's type.
    opcode: name of the operation, such as 'fusion'.
    operands: names of the operands.
    attributes: text after the operands.
    is_root: whether it is the result of the computation.
  """

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  def attribute(self, name: str) -> str | None:
    """Returns the text of `name={...}` or `name=word`, without braces."""
    found = re.search(
      rf'\b{name}=(?:\{{([^}}]*)\}}|([^\s,]+))', self.attributes
    )
    return found and next(x for x in found.groups() if x is not None)

  def called(self, name: str) -> str | None:
    """Returns the computation that an attribute names."""
    value = self.attribute(name)
    return value and value.strip().lstrip('%')

  @property
  def cycles(self) -> int:
    """Cycles that the compiler estimates, or 0."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
    return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective.

  Attributes:
    kind: 'all-gather', 'all-reduce', ...
    bytes: bytes of the larger array on one device in one run: an all-gather's
      result, the operand of others (one slice's part if it crosses slices).
    groups: text of the replica groups, or `SLICES`: one device per slice.
    times: number of runs.
    overlapped: whether the compiler overlaps it with other work.
    computation: name of the computation that has it.
  """

  kind: str
  bytes: float
  groups: str
  times: int
  overlapped: bool
  computation: str


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One call of a Pallas kernel.

  Attributes:
    name: name of the kernel.
    operands: shapes of the operands.
    results: number of arrays that it returns.
    times: number of runs.
    computation: name of the computation that has it.
  """

  name: str
  operands: tuple[tuple[int, ...], ...]
  results: int
  times: int
  computation: str


@dataclasses.dataclass
class Totals:
  """Work of one device in one run of the program.

  Attributes:
    flops: FLOPs of products (2 per multiplication and addition), without
      kernels.
    cycles: the compiler's cycles of everything but kernels and collectives, by
      computation; loop bodies as often as they run.
    collectives: every collective once.
    kernels: every kernel call.
  """

  flops: float = 0.0
  cycles: dict[str, float] = dataclasses.field(default_factory=dict)
  collectives: dict[tuple, Collective] = dataclasses.field(default_factory=dict)
  kernels: list[Kernel] = dataclasses.field(default_factory=list)


class UnknownProgramError(ValueError):
  """The text has a form that this module does not understand."""


def totals(text: str) -> Totals:
  """Reads a module's text (`compiled.as_text()`).

  Raises:
    UnknownProgramError: a loop's trip count cannot be found, a fusion has a
      loop, call or condition, or there is no entry computation.
  """
  computations, entry = parse(text)
  result = Totals()
  _Walk(computations, result).computation(entry, 1)
  return result


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Returns computations by name, and the name of the entry.

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
  """Parses `TYPE opcode(operands), attributes`."""
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
  """Returns the index of the parenthesis that closes the one at `start`."""
  depth = 0
  for index in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[index], 0)
    if depth == 0:
      return index
  raise UnknownProgramError(f'parentheses do not close in {text[:80]!r}')


def arrays(kind: str) -> list[tuple[str, tuple[int, ...]]]:
  """Returns dtype and shape of every array of a type."""
  return [
    (dtype, tuple(int(n) for n in dims.split(',') if n))
    for dtype, dims in _ARRAY.findall(kind)
  ]


def _sizes(kind: str) -> Iterator[float]:
  """Yields the bytes of every array of a type."""
  for dtype, shape in arrays(kind):
    bits = 8 if dtype == 'pred' else int(re.search(r'\d+', dtype)[0])
    yield bits / 8 * math.prod(shape)


class _Walk:
  """Sums a module from its entry."""

  def __init__(
    self, computations: Mapping[str, list[Instruction]], result: Totals
  ):
    self.computations = computations
    self.result = result

  def computation(self, name: str, times: int) -> None:
    """Adds a computation that runs `times` times."""
    types = {i.name: i.type for i in self.computations[name]}
    for instruction in self.computations[name]:
      self._instruction(name, instruction, types, times)

  def _instruction(self, where, it, types, times) -> None:
    result = self.result
    if it.opcode == 'while':
      trips = _trip_count(self.computations, it)
      self.computation(it.called('body'), times * trips)
      return
    if it.opcode == 'conditional':
      for branch in _branches(it):  # All count: any may run.
        self.computation(branch, times)
    if it.opcode == 'call':
      self.computation(it.called('to_apply'), times)
    if it.opcode in ('fusion', 'async-start'):
      self._inside(where, it.called('calls'), times)
    if it.opcode == 'custom-call' and f'"{KERNEL}"' in it.attributes:
      operands = tuple(arrays(types[o])[0][1] for o in it.operands)
      name = it.name.rstrip('0123456789').rstrip('.')
      made = len(arrays(it.type))
      result.kernels.append(Kernel(name, operands, made, times, where))
    elif not self._collective(where, it, types, times, fused=False):
      cycles = result.cycles.get(where, 0.0) + it.cycles * times
      result.cycles[where] = cycles
      result.flops += product_flops(it, types) * times

  def _inside(self, where: str, name: str, times: int) -> None:
    """Adds products and collectives inside a fusion of `where`."""
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
    """Adds a collective; returns whether the instruction is one."""
    kind = it.opcode.removesuffix('-start')
    across = _ACROSS.search(it.attributes) if kind == 'send' else None
    if across:
      kind = across[1].lower().replace('_', '-')
    if kind not in _COLLECTIVES:
      return it.opcode.removesuffix('-done') in _COLLECTIVES
    size = sum(_sizes(it.type))
    if across or kind != 'all-gather':
      size = sum(sum(_sizes(types[o])) for o in it.operands if o in types)
    elif it.opcode.endswith('-start'):
      size = max(_sizes(it.type))
    groups = SLICES if across else _groups(it.attributes)
    channel = it.attribute('channel_id')
    # Parts of one collective are in one computation and share a channel, but
    # so may different collectives.
    key = (where, kind, size, groups, channel) if fused else (where, it.name)
    known = self.result.collectives.get(key)
    self.result.collectives[key] = Collective(
      kind,
      size,
      groups,
      max(times, known.times if known else 0),
      bool(across) or fused or it.opcode.endswith('-start'),
      where,
    )
    return True


def _branches(it: Instruction) -> list[str]:
  """Returns the computations of a conditional, in either form."""
  several = it.attribute('branch_computations')
  if several is not None:
    return re.findall(r'%([\w.\-]+)', several)
  found = [it.called(f'{word}_computation') for word in ('true', 'false')]
  if None in found:
    raise UnknownProgramError(f'{it.name} has no branches that are understood')
  return found


def _groups(attributes: str) -> str:
  """Returns the text of the replica groups, or of a permutation's pairs."""
  found = re.search(
    r'(?:replica_groups|source_target_pairs)='
    r'(mesh\[[^\]]*\] \{[^}]*\}|\{\{.*?\}\}'
    r'|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)',
    attributes,
  )
  return found[1] if found else ''


def _trip_count(
  computations: Mapping[str, list[Instruction]], loop: Instruction
) -> int:
  """Returns how often a loop runs that counts up from zero to a constant.

  XLA writes a scan like that. Loops of collective matmuls are unrolled: their
  counter is increased by the number of unrolled iterations.

  Raises:
    UnknownProgramError: it is another kind of loop.
  """
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
  if known:
    return int(known[1])
  test = {i.name: i for i in computations[loop.called('condition')]}
  for it in test.values():
    if it.opcode == 'compare' and it.attribute('direction') in ('LT', 'GT'):
      bounds = [_constant(test[o]) for o in it.operands]
      counters = [test[o].attribute('index') for o in it.operands]
      found = [n for n in bounds if n is not None]
      indices = [int(n) for n in counters if n is not None]
      if len(found) == len(indices) == 1:
        body = {i.name: i for i in computations[loop.called('body')]}
        return -(-found[0] // _increment(body, indices[0]))
  raise UnknownProgramError(
    f'the trip count of loop {loop.name} is not a constant'
  )


def _constant(it: Instruction) -> int | None:
  number = it.opcode == 'constant' and re.fullmatch(r'-?\d+', it.operands[0])
  return int(it.operands[0]) if number else None


def _increment(body: Mapping[str, Instruction], index: int) -> int:
  """Returns what a loop's body adds to an integer that it carries.

  Args:
    body: instructions of the body by name.
    index: place of the integer in the tuple that the loop carries.

  Raises:
    UnknownProgramError: it adds no positive constant.
  """

  def value(name: str) -> int:
    """The value of a scalar, if the counter's was 0."""
    it = body[name]
    if it.opcode == 'add':
      return sum(map(value, it.operands))
    if it.opcode == 'get-tuple-element' and it.attribute('index') == str(index):
      return 0
    if it.opcode in ('copy', 'bitcast'):
      return value(it.operands[0])
    constant = _constant(it)
    if constant is None:
      raise UnknownProgramError(f'{name} is not understood in a loop counter')
    return constant

  root = next(it for it in body.values() if it.is_root)
  if root.opcode != 'tuple' or (step := value(root.operands[index])) < 1:
    raise UnknownProgramError(f'{root.name} does not count a loop up')
  return step


def product_flops(it: Instruction, types: Mapping[str, str]) -> float:
  """Returns FLOPs of a dot, or of the convolution that XLA makes of it."""
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
  # The window has a field like size=8x2 with a value for each dimension.
  fields = re.findall(r'(\w+)=(\S+)', it.attribute('window') or '')
  values = zip(*(value.split('x') for _, value in fields), strict=True)
  for index, window in enumerate(values):
    window = dict(zip((name for name, _ in fields), window, strict=True))
    size = left[lhs.index(str(index))]
    total *= _valid_pairs(out[result.index(str(index))], size, window)
  return total


def _valid_pairs(out: int, size: int, window: Mapping[str, str]) -> int:
  """Returns pairs (output, kernel position) that read no padding.

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
