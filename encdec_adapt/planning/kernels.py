"""FLOPs of splash attention kernels, which XLA does not count.

A kernel visits the blocks in which its mask lets anybody see anything; those
are whole work, masked out or not. Which blocks, follows from the model; how
often a kernel runs, from the compiled program.
"""

from collections.abc import Iterable
import dataclasses
import math

from encdec_adapt.models import config as model_config
from encdec_adapt.ops import attention_splash, masks
from encdec_adapt.planning import hlo

# Products [block, H] x [H, block] of a block: scores and values; scores,
# their gradient, queries; those, keys and values. A fused backward pass has
# only the last, which then has the queries' too.
_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}
_FUSED_PRODUCTS = 5


@dataclasses.dataclass(frozen=True)
class Attention:
  """One attention of a model, as a kernel sees it.

  Attributes:
    queries, keys: lengths on one device and in all, padded to whole blocks.
    left, right: keys that a query sees before and after itself; None for
      all of them.
  """

  queries: int
  keys: int
  left: int | None
  right: int | None

  @property
  def blocks(self) -> tuple[int, int]:
    """Blocks that are visited, and the most of them in one row of blocks."""
    sizes = (
      attention_splash.block(self.queries),
      attention_splash.block(self.keys),
    )
    rows = []
    for i in range(-(-self.queries // sizes[0])):
      count = 0
      for j in range(-(-self.keys // sizes[1])):
        # Distances query - key that occur in the block.
        most = (i + 1) * sizes[0] - 1 - j * sizes[1]
        least = i * sizes[0] - ((j + 1) * sizes[1] - 1)
        count += (self.left is None or least <= self.left) and (
          self.right is None or most >= -self.right
        )
      rows.append(count)
    return sum(rows), max(rows)

  def pairs(self) -> int:
    """Pairs (query, key) of all visited blocks."""
    sizes = (
      attention_splash.block(self.queries),
      attention_splash.block(self.keys),
    )
    return self.blocks[0] * sizes[0] * sizes[1]


def attentions(
  model: model_config.ModelConfig, encoder: int, decoder: int, teacher: int
) -> list[Attention]:
  """Every kind of attention of a model and of its teacher.

  Args:
    model: the model.
    encoder: S.
    decoder: T.
    teacher: length of the teacher's row, or 0.
  """
  found = []
  for name, stack in model.stacks.items():
    lengths = [encoder if name == 'encoder' else decoder]
    if teacher and name == 'decoder':
      lengths.append(teacher)
    for length in lengths:
      found += [_self(stack, kind, length) for kind in set(stack.pattern)]
  if 'encoder' in model.stacks:
    found.append(Attention(decoder, encoder, None, None))
  return found


def _self(stack: model_config.StackConfig, kind: str, length: int) -> Attention:
  window = stack.window if kind == 'local' else None
  if stack.role == 'causal':
    return Attention(length, length, window and window - 1, 0)
  sides = masks.sides(window, stack.window_rule)
  return Attention(length, length, *sides)


def flops(calls: Iterable[hlo.Kernel], known: Iterable[Attention]) -> float:
  """FLOPs of all kernel calls on one device.

  A call is matched to an attention by its lengths and by how many blocks of
  keys its grid visits.

  Raises:
    UnknownProgramError: a kernel is no splash attention, or is none that the
      model has.
  """
  total = 0.0
  known = list(known)
  for call in calls:
    parts = [part for part in _PRODUCTS if f'_{part}_' in f'{call.name}_']
    if not parts or 'splash' not in call.name:
      raise hlo.UnknownProgramError(f'kernel {call.name!r} is not known')
    states = [shape for shape in call.operands if len(shape) >= 3]
    grid = states[0]
    query, key = [s for s in states[1:] if s[-1] > 1 and s != grid][:2]
    heads, queries, head_dim = query[-3:]
    matching = [
      a
      for a in known
      if (_padded(a.queries), _padded(a.keys)) == (queries, key[-2])
    ]
    exact = [a for a in matching if a.blocks[1] == grid[-1]]
    chosen = exact or matching
    if not chosen:
      raise hlo.UnknownProgramError(
        f'kernel {call.name!r} reads {queries} queries and {key[-2]} keys,'
        ' as no attention of the model does'
      )
    pairs = sum(a.pairs() for a in chosen) / len(chosen)
    rows = math.prod(query[:-3])
    products = _PRODUCTS[parts[0]]
    # A fused pass takes several blocks of keys at a time.
    blocks = key[-2] // attention_splash.block(key[-2])
    if parts[0] == 'dkv' and grid[-2] < blocks:
      products = _FUSED_PRODUCTS
    work = products * 2 * heads * head_dim * pairs
    total += rows * work * call.times
  return total


def _padded(length: int) -> int:
  block = attention_splash.block(length)
  return -(-length // block) * block
