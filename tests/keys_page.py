"""Prints configs/keys.md: every configuration key with its documentation.

python -m tests.keys_page > configs/keys.md
"""

import re

from encdec_adapt import config as config_lib

HEAD = """\
# Every key

Written by `python -m tests.keys_page`. `--print_config` prints the keys in
force with a configuration's values, `--print_config=all` prints every key. A
flag overrides a key, as in `--config.optimizer.learning_rate=5e-5`. Keys of the
decoder are documented at the encoder.
"""


def page() -> str:
  """Returns the page: a heading and a block of keys for each section."""
  blocks = config_lib.page().split('\n\n')
  names = [
    re.findall(r'^(config(?:\.model)?(?:\.\w+)?)\.\w', block, re.M)[0]
    for block in blocks
  ]
  contents = ' ·\n'.join(
    f'[{name}](#{name.replace(".", "")})' for name in names
  )
  sections = [
    f'## {name}\n\n```python\n{block}\n```\n'
    for name, block in zip(names, blocks, strict=True)
  ]
  return '\n'.join([HEAD, f'Contents: {contents}\n', *sections])


if __name__ == '__main__':
  print(page(), end='')
