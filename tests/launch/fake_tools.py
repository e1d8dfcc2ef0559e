"""Stand-ins for the programs that launchers run, with a cloud behind gcloud.

    fake_tools.py PROGRAM [arguments]

Every call is appended to $FAKE_CLOUD/calls.jsonl. A command or flag that is
not in tool_flags.json is refused with status 2. gcloud works on a cloud of
folders whose workers are processes; the other programs do nothing more.

    scenario.json   `creations`: states of each resource after its creation;
                    `runs`: event of each run of the job, such as `preempt`;
                    `failures`: number of calls that fail after a job has
                    started, by the last two words of the command. An scp
                    that fails skips worker 1 of slice 0 without a message.
    state.json      the queued resource: its state, and the states to come
    home-N-W/       home folder of worker W of slice N

`ssh` runs its command with bash in the home folder of every worker.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

CLOUD = pathlib.Path(os.environ['FAKE_CLOUD'])
STATE = CLOUD / 'state.json'
COMMANDS = json.loads(
  pathlib.Path(__file__).with_name('tool_flags.json').read_text()
)['commands']
WORKERS = 2  # Of a slice.


def main(*call: str) -> int:
  """Checks and records a call, and runs it if it is gcloud's."""
  found = [c for c in COMMANDS if list(call[: len(c.split())]) == c.split()]
  if not found:
    return _fail(f'Invalid choice: {call}')
  words, known = found[0].split(), COMMANDS[found[0]]
  flags, positional = {}, []
  for argument in call[len(words) :]:
    name, _, value = argument.partition('=')
    if not argument.startswith('-'):
      positional.append(argument)
    elif call[0] == 'sbatch' and positional:
      break  # Arguments of the script.
    elif name not in known:
      return _fail(f'unrecognized arguments: {name}')
    else:
      flags[name] = value
  with open(CLOUD / 'calls.jsonl', 'a') as calls:
    calls.write(json.dumps(call) + '\n')
  if call[0] != 'gcloud':
    return 0
  if 'tpus' in words and '--zone' not in flags:
    return _fail('argument --zone: Must be specified.')
  action = ' '.join(words[-2:])
  if action != 'queued-resources scp' and _fails(action):
    return _fail('Unable to find the server at tpu.googleapis.com')
  return ACTIONS[action](positional, flags)


def _fail(message: str) -> int:
  print(f'ERROR: {message}', file=sys.stderr)
  return 2


def _load() -> dict:
  return json.loads(STATE.read_text()) if STATE.exists() else {}


def _save(state: dict) -> None:
  part = CLOUD / f'state.{os.getpid()}'
  part.write_text(json.dumps(state))
  part.rename(STATE)


def _scenario() -> dict:
  return json.loads((CLOUD / 'scenario.json').read_text())


def _count(key: str) -> int:
  """Returns the number of earlier calls with this key in the scenario."""
  path = CLOUD / f'count {key}'
  count = int(path.read_text()) if path.exists() else 0
  path.write_text(str(count + 1))
  return count


def _fails(action: str) -> bool:
  """Returns whether the scenario lets this call fail."""
  limit = 0
  if (CLOUD / 'event').exists():  # A job has started.
    limit = _scenario()['failures'].get(action, 0)
  return limit > 0 and _count(action) < limit


def _create(names, flags) -> int:
  if _load():
    return _fail('ALREADY_EXISTS')
  if ('--node-id' in flags) == ('--node-count' in flags):
    return _fail('Exactly one of (--node-id | --node-count) must be specified')
  slices = int(flags.get('--node-count', 1))
  for number in range(slices * WORKERS):
    (CLOUD / f'home-{number // WORKERS}-{number % WORKERS}').mkdir()
  coming = _scenario()['creations'][_count('creations')]
  states = ['CREATING', 'WAITING_FOR_RESOURCES', 'PROVISIONING', *coming]
  _save({'name': names[0], 'slices': slices, 'states': states})
  return 0


def _describe(names, flags) -> int:
  state = _load()
  if not state or state['name'] != names[0]:
    return _fail('NOT_FOUND: Resource was not found.')
  print(state['states'][0])
  if len(state['states']) > 1:
    state['states'].pop(0)
    _save(state)
  return 0


def _describe_node(names, flags) -> int:
  state = _load()
  if not state:
    return _fail('NOT_FOUND')
  print(state.get('nodes', 'READY'))
  return 0


def _delete(names, flags) -> int:
  state = _load()
  if not state:
    return _fail('NOT_FOUND')
  if state['states'][0] == 'ACTIVE' and '--force' not in flags:
    return _fail('the nodes must be deleted first')
  for home in CLOUD.glob('home-*'):
    shutil.rmtree(home)
  STATE.unlink()
  return 0


def _scp(names, flags) -> int:
  *sources, target = names
  assert target == _load()['name'] + ':'
  skipped = 'home-0-1' if _fails('queued-resources scp') else ''
  for home in CLOUD.glob('home-*'):
    for source in sources if home.name != skipped else ():
      shutil.copy(source, home)
  return 0


def _ssh(names, flags) -> int:
  state = _load()
  assert state['states'][0] == 'ACTIVE'
  assert flags['--node'] == flags['--worker'] == flags['--batch-size'] == 'all'
  event = ''
  if flags['--command'].startswith('bash worker.sh run'):
    event = _scenario()['runs'][_count('runs')]
    (CLOUD / 'event').write_text(event)
  processes = [
    subprocess.Popen(
      ['bash', '-c', flags['--command']],
      cwd=home,
      env={**os.environ, 'HOME': str(home), 'FAKE_POSITION': home.name[5:]},
      stdin=subprocess.DEVNULL,
      start_new_session=True,
    )
    for home in sorted(CLOUD.glob('home-*'))
  ]
  if event in ('drop', 'vanish'):
    step = CLOUD / 'step'
    while not step.exists() or step.read_text() != '2':
      time.sleep(0.02)
    for process in processes:
      os.killpg(process.pid, signal.SIGKILL)
    if event == 'drop':
      return 255
    for pid in CLOUD.glob('home-*/encdec_adapt.job/pid'):
      os.kill(int(pid.read_text()), signal.SIGKILL)
    _save({**state, 'states': ['SUSPENDING', 'SUSPENDED']})
    time.sleep(600)  # Connections to machines that are gone hang.
  statuses = [process.wait() for process in processes]
  if event == 'preempt':
    _save({**state, 'states': ['ACTIVE', 'SUSPENDING', 'SUSPENDED']})
  if event == 'lose_slice':
    _save({**state, 'nodes': 'PREEMPTED'})
  # With several slices, gcloud keeps one status per worker number.
  return max(statuses[-WORKERS:])


def _du(names, flags) -> int:
  folder = CLOUD / names[0].removeprefix('gs://')
  size = sum(f.stat().st_size for f in folder.rglob('*') if f.is_file())
  print(f'{size:<13}{names[0]}')
  return 0


def _rsync(names, flags) -> int:
  source, target = names
  folder = CLOUD / source.removeprefix('gs://')
  shutil.copytree(folder, target, dirs_exist_ok=True)
  return 0


ACTIONS = {
  'queued-resources create': _create,
  'queued-resources describe': _describe,
  'queued-resources delete': _delete,
  'queued-resources scp': _scp,
  'queued-resources ssh': _ssh,
  'tpu-vm describe': _describe_node,
  'storage du': _du,
  'storage rsync': _rsync,
}

if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
