"""A Hugging Face Hub on loopback: the part of its API that the client uses.

    with fake_hub.serve(monkeypatch, cache) as hub:
      hub.put('org/name', folder)

Repositories have one branch. Source: the requests of `huggingface_hub` 2.4
(hf_api.py, file_download.py).
"""

import base64
from collections.abc import Iterator
import contextlib
import hashlib
from http import server
import importlib
import json
import pathlib
import re
import threading
from urllib import parse

from huggingface_hub import constants

from encdec_adapt.files import hub as hub_lib

_API = re.compile(r'/api/(?:model|dataset)s/([^/]+/[^/]+)(?:/(\w+)/([^/]+))?')
_FILE = re.compile(r'(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)')


class Hub(server.ThreadingHTTPServer):
  """The repositories of a server, and what it shall do wrong.

  Attributes:
    commits: ORG/NAME -> commit -> name of a file -> content; the last commit
      is that of the branch.
    private: repositories that were made private.
    downloads: names of the files that were sent.
    refusal: status and error code that every request gets; None for answers.
    breaks: names of files that end after a half.
  """

  def __init__(self):
    """Makes a server without repositories."""
    super().__init__(('127.0.0.1', 0), _Handler)
    self.url = f'http://127.0.0.1:{self.server_port}'
    self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
    self.private: set[str] = set()
    self.downloads: list[str] = []
    self.refusal: tuple[int, str] | None = None
    self.breaks: set[str] = set()

  def put(self, repo: str, folder: pathlib.Path, **files: bytes) -> str:
    """Commits the files of a folder, and others; returns the commit."""
    for path in filter(pathlib.Path.is_file, folder.rglob('*')):
      files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return self.commit(repo, files)

  def commit(self, repo: str, files: dict[str, bytes]) -> str:
    """Adds a commit of all files; returns its name."""
    name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    self.commits.setdefault(repo, {})[name] = files
    return name


@contextlib.contextmanager
def serve(monkeypatch, cache: pathlib.Path) -> Iterator[Hub]:
  """Serves a hub that this process, and those that it starts, use."""
  with Hub() as hub, monkeypatch.context() as patch:
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
    thread.start()
    patch.setenv('HF_ENDPOINT', hub.url)
    patch.setenv('HF_HOME', str(cache))
    # The client would speak to another service about large files.
    patch.setenv('HF_HUB_DISABLE_XET', '1')
    # It reads its variables when it is imported.
    importlib.reload(constants)
    hub_lib.commit_of.cache_clear()
    yield hub
    hub.shutdown()
    thread.join()
  importlib.reload(constants)
  hub_lib.commit_of.cache_clear()


class _Handler(server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'

  def log_message(self, *_) -> None:
    """Keeps the output of tests quiet."""

  def do_GET(self) -> None:
    """Answers a request."""
    path = parse.unquote(parse.urlsplit(self.path).path)
    body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
    api, file = _API.fullmatch(path), _FILE.fullmatch(path)
    repo = (api or file)[1] if api or file else ''
    if self.server.refusal:
      self._error(*self.server.refusal)
    elif path == '/api/repos/create':
      self._create(json.loads(body))
    elif repo not in self.server.commits:
      self._error(404, 'RepoNotFound')
    elif api:
      self._api(repo, api[2], api[3], body)
    else:
      self._file(self.server.commits[repo].get(file[2], {}), *file.group(2, 3))

  do_HEAD = do_POST = do_GET

  def _create(self, fields) -> None:
    repo = f'{fields["organization"]}/{fields["name"]}'
    exists = repo in self.server.commits
    if not exists:
      self.server.commit(repo, {})
      if fields['visibility'] == 'private':
        self.server.private.add(repo)
    reply = {'url': f'{self.server.url}/{repo}', 'id': repo}
    self._send(json.dumps(reply).encode(), 409 if exists else 200)

  def _api(self, repo, method, revision, body) -> None:
    commits = self.server.commits[repo]
    head = next(reversed(commits))
    commit = head if revision in (None, 'main') else revision
    reply = {'id': repo, 'sha': commit, 'private': repo in self.server.private}
    if commit not in commits:
      self._error(404, 'RevisionNotFound')
      return
    if method == 'tree':
      reply = [
        {'type': 'file', 'path': name, 'size': len(data), 'oid': _digest(data)}
        for name, data in commits[commit].items()
      ]
    elif method == 'preupload':
      mode = {'uploadMode': 'regular', 'shouldIgnore': False}
      reply = {'files': [x | mode for x in json.loads(body)['files']]}
    elif method == 'commit':
      files = dict(commits[head])
      for entry in map(json.loads, body.splitlines()):
        value = entry['value']
        if entry['key'] == 'file':
          files[value['path']] = base64.b64decode(value['content'])
        elif entry['key'] == 'deletedFile':
          del files[value['path']]
      oid = self.server.commit(repo, files)
      reply = {'commitUrl': f'{self.server.url}/{repo}', 'commitOid': oid}
    self._send(json.dumps(reply).encode())

  def _file(self, files: dict[str, bytes], commit: str, name: str) -> None:
    data = files[name]
    headers = {'X-Repo-Commit': commit, 'ETag': f'"{_digest(data)}"'}
    # A client resumes at the byte that it has not received.
    begin = re.match(r'bytes=(\d+)-', self.headers.get('Range', ''))
    part = data[int(begin[1]) :] if begin else data
    sent = part
    if name in self.server.breaks:
      sent, self.close_connection = data[: len(data) // 2 * (not begin)], True
    if self.command == 'GET':
      self.server.downloads.append(name)
    self._send(sent, 206 if begin else 200, headers, len(part))

  def _error(self, status: int, code: str) -> None:
    self._send(b'{}', status, {'X-Error-Code': code})

  def _send(self, data, status=200, headers=(), length=None) -> None:
    self.send_response(status)
    self.send_header('Content-Length', len(data) if length is None else length)
    for key, value in dict(headers).items():
      self.send_header(key, value)
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(data)


def _digest(data: bytes) -> str:
  return hashlib.sha1(data).hexdigest()
