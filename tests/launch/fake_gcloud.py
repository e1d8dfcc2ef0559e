"""A stand-in for gcloud: a cloud of folders, whose workers are processes.

Run as `gcloud` by launchers under test, with the folder $FAKE_CLOUD:

    calls.jsonl     every call, as a list
    scenario.json   `creations`: states that each created resource comes
                    to; `runs`: what each run of the job meets, as
                    `preempt`; `blips`: calls that fail once a job has run,
                    by the last two words of the command; one of scp leaves
                    out worker 1 of slice 0, and says nothing
    state.json      the queued resource: its state, and states still to come
    home-N-W/       home folder of worker W of slice N

Flags that are not in gcloud_flags.json are refused, as gcloud does. Commands
of `ssh` are run by bash in the home folder of every worker, beside a server
of metadata that says which one it is.
"""

import contextlib
import fcntl
import http.server
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

CLOUD = pathlib.Path(os.environ['FAKE_CLOUD'])
FLAGS = json.loads(
  pathlib.Path(__file__).with_name('gcloud_flags.json').read_text()
)
WORKERS = 2  # Of a slice.


def main(argv: list[str]) -> int:
  """Runs a command of gcloud."""
  with open(CLOUD / 'calls.jsonl', 'a') as calls:
    fcntl.flock(calls, fcntl.LOCK_EX)
    calls.write(json.dumps(argv) + '\n')
  paths = [p for p in FLAGS['commands'] if argv[: len(p.split())] == p.split()]
  if not paths:
    return _fail(f'Invalid choice: {argv}')
  words, known = paths[0].split(), FLAGS['commands'][paths[0]]
  rest = argv[len(words) :]
  flags = {}
  for argument in rest:
    if argument.startswith('-'):
      name, _, value = argument.partition('=')
      if name not in known + FLAGS['everywhere']:
        return _fail(f'unrecognized arguments: {name}')
      flags[name] = value
  positional = [value for value in rest if not value.startswith('-')]
  if 'tpus' in words and '--zone' not in flags:
    return _fail('argument --zone: Must be specified.')
  return globals()['_' + '_'.join(words[-2:]).replace('-', '_')](
    positional, flags
  )


def _fail(message: str) -> int:
  print(f'ERROR: (gcloud) {message}', file=sys.stderr)
  return 2


def _load() -> dict:
  path = CLOUD / 'state.json'
  return json.loads(path.read_text()) if path.exists() else {}


def _save(state: dict) -> None:
  part = CLOUD / f'state.{os.getpid()}'
  part.write_text(json.dumps(state))
  part.rename(CLOUD / 'state.json')


def _queued_resources_create(names, flags) -> int:
  if _load():
    return _fail('ALREADY_EXISTS')
  if _blip('queued-resources create'):
    return _fail('Internal error encountered.')
  one, many = '--node-id' in flags, '--node-count' in flags
  if one == many or not {'--accelerator-type', '--runtime-version'} <= set(
    flags
  ):
    return _fail('Exactly one of (--node-id | --node-count) must be specified')
  slices = int(flags.get('--node-count', 1))
  for slice_ in range(slices):
    for worker in range(WORKERS):
      (CLOUD / f'home-{slice_}-{worker}').mkdir()
  coming = ['WAITING_FOR_RESOURCES', 'PROVISIONING']
  coming += _next('creations')
  _save({'name': names[0], 'slices': slices, 'states': ['CREATING', *coming]})
  return 0


def _queued_resources_describe(names, flags) -> int:
  state = _load()
  if not state or state['name'] != names[0]:
    return _fail('NOT_FOUND: Resource was not found.')
  if _blip('queued-resources describe'):
    return _fail('Unable to find the server at tpu.googleapis.com')
  print(state['states'][0])
  if len(state['states']) > 1:
    state['states'].pop(0)
    _save(state)
  return 0


def _tpu_vm_describe(names, flags) -> int:
  state = _load()
  if not state:
    return _fail('NOT_FOUND')
  if _blip('tpu-vm describe'):
    return _fail('Unable to find the server at tpu.googleapis.com')
  print(state.get('nodes', 'READY'))
  return 0


def _queued_resources_delete(names, flags) -> int:
  state = _load()
  if not state:
    return _fail('NOT_FOUND')
  if state['states'][0] == 'ACTIVE' and '--force' not in flags:
    return _fail('the nodes must be deleted first')
  if _blip('queued-resources delete'):
    return _fail('Internal error encountered.')
  for home in CLOUD.glob('home-*'):
    shutil.rmtree(home)
  (CLOUD / 'state.json').unlink()
  return 0


def _queued_resources_scp(names, flags) -> int:
  *sources, target = names
  assert target == _load()['name'] + ':'
  left_out = 'home-0-1' if _blip('queued-resources scp') else ''
  for home in CLOUD.glob('home-*'):
    for source in sources if home.name != left_out else ():
      shutil.copy(source, home)
  return 0


@contextlib.contextmanager
def _scenario():
  """Yields the scenario, locked while it is changed."""
  path, part = CLOUD / 'scenario.json', CLOUD / 'scenario.part'
  with open(CLOUD / 'scenario.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    scenario = json.loads(path.read_text())
    yield scenario
    part.write_text(json.dumps(scenario))
    part.rename(path)


def _blip(call: str) -> bool:
  """Whether a call fails; the scenario says how many do, once a job ran."""
  if not (CLOUD / 'event').exists():
    return False
  with _scenario() as scenario:
    left = scenario.get('blips', {}).get(call, 0)
    if left:
      scenario['blips'][call] -= 1
  return left > 0


def _storage_du(names, flags) -> int:
  assert '--summarize' in flags
  folder = CLOUD / names[0].removeprefix('gs://')
  size = sum(f.stat().st_size for f in folder.rglob('*') if f.is_file())
  print(f'{size:<13}{names[0]}')
  return 0


def _storage_rsync(names, flags) -> int:
  source, target = names
  folder = CLOUD / source.removeprefix('gs://')
  shutil.copytree(folder, target, dirs_exist_ok=True)
  return 0


def _queued_resources_ssh(names, flags) -> int:
  state = _load()
  assert state['states'][0] == 'ACTIVE'
  assert flags['--node'] == flags['--worker'] == flags['--batch-size'] == 'all'
  event = ''
  if flags['--command'].startswith('bash worker.sh run'):
    event = _next('runs')
    (CLOUD / 'event').write_text(event)
  processes = [
    _worker(slice_, worker, flags['--command'])
    for slice_ in range(state['slices'])
    for worker in range(WORKERS)
  ]
  if event in ('drop', 'vanish'):
    _wait_for(CLOUD / 'step', '2')
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
  # Of several slices, gcloud keeps one status per number of a worker.
  return max(statuses[-WORKERS:])


def _next(key: str):
  """The first entry of a list of the scenario, which is taken off."""
  with _scenario() as scenario:
    return scenario[key].pop(0)


def _wait_for(path: pathlib.Path, text: str) -> None:
  while not path.exists() or path.read_text() != text:
    time.sleep(0.02)


def _worker(slice_: int, worker: int, command: str) -> subprocess.Popen:
  """Starts a command in a worker's home folder."""
  metadata = {
    'agent-worker-number': str(worker),
    'tpu-env': f"ZONE: 'z'\nMEGASCALE_SLICE_ID: '{slice_}'\n",
  }

  class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the metadata server of a virtual machine."""

    def do_GET(self):
      """Sends an attribute."""
      value = metadata.get(self.path.rpartition('/')[2])
      wanted = self.headers['Metadata-Flavor'] == 'Google' and value
      self.send_response(200 if wanted else 404)
      self.end_headers()
      self.wfile.write((value or '').encode())

    def log_message(self, *arguments):
      """Suppresses log lines."""

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  home = CLOUD / f'home-{slice_}-{worker}'
  return subprocess.Popen(
    ['bash', '-c', command],
    cwd=home,
    env={
      **os.environ,
      'HOME': str(home),
      'GCE_METADATA_IP': f'127.0.0.1:{server.server_port}',
      'FAKE_POSITION': f'{slice_}.{worker}',
    },
    stdin=subprocess.DEVNULL,
    start_new_session=True,
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
