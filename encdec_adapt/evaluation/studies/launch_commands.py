"""Commands of `launch` for the stages of a study on chips that are elsewhere.

A training stage is a job on all chips. Once it has ended, `--stage=NAME` of the
study takes its run as that of the stage. Other stages take one GPU, or none.
"""

from collections.abc import Sequence
import os
import shlex

from encdec_adapt.evaluation.studies import (
  pages,
  stage_states,
  stages,
  workers,
)
from encdec_adapt.files import paths
from encdec_adapt.planning import chips

# Chip -> its name in accelerator types of Google Cloud, and what their number
# counts for a chip, as in `launch/commands.py`.
_TPUS = {'v4': ('v4', 2), 'v5e': ('v5litepod', 1)}
_TPUS |= {'v5p': ('v5p', 2), 'v6e': ('v6e', 1)}
_TIME = '--time=24:00:00'  # Per start; the next one resumes.
_MOST_LETTERS = 30  # In a job's name.


def commands(
  study: pages.Study, states: stage_states.States, flags: Sequence[str]
) -> list[str]:
  """Returns the command of every stage, in the order in which they can run.

  Args:
    study: the study, with a topology.
    states: states of its stages.
    flags: flags of the study's command.
  """
  hardware, lines = chips.parse(study.topology), []
  for stage in states.stages.values():
    name = f'--name={job_name(stage)}'
    run = [*flags, f'--stage={stage.name}']
    if stage.module == 'train':
      values = states.values(stage)
      folder = values[stage.name]
      if not paths.is_bucket(folder):
        # Launchers refuse a folder that may be on the disk of one machine.
        values[stage.name] = os.path.abspath(folder)
      arguments = [pages.fill(text, values) for text in stage.arguments]
      line = [*_job(hardware), name, '--', *arguments]
    elif hardware.chip.kind == 'gpu':
      gpus = int(stage.module not in workers.WITHOUT_DEVICES)
      line = ['launch.slurm', 'study', name, '--workers=1']
      line += [f'--gpus_per_node={gpus}', _TIME, '--', *run]
    else:
      line = ['encdec_adapt.study', *run]
    lines.append(shlex.join(['python3', '-m', *line]))
  return lines


def job_name(stage: stages.Stage) -> str:
  """Returns the name of a stage as launchers take it, and no other stage's."""
  name = stage.name.replace('_', '-').replace('.', '-').lower()
  if len(name) <= _MOST_LETTERS:
    return name
  digest = stage.identity[:8]
  return f'{name[: _MOST_LETTERS - len(digest) - 1].rstrip("-")}-{digest}'


def _job(hardware: chips.Slice) -> list[str]:
  if hardware.chip.kind == 'gpu':
    gpus = min(hardware.chips, hardware.chip.host_chips)
    request = f'--nodes={hardware.chips // gpus}', f'--gpus_per_node={gpus}'
    return ['launch.slurm', 'train', *request, _TIME]
  if hardware.chip.name == 'tpu7x':  # No queued resources.
    request = '--cluster=CLUSTER', '--zone=ZONE', '--image=IMAGE:TAG'
    accelerator = hardware.name.replace(':', '-')
    return ['launch.gke', 'train', *request, f'--accelerator={accelerator}']
  kind, count = _TPUS[hardware.chip.name]
  accelerator = f'{kind}-{hardware.chips * count}'
  request = '--zone=ZONE', f'--accelerator={accelerator}'
  return ['launch.tpu_vm', 'train', *request]
