"""A queued resource of Cloud TPU VMs and the gcloud commands on it.

Flags are those of the Google Cloud CLI reference, `gcloud compute tpus
queued-resources`; tests/launch/tool_flags.json lists them.
"""

from __future__ import annotations

import dataclasses
import re
import typing

from launch import commands

# Accelerator type -> software version of its virtual machines.
# Source: Cloud TPU documentation, "TPU software versions".
RUNTIMES = {
  'v4': 'tpu-ubuntu2204-base',
  'v5litepod': 'v2-alpha-tpuv5-lite',
  'v5p': 'v2-alpha-tpuv5',
  'v6e': 'v2-alpha-tpuv6e',
}
TIERS = {'spot': ['--spot'], 'reserved': ['--reserved'], 'on_demand': []}
# Route to the workers -> flags of ssh and scp, flags of create.
ROUTES = {
  'external': ([], []),
  'internal': (['--internal-ip'], ['--internal-ips']),
  'iap': (['--tunnel-through-iap'], ['--internal-ips']),
}
# A disk that many machines attach; form: `gcloud compute tpus queued-resources
# create --help`, --data-disk.
_DISK = re.compile(
  r'source=projects/[^/,]+/zones/([^/,]+)/disks/[^/,]+,mode=read-only'
)
# Ends the connection to a vanished worker after two minutes.
_ALIVE = ['--ssh-flag=-oServerAliveInterval=30']
_ALIVE += ['--ssh-flag=-oServerAliveCountMax=4']
# The default of 64 would run workers in batches, one after the other.
_EVERYWHERE = ['--node=all', '--worker=all', '--batch-size=all']


@dataclasses.dataclass(frozen=True)
class Resource:
  """A queued resource as the flags describe it."""

  name: str
  zone: str
  accelerator: str = ''  # Required to create it.
  project: str = ''  # '' for the default of gcloud.
  slices: int = 1
  tier: str = 'spot'
  runtime: str = ''  # '' for the one in RUNTIMES.
  route: str = 'external'
  service_account: str = ''
  create_flag: typing.Sequence[str] = ()  # Further flags of create.
  data_disk: str = ''  # In gcloud's form; every worker attaches it.

  def check(self) -> None:
    """Refuses values that the cloud would refuse."""
    commands.check_name('name', self.name)
    if self.accelerator:
      name, _ = commands.tpu_chips(self.accelerator)
      if name == 'tpu7x':
        raise commands.LaunchError(
          f'--accelerator={self.accelerator}: there are no queued resources of'
          ' tpu7x; use python3 -m launch.gke.'
        )
    disk = _DISK.fullmatch(self.data_disk)
    if self.data_disk and (disk is None or disk[1] != self.zone):
      raise commands.LaunchError(
        f'--data_disk={self.data_disk}: give a disk of the zone, as'
        f' --data_disk=source=projects/PROJECT/zones/{self.zone}/disks/DISK,'
        'mode=read-only.'
      )

  def check_topology(self, training: list[str]) -> None:
    """Refuses a configuration whose topology differs from the resource.

    Args:
      training: flags of `encdec_adapt.train`.
    """
    commands.check_topology(
      training,
      *commands.tpu_chips(self.accelerator),
      self.slices,
      f'--accelerator={self.accelerator} --slices={self.slices}',
    )

  @property
  def nodes(self) -> list[str]:
    """Names of the slices in the cloud."""
    if self.slices == 1:
      return [self.name]
    return [f'{self.name}-{index}' for index in range(self.slices)]

  def create(self) -> list[str]:
    """Queues the request, without waiting for machines."""
    kind = self.accelerator.partition('-')[0]
    if self.slices == 1:
      nodes = [f'--node-id={self.name}']
    else:
      nodes = [f'--node-count={self.slices}', f'--node-prefix={self.name}']
    given = {
      'service-account': self.service_account,
      'data-disk': self.data_disk,
    }
    return self._command(
      'create',
      self.name,
      f'--accelerator-type={self.accelerator}',
      f'--runtime-version={self.runtime or RUNTIMES[kind]}',
      *nodes,
      *TIERS[self.tier],
      *ROUTES[self.route][1],
      *(f'--{flag}={value}' for flag, value in given.items() if value),
      *self.create_flag,
      '--async',
      '--quiet',
    )

  def describe(self) -> list[str]:
    """Prints the state of the request."""
    return self._command('describe', self.name, '--format=value(state.state)')

  def explain(self) -> list[str]:
    """Prints the state with its error message."""
    return self._command('describe', self.name, '--format=yaml(state)')

  def describe_node(self, node: str) -> list[str]:
    """Prints the state of a slice."""
    return [
      *('gcloud', 'compute', 'tpus', 'tpu-vm', 'describe', node),
      *self._where(),
      '--format=value(state)',
    ]

  def copy(self, paths: typing.Sequence[str]) -> list[str]:
    """Copies files into the home folder of every worker."""
    return self._command(
      'scp',
      *paths,
      f'{self.name}:',
      *_EVERYWHERE,
      *ROUTES[self.route][0],
      '--quiet',
    )

  def on_workers(self, command: str) -> list[str]:
    """Runs a shell command on every worker at once."""
    return self._command(
      'ssh',
      self.name,
      f'--command={command}',
      *_EVERYWHERE,
      *_ALIVE,
      *ROUTES[self.route][0],
      '--quiet',
    )

  def delete(self) -> list[str]:
    """Deletes the request and the slices, and waits for the end."""
    return self._command('delete', self.name, '--force', '--quiet')

  def _command(self, verb: str, *arguments: str) -> list[str]:
    return [
      *('gcloud', 'compute', 'tpus', 'queued-resources', verb),
      *arguments,
      *self._where(),
    ]

  def _where(self) -> list[str]:
    project = [f'--project={self.project}'] if self.project else []
    return [f'--zone={self.zone}', *project]
