"""All studies of a size, one after the other.

    python -m encdec_adapt.study --study=configs/studies/all.py:size=cpu

Each page is a stage of its own, with a report in its folder
(runs/studies/NAME_SIZE); a stage that two pages have in common runs once. `cpu`
costs at most 3.6e15 FLOPs, about twelve hours on two cores, and before
`post_training` trains the quickstart's full models, two hours and a half. One
page that fails does not stop the others. At `cpu` the report, also by --report,
writes the table of all claims into README.md; pages that were not run again
keep their lines (results.json).
"""

from encdec_adapt import configs
from encdec_adapt.configs import quickstart
from encdec_adapt.configs.studies import shared
from encdec_adapt.lab import pages

# Those that read the models of others follow them.
PAGES = (
  'architecture',
  'adaptation',
  'encoder',
  'objectives',
  'tuning',
  'lora',
  'wang',
  'meap',
  'understanding',
  'initialisation',
  'conversion',
  't5gemma2',
  'embeddings',
  'correlation',
  'efficiency',
)
# Models that `post_training` starts from: sizes of the quickstart.
MODELS = {'smoke': 'smoke', 'cpu': 'full'}


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  commands = [_page(name, size.arguments) for name in PAGES]
  if size.name in MODELS:
    start = quickstart.SIZES[MODELS[size.name]].root
    commands += [
      _page('quickstart', f'size={MODELS[size.name]}', '', root=start),
      _page(
        'post_training',
        f'size={size.name},models={start}',
        after=('quickstart',),
      ),
    ]
  is_cpu = size.name == 'cpu'
  return pages.Study(
    'all',
    'All studies',
    size.name,
    (),
    commands=tuple(commands),
    readme=configs.path('studies/README.md') if is_cpu else '',
  )


def _page(name, argument, folder='studies/', after=(), root=''):
  """Returns the stage of a page; `root` is its folder, whatever --root is."""
  file = configs.path(f'{folder}{name}.py')
  flags = [f'--study={file}:{argument}'] + ([f'--root={root}'] if root else [])
  return pages.Command(name, 'study', tuple(flags), after, seconds=3600)
