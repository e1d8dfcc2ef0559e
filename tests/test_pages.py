"""Pages: links and anchors resolve, and the keys and commands exist."""

import functools
import importlib
import importlib.util
import json
import pkgutil
import re

from absl import flags
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.cli import console
from tests import keys_page, tiny

FOLDERS = ('', 'configs', 'encdec_adapt', 'launch', 'tests')
NOTEBOOKS = sorted(tiny.ROOT.glob('launch/notebooks/*.ipynb'))
PAGES = sorted(
  path
  for folder in FOLDERS
  for path in (tiny.ROOT / folder).glob('**/*.md' if folder else '*.md')
)
CONFIGS = [x for x in PAGES if tiny.ROOT / 'configs' in x.parents]
# Markdown's links, and those of <picture>, <img> and <a>.
LINK = re.compile(r'(?:\]\(|\b(?:src|srcset|href)=")([^)"\s]+)')
# A page of two screens needs no table of contents.
TWO_SCREENS = 80
# `config.NAME` that is no key.
NOT_KEYS = ('json', 'py', 'defaults', 'page')


def _lines(page):
  """Yields the place and text of every line of prose."""
  if page.suffix == '.ipynb':
    for i, cell in enumerate(json.loads(page.read_text())['cells']):
      if cell['cell_type'] == 'markdown':
        text = ''.join(cell['source'])
        for number, line in enumerate(text.splitlines(), start=1):
          yield f'cell {i}, line {number}', line
    return
  is_code = False
  for number, line in enumerate(page.read_text().splitlines(), start=1):
    if line.startswith('```'):
      is_code = not is_code
    elif not is_code:
      yield f'line {number}', line


@functools.cache
def _anchors(page):
  """Returns the anchors of a page's headings, as GitHub makes them."""
  anchors = []
  for _, line in _lines(page):
    if match := re.fullmatch(r'#{1,6} (.+)', line):
      text = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', match[1]).lower()
      anchor = re.sub(r'[^\w\- ]', '', text).strip().replace(' ', '-')
      count = sum(x.rpartition('-')[0] == anchor for x in anchors)
      anchors.append(f'{anchor}-{count + 1}' if anchor in anchors else anchor)
  return anchors


def dead_links(page):
  """Returns the relative links of a page that lead nowhere.

  Args:
    page: path of a page or notebook.

  Returns:
    'PAGE, line N: LINK, with the reason', one for each.
  """
  dead = []
  for place, line in _lines(page):
    line = re.sub(r'`[^`]*`', '', line)
    for link in LINK.findall(line):
      path, _, anchor = link.partition('#')
      if re.match(r'[a-z]+:', link):
        continue
      target = (page.parent / path).resolve() if path else page
      if not target.exists():
        problem = 'no such file'
      elif anchor and anchor not in _anchors(target):
        problem = f'no heading #{anchor}'
      else:
        continue
      dead.append(f'{page}, {place}: {link}: {problem}')
  return dead


@pytest.mark.parametrize(
  'page', [*PAGES, *NOTEBOOKS], ids=lambda x: str(x.relative_to(tiny.ROOT))
)
def test_links_resolve(page):
  dead = dead_links(page)
  assert not dead, '\n'.join(dead)


def test_a_dead_link_is_named_with_page_and_line(tmp_path):
  page = tmp_path / 'page.md'
  page.write_text(
    '# A page, of `x.y`\n\n[one](#a-page-of-xy) [two](page.md#b)\n'
    '```\n[code](gone.md)\n```\n'
    '<img src="gone.png"> [three](gone.md) [web](https://x.org/gone)\n'
  )
  notebook = tmp_path / 'a.ipynb'
  cells = [
    {'cell_type': 'code', 'source': ['[f](gone.md)']},
    {'cell_type': 'markdown', 'source': ['one\n', '[page](gone.md)']},
  ]
  notebook.write_text(json.dumps({'cells': cells}))
  assert dead_links(page) == [
    f'{page}, line 3: page.md#b: no heading #b',
    f'{page}, line 7: gone.png: no such file',
    f'{page}, line 7: gone.md: no such file',
  ]
  assert dead_links(notebook) == [
    f'{notebook}, cell 1, line 2: gone.md: no such file'
  ]


def test_long_pages_of_configs_have_contents_of_their_sections():
  assert len((tiny.ROOT / 'configs/README.md').read_text().splitlines()) <= 80
  for page in CONFIGS:
    text = page.read_text()
    sections = re.findall(
      r'^## .*', re.sub(r'```.*?```', '', text, flags=re.S), re.M
    )
    if text.count('\n') > TWO_SCREENS:
      contents = re.search(r'^Contents: .*?\n\n', text, re.M | re.S)
      assert contents, f'{page} has no contents'
      links = re.findall(r'\(#([^)]*)\)', contents[0])
      assert links == _anchors(page)[1 : len(sections) + 1], page


def test_the_page_of_keys_is_as_written():
  page = tiny.ROOT / 'configs' / 'keys.md'
  assert page.read_text() == keys_page.page(), keys_page.__doc__
  blocks = re.findall(r'```python\n(.*?)\n```\n', page.read_text(), re.S)
  assert '\n\n'.join(blocks) == config_lib.page()


@functools.cache
def _sections():
  """Returns the names of all keys and sections."""
  keys = re.findall(r'^config\.\S+', config_lib.page(), re.M)
  return {
    '.'.join(parts[:end])
    for parts in (key.split('.') for key in keys)
    for end in range(1, len(parts) + 1)
  }


@functools.cache
def _flags(name, verb):
  """Returns the flags of a command, and of a sub-command of `convert`."""
  module = importlib.import_module(f'encdec_adapt.{name}')
  values = flags.FlagValues()
  if name == 'convert':
    assert verb in module.COMMANDS, f'convert {verb}'
    module.COMMANDS[verb].define(values)
  else:
    module.define_flags(values)
  return {*values, 'help'}


@pytest.mark.parametrize(
  'page',
  [*(x for x in PAGES if x.name != 'CHANGELOG.md'), *NOTEBOOKS],
  ids=lambda x: str(x.relative_to(tiny.ROOT)),
)
def test_keys_and_commands_of_pages_exist(page):
  text = page.read_text()
  for name in set(re.findall(r'(?<![\w.])config(?:\.[a-z*]\w*|\.\*)+', text)):
    pattern = name.replace('.', r'\.').replace('*', r'\w+')
    if name.split('.')[1] not in NOT_KEYS:
      assert any(re.fullmatch(pattern, x) for x in _sections()), name
  for name in set(re.findall(r'python3? -m ((?:\w+\.)*\w+)', text)):
    name = name.removesuffix('.NAME')
    assert importlib.util.find_spec(name), name
  for name in set(re.findall(r'\bencdec_adapt(?:\.[A-Za-z_]\w*)+', text)):
    if not re.search(r'[A-Z]+$', name):
      pkgutil.resolve_name(name)
  for name in re.findall(r'--(?:config|study)=([a-z]\w*)[:\s`]', text):
    configs.locate(name)
  commands = rf'(?:encdec_adapt\.|`)({"|".join(console.COMMANDS)}) ([^`\n]*)'
  for name, line in re.findall(commands, text.replace('\\\n', ' ')):
    verb, *_ = words = re.split(r'(?:[;|&#>]|--) ', line)[0].split()
    for word in words:
      if match := re.match(r'--(?:no)?([a-z]\w*)(?!\w|\.)', word):
        assert match[1] in _flags(name, verb), f'{name} {line}'
