"""Headers of safetensors files, sound, damaged and hostile."""

import json

import hypothesis
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.huggingface import safetensors_header, tensor_folder
from tests.huggingface import forged

GOOD = {
  '__metadata__': {'format': 'pt'},
  'a': forged.entry('F32', [2, 2], 0, 16),
  'b': forged.entry('BF16', [3], 16, 22),
  'c': forged.entry('I64', [], 22, 30),
  'd': forged.entry('U8', [0, 5], 30, 30),
}
DATA = bytes(range(30))


def test_a_header_gives_names_shapes_dtypes_and_places(tmp_path):
  file = forged.write(tmp_path / 'x.safetensors', GOOD, DATA)
  header = safetensors_header.read(file)
  start = file.stat().st_size - len(DATA)
  info = safetensors_header.TensorInfo
  assert dict(header.tensors) == {
    'a': info((2, 2), np.dtype('float32'), file, start),
    'b': info((3,), np.dtype(ml_dtypes.bfloat16), file, start + 16),
    'c': info((), np.dtype('int64'), file, start + 22),
    'd': info((0, 5), np.dtype('uint8'), file, start + 30),
  }
  assert [t.nbytes for t in header.tensors.values()] == [16, 6, 8, 0]
  assert header.metadata == {'format': 'pt'}


@pytest.mark.parametrize(
  'header, data, says',
  [
    # Offsets.
    ({'a': forged.entry('U8', [2], 0, 2)}, b'x', "the last is 'a'"),
    ({'a': forged.entry('U8', [2], 0, 2)}, b'xyz', "the last is 'a'"),
    (
      {
        'a': forged.entry('U8', [2], 0, 2),
        'b': forged.entry('U8', [2], 1, 3),
      },
      b'xyz',
      "tensor 'b' overlaps the one before: it starts at byte 1, not 2",
    ),
    (
      {
        'a': forged.entry('U8', [1], 0, 1),
        'b': forged.entry('U8', [1], 2, 3),
      },
      b'xyz',
      "tensor 'b' leaves a gap before: it starts at byte 2, not 1",
    ),
    ({'a': forged.entry('U8', [1], 1, 2)}, b'xy', "tensor 'a' leaves a gap"),
    ({'a': forged.entry('U8', [1], 2, 1)}, b'xy', "'a' has data_offsets [2"),
    ({'a': forged.entry('U8', [1], -1, 0)}, b'x', "'a' has data_offsets [-1"),
    ({'a': forged.entry('U8', [1], 0, 2**70)}, b'x', "tensor 'a' of shape"),
    ({'a': forged.entry('U8', [1], 0, 1.0)}, b'x', "'a' has data_offsets"),
    ({'a': forged.entry('U8', [1], False, True)}, b'x', "'a' has data_offset"),
    ({'a': GOOD['a'] | {'data_offsets': [0]}}, b'x', "'a' has data_offsets"),
    ({'a': GOOD['a'] | {'data_offsets': '01'}}, b'x', "'a' has data_offsets"),
    # Shapes.
    (
      {'a': forged.entry('F32', [2], 0, 6)},
      b'123456',
      "tensor 'a' of shape [2] in F32 takes 8 bytes but has 6",
    ),
    ({'a': forged.entry('U8', [-1], 0, 1)}, b'x', "'a' has shape [-1]"),
    ({'a': forged.entry('U8', [1.0], 0, 1)}, b'x', "'a' has shape [1.0]"),
    ({'a': forged.entry('U8', 1, 0, 1)}, b'x', "'a' has shape 1"),
    ({'a': forged.entry('U8', [0, 2**63], 0, 0)}, b'', 'out of bounds'),
    ({'a': forged.entry('U8', [1] * 65, 0, 1)}, b'x', 'out of bounds'),
    # Entries.
    ({'a': forged.entry('F4', [1], 0, 1)}, b'x', "'a' has dtype 'F4', which"),
    ({'a': forged.entry(['U8'], [1], 0, 1)}, b'x', "'a' has dtype ['U8']"),
    ({'a': {'dtype': 'U8', 'shape': [1]}}, b'x', "tensor 'a' is not desc"),
    ({'a': [1]}, b'x', "tensor 'a' is not described by data_offsets, dtype"),
    ({'__metadata__': {'format': 1}}, b'', '__metadata__ is not text by name'),
    ({'__metadata__': None}, b'', '__metadata__ is not text by name'),
    # JSON.
    (
      '{"a": %s, "a": %s}' % ((json.dumps(GOOD['a']),) * 2),
      b'x' * 16,
      "the key 'a' comes twice",
    ),
    ('{"a": {"dtype": "U8", "dtype": "I8"}}', b'', "key 'dtype' comes twice"),
    ('{"a": ', b'', 'no valid JSON'),
    ('{"a": NaN}', b'', 'NaN is not JSON'),
    ('{"a": ' + '[' * 100_000, b'', 'no valid JSON'),
    (r'{"\ud800": 1}', b'', 'no valid JSON'),
    (r'{"__metadata__": {"a": "\ud800"}}', b'', 'no valid JSON'),
    (b'{"\xff": 1}', b'', 'no valid JSON'),
    ('[1]', b'', "its header does not start with '{'"),
    (' {}', b'', "its header does not start with '{'"),
    ('', b'', "its header does not start with '{'"),
    ({}, b'x', 'its tensors need 10 bytes, the file has 11'),
  ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, data, says):
  file = forged.write(tmp_path / 'x.safetensors', header, data)
  with pytest.raises(errors.UserError) as caught:
    safetensors_header.read(file)
  message = str(caught.value)
  assert message.startswith(str(file)) and says in message
  assert 'fetch it again' in message or 'Convert it first' in message


@pytest.mark.parametrize('length', [3, 10**6, 2**63, 2**64 - 1])
def test_a_forged_length_is_refused(tmp_path, length):
  file = forged.write(tmp_path / 'x.safetensors', '{}', length=length)
  with pytest.raises(
    errors.UserError, match=f'header has {length} bytes, but the file has 10'
  ):
    safetensors_header.read(file)


def test_a_header_longer_than_the_limit_is_not_even_read(tmp_path):
  file = tmp_path / 'x.safetensors'
  with open(file, 'wb') as sparse:
    sparse.write((200_000_000).to_bytes(8, 'little'))
    sparse.truncate(300_000_000)
  with pytest.raises(errors.UserError, match='no header more than 100000000'):
    safetensors_header.read(file)


@pytest.mark.parametrize('size', [0, 1, 7])
def test_a_file_without_room_for_a_header_is_refused(tmp_path, size):
  (tmp_path / 'x.safetensors').write_bytes(bytes(size))
  with pytest.raises(errors.UserError, match=f'has {size} bytes, too few'):
    safetensors_header.read(tmp_path / 'x.safetensors')


def test_every_truncation_is_refused(tmp_path):
  file = forged.write(tmp_path / 'x.safetensors', GOOD, DATA)
  whole = file.read_bytes()
  for size in range(len(whole)):
    file.write_bytes(whole[:size])
    with pytest.raises(errors.UserError, match='x.safetensors'):
      safetensors_header.read(file)


def test_a_git_lfs_pointer_is_named(tmp_path):
  file = tmp_path / 'x.safetensors'
  file.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\n')
  with pytest.raises(errors.UserError, match='git lfs pull'):
    safetensors_header.read(file)


def test_a_missing_file_and_a_folder_cannot_be_read(tmp_path):
  for path in (tmp_path / 'absent.safetensors', tmp_path):
    with pytest.raises(errors.UserError, match=f'{path} cannot be read'):
      safetensors_header.read(path)


def test_build_is_what_read_gives_and_aligns_every_tensor(tmp_path):
  file = tmp_path / 'x.safetensors'
  tensors = [
    (f'{name}-é', (3,), dtype)
    for name, dtype in safetensors_header.DTYPES.items()
  ]
  beginning, header = safetensors_header.build(file, tensors, {'k': 'v'})
  assert len(beginning) % 8 == 0
  file.write_bytes(beginning + bytes(sum(3 * t[2].itemsize for t in tensors)))
  assert safetensors_header.read(file) == header
  for info in header.tensors.values():
    assert info.offset % info.dtype.itemsize == 0
  widths = [info.dtype.itemsize for info in header.tensors.values()]
  assert widths == sorted(widths, reverse=True)


# -- Anything at all ---------------------------------------------------------


def _right_or_refused(folder, content: bytes) -> bool:
  """Reads bytes as a folder's weights and compares with the library.

  Returns whether they were read.
  """
  library = pytest.importorskip('safetensors')
  (folder / tensor_folder.SINGLE).write_bytes(content)
  try:
    opened = tensor_folder.TensorFolder.open(folder)
  except errors.UserError as error:
    assert str(folder) in str(error)
    return False
  # What the library does not read must have been refused above.
  for name, view in library.deserialize(content):
    array = opened.read(name)
    assert list(array.shape) == view['shape']
    assert safetensors_header.DTYPES[view['dtype']] == array.dtype
    assert array.tobytes() == bytes(view['data'])
  assert len(opened.tensors) == len(library.deserialize(content))
  return True


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """One for all examples, whose only file each writes anew."""
  return tmp_path_factory.mktemp('anything')


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(content=st.binary(max_size=64))
def test_any_bytes_are_refused_or_right(folder, content):
  _right_or_refused(folder, content)


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
  text=st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)),
  data=st.binary(max_size=8),
)
def test_any_header_text_is_refused_or_right(folder, text, data):
  content = len(text).to_bytes(8, 'little') + text + data
  _right_or_refused(folder, content)


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(data=st.data())
def test_any_mutation_of_a_file_is_refused_or_right(folder, data):
  text = json.dumps(GOOD).encode()
  content = bytearray(len(text).to_bytes(8, 'little') + text + DATA)
  for _ in range(data.draw(st.integers(1, 4))):
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(
      st.one_of(
        st.integers(0, 255), st.sampled_from(list(b'0123456789,{}[]"-. e'))
      )
    )
  _right_or_refused(folder, bytes(content))


_JSON = st.recursive(
  st.none() | st.booleans() | st.integers(-2, 2**65) | st.text(max_size=3),
  lambda inner: st.lists(inner, max_size=3),
  max_leaves=4,
)
_SIZES = st.lists(st.integers(0, 4), max_size=3)
_ENTRIES = st.fixed_dictionaries(
  {
    'dtype': st.sampled_from(['U8', 'BF16', 'F32', 'F64', 'F8_E4M3', 'x']),
    'shape': _SIZES | _JSON,
    'data_offsets': st.tuples(st.integers(0, 8), st.integers(0, 8)) | _JSON,
  }
)


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(
  header=st.dictionaries(st.text(max_size=3), _ENTRIES | _JSON, max_size=3),
  data=st.binary(max_size=16),
)
def test_any_description_is_refused_or_right(folder, header, data):
  text = json.dumps(header).encode()
  content = len(text).to_bytes(8, 'little') + text + data
  _right_or_refused(folder, content)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(
  tensors=st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.tuples(st.sampled_from(sorted(safetensors_header.DTYPES)), _SIZES),
    max_size=4,
  ),
  data=st.data(),
)
def test_any_sound_file_is_read(folder, tensors, data):
  header, end = {}, 0
  for name, (dtype, shape) in tensors.items():
    nbytes = int(np.prod(shape)) * safetensors_header.DTYPES[dtype].itemsize
    header[name] = forged.entry(dtype, shape, end, end + nbytes)
    end += nbytes
  text = json.dumps(header).encode()
  content = data.draw(st.binary(min_size=end, max_size=end))
  assert _right_or_refused(
    folder, len(text).to_bytes(8, 'little') + text + content
  )
