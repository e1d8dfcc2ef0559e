"""The source `functions`: beginnings of functions, and how they go on.

    config.data.source = 'functions:configs/decoders/held_out.txt'
    config.data.seqio_modules = ('encdec_adapt.configs.functions',)

A function of Python's library is cut before a statement, of its body or inside
of one; the answer is the rest, of at least two lines and at most 120
characters. The functions of modules that FILE lists are held out, which the
shipped decoders have not seen.

`valid` and `one_line` are rewards of such continuations for
`config.train.rewards`: the first is hard to please, the second is not.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import ast
import builtins
from collections.abc import Iterator
import functools
import json
import textwrap
import warnings

from encdec_adapt.data.sources import document_source, python_source
from encdec_adapt.objectives import randomness

_PROMPT, _ANSWER = range(30, 151), range(10, 121)  # Characters of each.
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@document_source.register('functions')
class FunctionSource(python_source.PythonSource):
  """`functions[:FILE]`: the beginning of a function, and its rest."""

  form = 'functions[:FILE]'
  document_kind = 'pairs'

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields every n-th pair; all shards read the standard library."""
    # A function that modules share counts once, so that none is in both splits.
    pairs: dict[tuple[str, str], str] = {}
    for module, source in zip(self._modules, self.modules(), strict=True):
      for pair in _pairs(source):
        pairs.setdefault(pair, module)
    entries = [
      (f'{module}::{i}', functools.partial(json.dumps, pair))
      for i, (pair, module) in enumerate(pairs.items())
    ]
    # Modules are mixed, so that the first examples are a fair sample.
    entries.sort(key=lambda entry: randomness.digest('order', entry[0]))
    return self._every(entries, shard_index, num_shards)


def _pairs(source: str) -> Iterator[tuple[str, str]]:
  for node in ast.walk(parse(source)):
    if not isinstance(node, FUNCTIONS):
      continue
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    text = textwrap.dedent('\n'.join(lines))
    lines = text.splitlines()
    starts = {x.lineno for x in ast.walk(node) if isinstance(x, ast.stmt)}
    for cut in sorted(start - node.lineno for start in starts):
      prompt, answer = ('\n'.join(x) for x in (lines[:cut], lines[cut:]))
      if len(prompt) in _PROMPT and len(answer) in _ANSWER and '\n' in answer:
        yield prompt, f'\n{answer}'


def valid(prompts, completions, fields) -> list[float]:
  """Returns 1 for each function that is complete and makes sense, else 0.

  The function parses. The continuation has at least two lines, no comment, no
  line twice and a statement, reads a name, and none that is undefined.
  """
  del fields
  pairs = zip(prompts, completions, strict=True)
  return [float(is_valid(*pair)) for pair in pairs]


def one_line(prompts, completions, fields) -> list[float]:
  """Returns 1 for each function that parses with one more line, else 0."""
  del fields
  return [
    float(
      _parse_function(prompt + completion) is not None
      and len(completion.strip().splitlines()) == 1
    )
    for prompt, completion in zip(prompts, completions, strict=True)
  ]


def is_valid(prompt: str, completion: str) -> bool:
  """Returns whether a continuation makes sense; see `valid`."""
  lines = [line.strip() for line in completion.splitlines()[1:]]
  if len(lines) < 2 or completion[0] != '\n' or '#' in completion:
    return False
  if not all(lines) or len({*lines}) < len(lines):
    return False
  function = _parse_function(prompt + completion)
  if function is None:
    return False
  start = prompt.count('\n') + 1
  nodes = [
    node for node in ast.walk(function) if getattr(node, 'lineno', 0) > start
  ]
  reads = {
    node.id
    for node in nodes
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
  }
  return (
    any(isinstance(node, ast.stmt) for node in nodes)
    and bool(reads)
    and reads <= _known(function, start)
  )


def _known(function: ast.AST, start: int) -> set[str]:
  names = {*dir(builtins), function.name}
  for node in ast.walk(function):
    if isinstance(node, ast.arg):
      names.add(node.arg)
    elif isinstance(node, ast.Name):
      if not isinstance(node.ctx, ast.Load) or node.lineno <= start:
        names.add(node.id)
    elif isinstance(node, ast.alias):
      names.add((node.asname or node.name).split('.')[0])
    elif isinstance(node, ast.ExceptHandler) and node.name:
      names.add(node.name)
    elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
      names.add(node.name)
  return names


def _parse_function(text: str) -> ast.AST | None:
  """Returns the only function of a text; None for any other text."""
  body = parse(text).body
  if len(body) != 1 or not isinstance(body[0], FUNCTIONS):
    return None
  return body[0]


def parse(text: str) -> ast.Module:
  """Parses a text; returns an empty module if it is not Python."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # About invalid escapes in strings.
      return ast.parse(text)
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return ast.Module([], [])
