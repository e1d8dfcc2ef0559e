"""Names of sources."""

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import text_sources


def test_sources_without_text_are_refused(tmp_path):
  for name in ('pyhton', 'text:', 'http://x'):
    with pytest.raises(errors.UserError, match=r'forms are .*python\[:FILE'):
      text_sources.open_source(name)
  with pytest.raises(errors.UserError, match='no file matches .*absent'):
    text_sources.open_source(f'text:{tmp_path}/absent*')
  for name in 'ab':
    (tmp_path / name).write_text('')
  with pytest.raises(errors.UserError, match='has no text;'):
    list(text_sources.open_source(f'text:{tmp_path}/*').documents())
