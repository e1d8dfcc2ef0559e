"""`train`, killed at the begin of a phase of a step: PHASE:STEP of KILL."""

import os
import signal

from encdec_adapt import train
from encdec_adapt.cli import command
from encdec_adapt.cluster import watchdog

_beat = watchdog.Watchdog.beat


def beat(self, step, doing='step'):
  _beat(self, step, doing)
  # Each phase begins once, but for `step`, which reads the rows before.
  self.began = (*getattr(self, 'began', ()), (doing, step))
  count = 2 if doing == 'step' else 1
  phase, number = os.environ['KILL'].split(':')
  if self.began.count((phase, int(number))) == count:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == '__main__':
  watchdog.Watchdog.beat = beat
  command.main(__doc__, train.define_flags, train.main)
