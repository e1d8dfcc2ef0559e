"""The text of Python: its documents, and which of them are held out."""

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import python_source, text_sources


@pytest.fixture(scope='module')
def python_documents():
  return list(
    text_sources.open_source('python', max_bytes=1_500_000).documents()
  )


def test_python_has_topics_docstrings_and_sources(python_documents):
  assert len(python_documents) > 30  # Modules without docstrings are not.
  assert all(document.text for document in python_documents)
  ids = []
  # Wants none, so that nothing is read.
  list(text_sources.open_source('python').documents(ids.append))
  assert len(set(ids)) == len(ids) > 500
  assert {'topic/for', 'ast.py::docstrings', 'json/decoder.py::source'} < set(
    ids
  )
  parts = {part for i in ids for part in i.partition('::')[0].split('/')}
  assert not parts & {'site-packages', 'test', 'tests', 'encodings'}


def test_python_is_the_same_again(python_documents):
  source = text_sources.open_source('python', max_bytes=1_500_000)
  assert list(source.documents()) == python_documents
  assert source.fingerprint() == source.fingerprint()
  assert (
    source.fingerprint() != text_sources.open_source('python').fingerprint()
  )


def test_docstrings_are_read_without_importing():
  source = '''"""Module."""
raise SystemExit('imported')
class A:
  """Class."""
  def f(self, x=1):
    """Method.

      Indented.
    """
async def g(): """Coroutine \\ud800."""
def silent(): pass
'''
  assert python_source._docstrings(source) == (
    'Module.\n\n\nA\n\nClass.\n\n\nA.f(self, x=1)\n\nMethod.\n\nIndented.'
    '\n\n\ng()\n\nCoroutine \ufffd.\n'
  )
  assert python_source._docstrings('print "Python 2"') == ''


def test_a_list_of_contents_decides_what_python_holds_out(tmp_path):
  every = {d.id: d.text for d in text_sources.open_source('python').documents()}
  chosen = ('topic/for', 'json/decoder.py::source')
  path = tmp_path / 'held_out.txt'
  path.write_text(
    '\n'.join(python_source.content_digest(every[name]) for name in chosen)
  )
  source = text_sources.open_source(f'python:{path}')
  held_out, trained = (
    {name for name in every if source.in_split(name, split, 0.5, 0)}
    for split in ('eval', 'train')
  )
  assert held_out == {*chosen, 'json/decoder.py::docstrings'}
  assert trained == set(every) - held_out
  assert (
    source.fingerprint() != text_sources.open_source('python').fingerprint()
  )
  with pytest.raises(errors.UserError, match='held-out .* cannot be read'):
    text_sources.open_source(f'python:{tmp_path}/absent')
