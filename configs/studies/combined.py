"""A page of the models of other pages; their stages are shared with these."""

import dataclasses
import itertools

from encdec_adapt.lab import pages


def study(name, title, size, studies, **fields):
  """Returns a page of the models of other pages, with their stages.

  A model's name is that of its page and its own, as in wang.cd_flm.

  Args:
    name: name of the page.
    title: title of the report.
    size: size of the study.
    studies: the pages.
    **fields: further fields of the page; `evaluations` are added to theirs.
  """
  parts = [_renamed(study) for study in studies]
  merged = {
    key: tuple(itertools.chain.from_iterable(getattr(x, key) for x in parts))
    for key in ('arms', 'commands', 'rates', 'evaluations')
  }
  merged['evaluations'] += fields.pop('evaluations', ())
  merged |= {x: getattr(parts[0], x) for x in ('platform', 'topology')}
  return pages.Study(name, title, size.name, **merged, **fields)


def _renamed(study):
  names = [x.name for x in (*study.arms, *study.commands, *study.rates)]
  names = {x: f'{study.name}.{x}' for x in names}
  braces = {old: f'{{{new}}}' for old, new in names.items()}

  def rename(item):
    fields = {'name': f'{study.name}.{item.name}'}
    for key in {'arm', 'rate', 'records'} & vars(item).keys():
      fields[key] = names.get(getattr(item, key), '')
    for key in {'after', 'models'} & vars(item).keys():
      fields[key] = tuple(names[x] for x in getattr(item, key))
    if isinstance(item, pages.Arm):
      fields['seeds'] = study.seeds_of(item.name)
      fields['starts'] = {
        key: names.get(text) or pages.fill(text, braces)
        for key, text in item.starts.items()
      }
    if isinstance(item, pages.Evaluation) and not item.models:
      fields['models'] = tuple(names[arm.name] for arm in study.arms)
    if 'arguments' in vars(item):
      arguments = item.arguments
      fields['arguments'] = tuple(pages.fill(x, braces) for x in arguments)
    return dataclasses.replace(item, **fields)

  return dataclasses.replace(
    study,
    claims=(),
    **{
      key: tuple(map(rename, getattr(study, key)))
      for key in ('arms', 'commands', 'rates', 'evaluations')
    },
  )
