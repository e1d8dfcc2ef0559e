"""A stand-in for a program: notes how it was called.

    record_call.py FILE PROGRAM [arguments]

Fails, and notes nothing, where a flag is not in tool_flags.json. Arguments
from the first that is no flag, after the words of the command, are not looked
at: they are a script's.
"""

import json
import pathlib
import sys

FLAGS = json.loads(
  pathlib.Path(__file__).with_name('tool_flags.json').read_text()
)


def main(file: str, *call: str) -> int:
  """Checks and notes a call."""
  known = next(
    (
      (name.split(), flags)
      for name, flags in FLAGS['commands'].items()
      if list(call[: len(name.split())]) == name.split()
    ),
    None,
  )
  if known is None:
    print(f'{call[0]}: no such command: {call[1:]}', file=sys.stderr)
    return 2
  words, flags = known
  for argument in call[len(words) :]:
    if not argument.startswith('-'):
      break
    name = argument.partition('=')[0]
    if name not in flags:
      print(f'{" ".join(words)}: unknown option {name}', file=sys.stderr)
      return 2
  with open(file, 'a') as calls:
    calls.writelines(f'{word}\n' for word in call)
  return 0


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
