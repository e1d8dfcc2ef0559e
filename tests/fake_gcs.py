"""An object store on loopback: the part of GCS's JSON API that clients use.

It holds whole objects by name, each with a generation. There are no
folders, no renames and no appending; an upload that breaks off leaves
nothing; a list shows what was put before it. Conditions on generations hold.
Source: the reference of the API, cloud.google.com/storage/docs/json_api.

    with fake_gcs.serve() as store:
      store.environment()  # For a process that shall use it.
"""

import base64
from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import hashlib
from http import server
import itertools
import json
import re
import sys
import threading
from urllib import parse

import google_crc32c

BUCKET = 'bucket'
URL = f'gs://{BUCKET}'
_OBJECT = re.compile(r'(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)')
_COPY = re.compile(
  r'/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)'
)
_UPLOAD = re.compile(r'(?:/resumable)?/upload/storage/v1/b/([^/]+)/o')
_LIST = re.compile(r'/storage/v1/b/([^/]+)/o')
_PAGE = 1000  # Items of a list that are sent at once.


@dataclasses.dataclass(frozen=True)
class Object:
  """A stored object."""

  data: bytes
  generation: int

  def describe(self, name: str) -> dict[str, str]:
    """Returns its resource, as the API sends it."""
    crc = google_crc32c.Checksum(self.data).digest()
    return {
      'kind': 'storage#object',
      'name': name,
      'bucket': BUCKET,
      'generation': str(self.generation),
      'metageneration': '1',
      'size': str(len(self.data)),
      'crc32c': base64.b64encode(crc).decode(),
      'md5Hash': base64.b64encode(hashlib.md5(self.data).digest()).decode(),
      'contentType': 'application/octet-stream',
      'timeCreated': '2026-01-01T00:00:00.000Z',
      'updated': '2026-01-01T00:00:00.000Z',
    }


class _Refused(Exception):
  """A request that is answered with an error status."""

  def __init__(self, status: int):
    super().__init__(status)
    self.status = status


class Store:
  """The objects of one bucket, and the state of their server.

  Attributes:
    objects: objects by name.
    requests: 'METHOD path' of all requests so far.
    refuses: status with which every request fails; 0 for none.
  """

  def __init__(self):
    self.objects: dict[str, Object] = {}
    self.requests: list[str] = []
    self.lock = threading.Lock()
    self.uploads: dict[str, tuple[Mapping[str, str], bytearray]] = {}
    self.refuses = 0
    self._folders = itertools.count()
    self._generations = itertools.count(1_000_000)
    self.port = 0

  @property
  def address(self) -> str:
    """URL of the server."""
    return f'http://127.0.0.1:{self.port}'

  def environment(self) -> dict[str, str]:
    """Returns variables by which clients find it without credentials."""
    return {
      'STORAGE_EMULATOR_HOST': self.address,
      'TENSORSTORE_GCS_HTTP_URL': self.address,
      'GCE_METADATA_ROOT': '127.0.0.1:1',
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
      'GOOGLE_CLOUD_PROJECT': 'project',
      'NO_GCE_CHECK': 'true',
    }

  def new_folder(self) -> str:
    """Returns the address of an unused folder."""
    return f'{URL}/folder-{next(self._folders)}'

  def key(self, path: object) -> str:
    """Returns the name of the object at an address."""
    return str(path).removeprefix(f'{URL}/')

  def names(self, prefix: str = '') -> list[str]:
    """Returns the sorted names of the objects."""
    with self.lock:
      return sorted(name for name in self.objects if name.startswith(prefix))

  def get(self, name: str) -> Object:
    """Returns an object; refuses with 404 if there is none."""
    if name not in self.objects:
      raise _Refused(404)
    return self.objects[name]

  def put(
    self, name: str, data: bytes, query: Mapping[str, str] = {}
  ) -> Object:
    """Stores an object if its generation is the one of the query."""
    with self.lock:
      self._check(name, query)
      self.objects[name] = Object(bytes(data), next(self._generations))
      return self.objects[name]

  def delete(self, name: str, query: Mapping[str, str]) -> None:
    """Deletes an object if its generation is the one of the query."""
    with self.lock:
      self.get(name)
      self._check(name, query)
      del self.objects[name]

  def _check(self, name: str, query: Mapping[str, str]) -> None:
    found = self.objects.get(name)
    generation = str(found.generation if found else 0)
    if query.get('ifGenerationMatch', generation) != generation:
      raise _Refused(412)


class _Handler(server.BaseHTTPRequestHandler):
  """One connection."""

  protocol_version = 'HTTP/1.1'
  # An answer leaves in one piece, at once.
  wbufsize = 1 << 16
  disable_nagle_algorithm = True
  store: Store  # Set by `serve`.

  def log_message(self, *unused) -> None:
    """Tests' output is for tests."""

  def _begin(self) -> tuple[str, dict[str, str], bytes]:
    """Path, query and body of the request."""
    body = self._body()
    path, _, query = self.path.partition('?')
    self.store.requests.append(f'{self.command} {parse.unquote(path)}')
    return path, dict(parse.parse_qsl(query)), body

  def _body(self) -> bytes:
    if self.headers.get('Transfer-Encoding', '') != 'chunked':
      return self.rfile.read(int(self.headers.get('Content-Length') or 0))
    parts = []
    while size := int(self.rfile.readline().split(b';')[0], 16):
      parts.append(self.rfile.read(size))
      self.rfile.readline()
    self.rfile.readline()
    return b''.join(parts)

  def _send(
    self, status: int, body: bytes = b'', headers: Mapping[str, str] = {}
  ) -> None:
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    if status != 304:
      self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    if self.command != 'HEAD' and status != 304:
      self.wfile.write(body)

  def _send_json(self, content: object, status: int = 200) -> None:
    self._send(
      status,
      json.dumps(content).encode(),
      {'Content-Type': 'application/json; charset=UTF-8'},
    )

  def _handle(self) -> None:
    """Answers a request by the method for its verb."""
    path, query, body = self._begin()
    try:
      if self.store.refuses:
        raise _Refused(self.store.refuses)
      bucket = re.search('/b/([^/]+)', path)
      if bucket and bucket[1] != BUCKET:
        raise _Refused(404)
      getattr(self, f'_{self.command.lower()}')(path, query, body)
    except _Refused as refused:
      error = {'code': refused.status, 'message': 'refused'}
      self._send_json({'error': error}, refused.status)

  do_GET = do_POST = do_PUT = do_DELETE = _handle

  def _get(self, path: str, query: Mapping[str, str], body: bytes) -> None:
    if found := _OBJECT.fullmatch(path):
      self._get_object(parse.unquote(found[2]), query)
    elif _LIST.fullmatch(path):
      self._list(query)
    elif path == f'/storage/v1/b/{BUCKET}':
      self._send_json({'kind': 'storage#bucket', 'name': BUCKET})
    else:
      raise _Refused(404)

  def _get_object(self, name: str, query: Mapping[str, str]) -> None:
    found = self.store.get(name)
    generation = str(found.generation)
    if query.get('ifGenerationNotMatch') == generation:
      return self._send(304)
    if query.get('ifGenerationMatch', generation) != generation:
      raise _Refused(412)
    resource = found.describe(name)
    if query.get('alt') != 'media':
      return self._send_json(resource)
    data, status, headers = found.data, 200, {}
    if asked := self.headers.get('Range'):
      first, _, last = asked.removeprefix('bytes=').partition('-')
      start = int(first) if first else len(data) - int(last)
      stop = int(last) + 1 if first and last else len(data)
      if start >= len(data):
        return self._send(416)
      stop = min(stop, len(data))
      headers = {'Content-Range': f'bytes {start}-{stop - 1}/{len(data)}'}
      data, status = data[start:stop], 206
    self._send(
      status,
      data,
      {
        **headers,
        'Content-Type': 'application/octet-stream',
        'ETag': f'"{generation}"',
        'x-goog-generation': str(generation),
        'x-goog-metageneration': '1',
        'x-goog-stored-content-length': str(len(found.data)),
        'x-goog-hash': f'crc32c={resource["crc32c"]}',
      },
    )

  def _list(self, query: Mapping[str, str]) -> None:
    prefix, delimiter = query.get('prefix', ''), query.get('delimiter')
    start = max(query.get('startOffset', ''), query.get('pageToken', ''))
    end = query.get('endOffset')
    entries: dict[str, Object | None] = {}
    for name in self.store.names(prefix):
      if name < start or (end and name >= end):
        continue
      rest = name[len(prefix) :]
      if delimiter and delimiter in rest:
        folder = prefix + rest.partition(delimiter)[0] + delimiter
        entries.setdefault(folder, None)
      else:
        entries[name] = self.store.objects[name]
    size = min(int(query.get('maxResults') or _PAGE), _PAGE)
    names = list(entries)
    page = names[:size]
    content: dict[str, object] = {
      'kind': 'storage#objects',
      'items': [entries[n].describe(n) for n in page if entries[n]],
      'prefixes': [n for n in page if entries[n] is None],
    }
    if len(names) > size:
      content['nextPageToken'] = names[size]
    self._send_json(content)

  def _post(self, path: str, query: Mapping[str, str], body: bytes) -> None:
    if 'upload_id' in query:
      return self._put(path, query, body)
    if _UPLOAD.fullmatch(path):
      return self._upload(query, body)
    found = _COPY.fullmatch(path)
    if not found:
      raise _Refused(404)
    source, name = (parse.unquote(found[i]) for i in (2, 4))
    made = self.store.put(name, self.store.get(source).data, query)
    resource = made.describe(name)
    sizes = dict.fromkeys(
      ('objectSize', 'totalBytesRewritten'), resource['size']
    )
    self._send_json({'done': True, 'resource': resource, **sizes})

  def _upload(self, query: Mapping[str, str], body: bytes) -> None:
    kind = query.get('uploadType')
    if kind == 'resumable':
      name = query.get('name') or json.loads(body)['name']
      key = str(len(self.store.uploads) + 1)
      self.store.uploads[key] = ({**query, 'name': name}, bytearray())
      place = f'{self.store.address}/resumable/upload/storage/v1/b/{BUCKET}/o'
      return self._send(200, b'', {'Location': f'{place}?upload_id={key}'})
    if kind == 'multipart':
      found = re.search('boundary="?([^";]+)', self.headers['Content-Type'])
      about, body = _parts(body, f'--{found[1]}'.encode())
      name = query.get('name') or json.loads(about)['name']
      query = {**query, 'name': name}
    self._store(query, body)

  def _store(self, query: Mapping[str, str], data: bytes) -> None:
    made = self.store.put(query['name'], data, query)
    self._send_json(made.describe(query['name']))

  def _put(self, path: str, query: Mapping[str, str], body: bytes) -> None:
    """Adds a part of a resumable upload; the last one makes the object."""
    wanted, so_far = self.store.uploads[query['upload_id']]
    so_far += body
    total = self.headers.get('Content-Range', '*/*').rpartition('/')[2]
    if total == '*' or len(so_far) < int(total):
      last = {'Range': f'bytes=0-{len(so_far) - 1}'} if so_far else {}
      return self._send(308, b'', last)
    self._store(wanted, bytes(so_far))

  def _delete(self, path: str, query: Mapping[str, str], body: bytes) -> None:
    self.store.delete(parse.unquote(_OBJECT.fullmatch(path)[2]), query)
    self._send(204)


def _parts(body: bytes, boundary: bytes) -> list[bytes]:
  """The parts of a multipart body without their headers, byte by byte.

  Lines end as the first does (clients differ), so that a part may end in
  either line ending, or a half of one, itself.
  """
  line_end = b'\r\n' if body.startswith(boundary + b'\r\n') else b'\n'
  parts = (line_end + body).split(line_end + boundary)[1:-1]
  return [part.partition(2 * line_end)[2] for part in parts]


class _Server(server.ThreadingHTTPServer):
  """One thread per connection."""

  daemon_threads = True

  def handle_error(self, request, client_address) -> None:
    """Clients may leave before the answer; anything else is shown."""
    if not isinstance(sys.exc_info()[1], ConnectionError):
      super().handle_error(request, client_address)


@contextlib.contextmanager
def serve() -> Iterator[Store]:
  """Runs an empty store in threads of this process."""
  store = Store()
  handler = type('Handler', (_Handler,), {'store': store})
  listening = _Server(('127.0.0.1', 0), handler)
  store.port = listening.server_address[1]
  thread = threading.Thread(target=listening.serve_forever, daemon=True)
  thread.start()
  try:
    yield store
  finally:
    listening.shutdown()
    listening.server_close()
    thread.join()
