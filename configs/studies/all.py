"""All studies of a size, one after the other.

    python -m encdec_adapt.study --study=configs/studies/all.py:size=cpu

Each page is a stage of its own, with a report in its folder
(runs/studies/NAME_SIZE); a stage that two pages have in common runs once. `cpu`
costs at most 3.9e15 FLOPs, 14 to 18 hours on two quiet cores with --jobs=2;
4.3e14 of them are those of `post_training`, which starts from models of
`adaptation`. One page that fails does not stop the others. At `cpu` the report,
also by --report, writes the table of all claims into README.md; pages that were
not run again keep their lines (results.json).
"""

from encdec_adapt import configs
from encdec_adapt.configs.studies import meap, shared
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
# Claims of the picture by paper: page and contrast of a primary claim.
PICTURE = {
  shared.T5GEMMA: (
    ('adaptation', ('scratch_taught', 'adapted')),
    ('adaptation', ('continued_flops', 'adapted')),
    ('tuning', ('base_tuned', 'adapted_tuned', 'base', 'adapted')),
    ('encoder', ('causal', 'bidirectional')),
  ),
  shared.WANG: (
    ('wang', ('ed_plm', 'cd_flm')),
    ('wang', ('cd_flm_tuned', 'ed_mlm_tuned')),
    ('conversion', ('nc_a', 'nd_mlm')),
  ),
  meap.CITED: (('meap', ('meap',)),),
}


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  commands = [_page(name, size.arguments) for name in PAGES]
  if not size.large:
    commands.append(_page('post_training', f'size={size.name}'))
  is_cpu = size.name == 'cpu'
  return pages.Study(
    'all',
    'All studies',
    size.name,
    (),
    commands=tuple(commands),
    readme=configs.path('studies/README.md') if is_cpu else '',
    picture=PICTURE,
  )


def _page(name, argument):
  flags = (f'--study={configs.path(f"studies/{name}.py")}:{argument}',)
  return pages.Command(name, 'study', flags, seconds=3600)
