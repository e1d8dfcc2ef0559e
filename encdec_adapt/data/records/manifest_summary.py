"""Summary of a record set for users: what is in it, and what was left out.

This module imports neither TensorFlow nor SeqIO.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.objectives import objective_names

# Share of the examples or documents from which their loss is a warning.
_WARNING = 0.1
_UNMASKED = 'left without a masked copy'
# Name of a count, unit of which it is a part, and its text.
_LOSSES = (
  ('dropped', 'examples', 'examples longer than a row were dropped'),
  ('truncated', 'examples', 'examples longer than a row were truncated'),
  (_UNMASKED, 'examples', f'examples longer than a row were {_UNMASKED}'),
  (
    'short_windows',
    'examples',
    'last windows shorter than the option shortest were dropped',
  ),
  ('bad_documents', 'documents', 'documents could not be read'),
)


def describe(manifest: Mapping[str, Any]) -> str:
  """Describes a record set.

  Args:
    manifest: content of its manifest.

  Returns:
    A line with source, documents, tokens, fill and what was dropped or cut; a
    line for each part of several, for each noise, and for each warning.
  """
  spec, totals, fill = (manifest[key] for key in ('spec', 'totals', 'fill'))

  def mean(name: str) -> float:
    return totals[name] / max(totals['pairs'], 1)

  sides = {
    'encoder': f'{mean("encoder_positions"):.0f} of %d inputs',
    'decoder': f'{mean("target_tokens"):.0f} of %d targets',
  }
  lengths = {side: spec[f'{side}_length'] for side in sides}
  filled = ', '.join(f'{x} {fill[x]:.1%}' for x in sides if lengths[x])
  means = ' and '.join(sides[x] % lengths[x] for x in sides if lengths[x])
  passes = len(manifest['passes'])
  inputs = f'{totals["encoder_positions"]:,} input and '
  inputs *= bool(lengths['encoder'])
  # Every objective and every pass reads them again.
  documents = {
    part['source']: part.get('documents', 0) // passes
    for part in manifest['parts']
  }
  line = (
    f'{spec["source"]}: {sum(documents.values()):,} documents;'
    f' {totals["rows"]:,} rows in {passes} passes,'
    f' {totals["pairs"]:,} examples, {inputs}{totals["target_tokens"]:,} target'
    f' tokens, {filled} full; a mean example has {means}'
  )
  if totals['shared_sentinel_spans']:
    line += (
      f'; {totals["shared_sentinel_spans"]:,} spans share their sentinel with'
      f' another (sentinels={spec["sentinels"]})'
    )
  warnings = []
  for name, unit, text in _LOSSES:
    count, total = totals.get(name, 0), totals.get(unit, totals['pairs'])
    # Examples that were cut are among the examples, the others are not.
    total += count * (name not in ('truncated', _UNMASKED))
    if count:
      line += f'; {count:,} {text}'
    if count > _WARNING * total:
      warnings.append(f'WARNING: {text}: {count / total:.0%} of the {unit}')
  lines = [line]
  for part in manifest['parts']:
    if len(manifest['parts']) > 1:
      lines.append(
        f'  {part["objective"]} of {part["source"]}: {part["rows"]:,} rows,'
        f' {part["pairs"]:,} examples, {part["target_tokens"]:,} target tokens'
      )
    lines += _hidden(part)
  return '\n'.join(lines + warnings)


def _hidden(part: Mapping[str, Any]) -> list[str]:
  """Compares the hidden tokens of a part with the shares of its objective."""
  requested = objective_names.parse_one(part['objective']).hidden_shares
  windows = sum(part.get(f'{noise}: windows', 0) for noise in requested)
  lines = []
  for noise, (share, hidden) in requested.items():
    # A noise of a small part may never have been drawn.
    if count := part.get(f'{noise}: windows', 0):
      rate = part[f'{noise}: hidden'] / part[f'{noise}: tokens']
      target = '' if hidden is None else f' (asked {hidden:.1%})'
      lines.append(
        f'    {noise}: {count / windows:.1%} of {windows:,} windows (asked'
        f' {share:.1%}), {rate:.1%} of their tokens hidden{target}'
      )
  return lines
