"""All studies of a size, one after the other.

    python -m encdec_adapt.study --study=configs/studies/all.py:size=cpu

Each page is a stage of its own, with a report in its folder
(runs/studies/NAME_SIZE); a stage that two pages have in common runs once. `cpu`
costs at most 3.6e15 FLOPs, about twelve hours on two cores. One page that fails
does not stop the others.
"""

from encdec_adapt import configs
from encdec_adapt.configs.studies import shared
from encdec_adapt.evaluation.studies import pages

# Those that read the models of others follow them.
PAGES = (
  'architecture',
  'adaptation',
  'encoder',
  'objectives',
  'tuning',
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


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  commands = tuple(
    pages.Command(
      name,
      'study',
      (f'--study={configs.path(f"studies/{name}.py")}:{size.arguments}',),
      seconds=3600,
    )
    for name in PAGES
  )
  return pages.Study('all', 'All studies', size.name, (), commands=commands)
