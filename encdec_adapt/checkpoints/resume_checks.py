"""Checks on resume: rejects changed data, reports a changed environment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from encdec_adapt.base import errors, keys
from encdec_adapt.telemetry import environment

Report = Callable[[str], None]  # Prints a paragraph.
# Precedes a reward model's path in messages.
REWARD_MODEL = 'reward model'
# With these flags a job on one H200 resumed bit for bit
# (tests/benchmarks/README.md). Without the first, atomic additions make sums
# differ between runs; without the second, XLA picks kernels by timing them.
_EXACT = '--xla_gpu_deterministic_ops=true', '--xla_gpu_autotune_level=0'


def check_config(
  saved: Mapping[str, Any], config: Mapping[str, Any], report: Report
) -> None:
  """Checks that a training job wrote the checkpoint; reports changed keys.

  Args:
    saved: `meta` of the checkpoint.
    config: the configuration of this start.
    report: prints a paragraph.

  Raises:
    UserError: `convert` wrote the checkpoint, without a data order.
  """
  # Only a training job stores `order`; its absence identifies `convert`.
  if 'order' not in saved:
    raise errors.UserError(
      'this --workdir was made by encdec_adapt.convert, not by a training job:'
      ' give it as config.init.encoder, and another --workdir.'
    )
  # Keys unknown to the checkpoint's version cannot have changed.
  before, _ = keys.complete(saved['config'], config)
  changed = environment.difference(
    environment.flat({'config': before}), environment.flat({'config': config})
  )
  # Reported, not rejected: a longer schedule or another mesh is legitimate.
  # `check_same_rows` rejects changed rows.
  if changed:
    report('the configuration has changed:\n  ' + '\n  '.join(changed))


def check_same_phase(before: int, warmup: int, step: int) -> None:
  """Checks that a step is on the same side of the warm-up as when it was saved.

  Args:
    before: steps of the warm-up of cross-attention when it was saved.
    warmup: those of this start.
    step: step of the checkpoint.

  Raises:
    UserError: it is not; the checkpoint has state of other parameters.
  """
  # The other parameters get optimizer state in their first step.
  if (before < step) != (warmup < step):
    raise errors.UserError(
      f'config.train.cross_attention_warmup is {warmup}, and the job had'
      f' {before} up to its step {step}: give'
      f' --config.train.cross_attention_warmup={before}.'
    )


def check_same_rows(
  saved: Mapping[str, Any],
  now: Mapping[str, Any],
  consumed: Sequence[int],
  ranges: Sequence[Sequence[tuple[int, int]]],
) -> None:
  """Checks that the saved position refers to the same rows.

  Args:
    saved: record digests and shuffle seed of the checkpoint.
    now: record digests and shuffle seed of this start.
    consumed: consumed rows of each part of a mixture, or in total.
    ranges: (start, stop) rows of every pass and part, [pass][part].

  Raises:
    UserError: the rows differ, or added passes precede the position.
  """
  saved_passes, passes = len(saved['records']), len(now['records'])
  # Passes may be appended: only the checkpoint's passes must match.
  same = {**now, 'records': now['records'][:saved_passes]}
  for key, name in (('records', 'config.data'), ('seed', 'config.seed')):
    if saved[key] != same[key]:
      raise errors.UserError(
        f'the checkpoint was written at a position in other rows: {key} was'
        f' {saved[key]}, now {same[key]}. Set {name} back, or start in'
        ' another --workdir.'
      )
  rows = [
    sum(stop - start for start, stop in part)
    for part in zip(*ranges[:saved_passes], strict=True)
  ]
  if len(consumed) == 1:
    rows = [sum(rows)]
  # With config.data.repeat a job repeats all passes. Passes appended during a
  # repetition would precede its position.
  for position, count in zip(consumed, rows, strict=False):
    if passes > saved_passes and position > count:
      raise errors.UserError(
        f'config.data.passes is {passes}, but the checkpoint is in a repetition'
        f' of {saved_passes} passes ({position:,} rows of {count:,} were read),'
        f' so the added passes are behind it. Set it to {saved_passes}, or'
        ' start in another --workdir.'
      )


def check_same_references(
  saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
  """Checks that the reference models are unchanged since training began.

  Args:
    saved: `meta` of the checkpoint.
    now: `meta` of this start, with the digest of each reference.

  Raises:
    UserError: the parameters of a reference differ.
  """
  for name, digest in saved.get('references', {}).items():
    # In earlier versions a folder's digest lacked its second part.
    if not now['references'].get(name, digest).startswith(digest):
      keys = 'config.teacher.checkpoint (or config.init.encoder and'
      keys += ' config.teacher.dtype)'
      if name.startswith(REWARD_MODEL):
        keys = 'config.train.rewards.models, perhaps to RUN@STEP,'
      raise errors.UserError(
        f'the checkpoint was trained with another {name}: its parameters had'
        f' the digest {digest[:12]}, now {now["references"][name][:12]}. Set'
        f' {keys} back, or start in another --workdir.'
      )


def report_environment(
  saved: Mapping[str, Any], now: Mapping[str, Any], report: Report
) -> None:
  """Reports why the job may deviate from an uninterrupted job.

  Args:
    saved: `meta` of the checkpoint.
    now: `meta` of this start.
    report: prints a paragraph.
  """
  different = environment.difference(saved['fingerprint'], now['fingerprint'])
  if different:
    report(
      'the environment has changed since the checkpoint was written, so the'
      ' job resumes to rounding, not bit for bit:\n  ' + '\n  '.join(different)
    )
  flags = now['fingerprint']['xla_flags'].split()
  if now['fingerprint']['platform'] == 'gpu' and {*_EXACT} - {*flags}:
    report(
      'on GPUs a job resumes bit for bit only if all of it runs with'
      f" XLA_FLAGS='{' '.join(_EXACT)}'; this one resumes to rounding"
    )


def report_end(
  batches: int | None, step: int, steps: int, report: Report
) -> int:
  """Reports the last step if the records run out early.

  Args:
    batches: remaining batches; None if the records repeat.
    step: current step of the job.
    steps: last step of the job.
    report: prints a paragraph.

  Returns:
    The step at which the job ends.
  """
  if batches is not None and batches < steps - step:
    end = step + batches
    report(
      f'the records last for {batches:,} of the {steps - step:,} remaining'
      f' steps, so the job will end at step {end:,} of {steps:,}. For all steps'
      ' make more passes (config.data.passes) or repeat them'
      f' (config.data.repeat=True); or set config.train.steps={end}, which'
      ' also ends the learning rate schedule there.'
    )
    return end
  return steps
