"""A stand-in for encdec_adapt.train on the workers of a fake cloud.

Counts to 6 in a file that all workers see, from where it was, and acts on the
event in $FAKE_CLOUD/event. Worker 0 of slice 0 leads.
"""

import os
import pathlib
import signal
import sys
import time

CLOUD = pathlib.Path(os.environ['FAKE_CLOUD'])
LEAD = os.environ['FAKE_POSITION'] == '0-0'
STEPS = 6


def main(argv: list[str]) -> int:
  """Trains."""
  sys.stdout.reconfigure(line_buffering=True)  # As cli.command does.
  event = (CLOUD / 'event').read_text()
  path, part = CLOUD / 'step', CLOUD / 'step.part'
  step = int(path.read_text()) if path.exists() else 0
  assert argv[0] == '--coordinator=auto'
  assert pathlib.Path('launch/install.sh').is_file(), 'not in the source'
  if LEAD:
    print(f'resuming at step {step}; {" ".join(argv)}')
  if event == 'refuse':
    print('Error: config.data')
    return 2
  if event == 'wait':
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    signal.signal(signal.SIGUSR1, lambda *_: print('tracing'))
    print('waiting')
    while not stop:
      time.sleep(0.02)
    return 75
  last = STEPS if event in ('finish', 'drop') else 2
  while LEAD and step < last:
    step += 1
    part.write_text(str(step))
    part.rename(path)
    print(f'step {step}')
    # The connection is cut at step 2; the rest comes after that.
    time.sleep(0.5 if event == 'drop' else 0.02)
  if event == 'vanish':
    time.sleep(600)
  while not LEAD and not (path.exists() and int(path.read_text()) >= last):
    time.sleep(0.02)
  return 0 if last == STEPS else 75


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
