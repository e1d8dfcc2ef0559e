"""Bad flags; that processes meet is tested in multiproc/."""

import pytest

from encdec_adapt.runtime import distributed, errors


def test_one_process_needs_nothing():
  distributed.initialize(None, None, None)
  distributed.initialize('localhost:1234', 1, 0)
  assert distributed.is_lead()
  distributed.barrier('alone')
  assert distributed.from_lead(lambda: None) is None
  assert distributed.from_lead(lambda: 3) == 3


@pytest.mark.parametrize(
  'flags, said',
  [
    (('localhost:1234', None, None), 'give all three'),
    ((None, 2, 0), 'give all three'),
    (('localhost:1234', 2, 2), 'process is 2 of 2'),
    (('localhost:1234', 0, 0), 'process is 0 of 0'),
    (('localhost:1234', 2, -1), 'process is -1 of 2'),
    (('localhost', 2, 0), "coordinator is 'localhost'"),
    ((':80', 2, 0), "coordinator is ':80'"),
    (('h:70000', 2, 0), "coordinator is 'h:70000'"),
    (('auto', None, None), 'cannot be found; coordinator=auto needs'),
    (('auto', 2, 0), "coordinator is 'auto'"),
    (('auto', 1, None), 'auto alone'),
  ],
)
def test_bad_flags_are_named(flags, said):
  with pytest.raises(errors.UserError, match=said):
    distributed.initialize(*flags)
