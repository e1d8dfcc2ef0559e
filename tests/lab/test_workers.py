"""Workers on one machine."""

import os
import signal
import sys
import threading
import time

import pytest

from encdec_adapt.lab import workers

_WORKER = """#!/bin/sh
TRAP
touch "$0.$$"
while :; do sleep 0.05; done
"""


# The last worker drops the first SIGTERM, as a training past its last step.
@pytest.mark.parametrize(
  'trap',
  ["trap 'exit 75' TERM", '', """trap 'trap "exit 75" TERM' TERM"""],
)
def test_sigterm_stops_all_workers(trap, tmp_path, monkeypatch):
  script = tmp_path / 'worker'
  script.write_text(_WORKER.replace('TRAP', trap))
  script.chmod(0o700)
  monkeypatch.setattr(sys, 'executable', str(script))
  jobs = min(len(workers.cores()), 2)

  def interrupt():
    while len(list(tmp_path.glob('worker.*'))) < jobs:
      time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(workers, '_gpus', list)
  monkeypatch.setattr(workers, '_SIGNAL_INTERVAL', 0.5)
  before = signal.getsignal(signal.SIGTERM)
  threading.Thread(target=interrupt).start()
  assert workers.start([], jobs) == [75] * jobs
  assert signal.getsignal(signal.SIGTERM) == before
