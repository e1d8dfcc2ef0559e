"""Summary of a record set: its content and what was dropped.

This module imports neither TensorFlow nor SeqIO.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.objectives import objective_names

# Minimum share of dropped examples or documents for a warning.
_WARNING = 0.1
_UNMASKED = 'left without a masked copy'
# Maximum tolerated share of examples by kind of loss, unless
# config.data.lossy_targets='allow'.
_TOLERATED = {'lossy_targets': 0.01, 'empty_targets': 0.5}
# Losses of kept examples, which the totals include.
_CUT = ('truncated', _UNMASKED, 'cut_documents', *_TOLERATED)
_LOSSES = {
  'dropped': 'examples longer than a row were dropped',
  'truncated': 'examples longer than a row were truncated',
  _UNMASKED: f'examples longer than a row were {_UNMASKED}',
  'short_windows': 'last windows shorter than the option shortest were dropped',
  'ties': 'preferences without a better answer were dropped',
  'shared_headers': (
    'preferences were dropped, as an answer shares a token with the header of'
    ' its turn'
  ),
  'bad_documents': 'documents could not be read',
  'cut_documents': 'documents were cut where max_bytes ends',
  'lossy_targets': 'targets lose text in the vocabulary',
  'empty_targets': 'targets are empty',
}


def describe(manifest: Mapping[str, Any]) -> str:
  """Describes a record set.

  Args:
    manifest: content of its manifest.

  Returns:
    A line with source, documents, tokens, fill and dropped or truncated
    examples; a line for each of several parts, each noise and each warning.
  """
  spec, totals, fill = (manifest[key] for key in ('spec', 'totals', 'fill'))
  sides = [side for side in fill if spec[f'{side}_length']]
  filled = ', '.join(f'{side} {fill[side]:.1%}' for side in sides)
  inputs = f'{totals["encoder_positions"]:,} input and '
  inputs *= 'encoder' in sides
  passes = len(manifest['passes'])
  counts = []
  # Every objective and pass reads the same documents. Older manifests lack
  # these counts.
  for unit in ('documents', 'passages'):
    parts = [part for part in manifest['parts'] if unit in part]
    numbers = {part['source']: part[unit] // passes for part in parts}
    counts += [f'{sum(numbers.values()):,} {unit}'] if numbers else []
  counts += [
    f'{totals["rows"]:,} rows in {passes} passes',
    f'{totals["pairs"]:,} examples',
    f'{inputs}{totals["target_tokens"]:,} target tokens',
  ]
  line = f'{spec["source"]}: {", ".join(counts)}, {filled} full'
  if totals['shared_sentinel_spans']:
    line += (
      f'; {totals["shared_sentinel_spans"]:,} spans share their sentinel with'
      f' another (sentinels={spec["sentinels"]})'
    )
  warnings = []
  for name, text in _LOSSES.items():
    unit = 'documents' if name.endswith('_documents') else 'examples'
    if not (count := totals.get(name)):
      continue
    line += f'; {_loss(manifest, name)}'
    total = totals.get(unit, 0) + count * (name not in _CUT)
    if unit in totals and count > _WARNING * total:
      warnings.append(f'WARNING: {text}: {count / total:.0%}')
  lines = [line]
  for part in manifest['parts']:
    if len(manifest['parts']) > 1:
      lines.append(
        f'  {part["objective"]} of {part["source"]}: {part["rows"]:,} rows,'
        f' {part["pairs"]:,} examples, {part["target_tokens"]:,} target tokens'
      )
    lines += _hidden(part)
  return '\n'.join(lines + warnings)


def check_targets(manifest: Mapping[str, Any], rule: str) -> None:
  """Raises an error if too many targets lose text or are empty.

  Args:
    manifest: content of their manifest; older manifests lack these counts.
    rule: `config.data.lossy_targets`.

  Raises:
    UserError: names the count and the first such target.
  """
  totals = manifest['totals']
  for name, share in _TOLERATED.items():
    count, total = totals.get(name, 0), totals.get('examples', 0)
    if rule == 'fail' and count > share * total:
      raise errors.UserError(
        f'{manifest["spec"]["source"]}: of {total:,} examples,'
        f' {_loss(manifest, name)}. Correct config.data.source, or choose a'
        ' vocabulary with all characters, or train on these records with'
        " config.data.lossy_targets='allow'."
      )


def _loss(manifest: Mapping[str, Any], name: str) -> str:
  text = f'{manifest["totals"][name]:,} {_LOSSES[name]}'
  first = manifest.get('first_losses', {}).get(name)
  return f'{text} (first {first})' if first else text


def _hidden(part: Mapping[str, Any]) -> list[str]:
  objective = objective_names.parse_one(part['objective'])
  requested = objective.maker.hidden_shares(objective.text, objective.options)
  windows = sum(part.get(f'{noise}: windows', 0) for noise in requested)
  lines = []
  for noise, (share, hidden) in requested.items():
    # In a small part, a noise may never be drawn.
    if count := part.get(f'{noise}: windows', 0):
      rate = part[f'{noise}: hidden'] / part[f'{noise}: tokens']
      target = '' if hidden is None else f' (asked {hidden:.1%})'
      lines.append(
        f'    {noise}: {count / windows:.1%} of {windows:,} windows (asked'
        f' {share:.1%}), {rate:.1%} of their tokens hidden{target}'
      )
  return lines
