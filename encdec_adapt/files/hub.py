"""Models and data sets on the Hugging Face Hub, through its client.

Addresses are `hf://ORG/NAME[@REVISION][/PATH]`, and `hf://datasets/..` for data
sets; a revision is a branch, tag or commit. Files are in the client's cache
(HF_HOME), controlled by its variables (HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT).
The client locks files, so that only one process of a host downloads each.
Cached files of a commit are read without a request. Of the package, this module
must import only `base`.
"""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import pathlib
import re
from typing import Any

import huggingface_hub

from encdec_adapt.base import errors

SCHEME = 'hf://'
_COMMIT = re.compile(r'@[0-9a-f]{40}\b')
# In a source string, an address ends before field, weight or quote.
_ADDRESS = re.compile(r'hf://[^#\s"]+?(?=@[\d.]+(?:\s|$)|[#\s"]|$)')


def is_address(path: Any) -> bool:
  """Returns whether a path is an address on the Hub."""
  return str(path).startswith(SCHEME)


def repository(address: str) -> str:
  """Returns the repository of an address, as ORG/NAME."""
  return _parse(address).id


def pinned(text: str, before: str = '') -> str:
  """Pins addresses: replaces their revisions with commits.

  Args:
    text: an address, or sources with addresses; commits are kept.
    before: an earlier pinned text; its commits take precedence over the current
      commits of branches.

  Raises:
    UserError: the Hub refuses, or is unreachable and the revision is not
      cached; AbsentError if the Hub fails.
  """

  def target(address: str) -> tuple[str, ...]:
    uri = _parse(address)
    return uri.type, uri.id, uri.path_in_repo

  earlier = {target(address): address for address in _ADDRESS.findall(before)}

  def pin(match: re.Match[str]) -> str:
    address = match[0]
    if _COMMIT.search(address):
      return address
    key = target(address)
    root = address.rstrip('/').removesuffix(f'/{key[-1]}')
    return earlier.get(key) or address.replace(root, commit_of(root), 1)

  return _ADDRESS.sub(pin, text)


@functools.cache
def commit_of(address: str) -> str:
  """Pins a repository's address, to the same commit throughout a process."""
  uri = _parse(address)
  with _as_user_errors(uri):
    revision = huggingface_hub.HfApi().resolve_revision(
      uri.id, repo_type=uri.type, revision=uri.revision
    )
  return f'{address.partition("@")[0]}@{revision.resolved}'


def fetch(
  address: str, patterns: Sequence[str], ignored: Sequence[str] = ()
) -> pathlib.Path:
  """Downloads files missing from the cache.

  Args:
    address: the address.
    patterns: globs of files to download, relative to the address. A * matches
      any depth.
    ignored: globs of files in the repository to skip.

  Returns:
    The folder of the address in the cache; missing if the repository has no
    such files.

  Raises:
    UserError: see `pinned`.
  """
  uri = _parse(pinned(address))
  prefix = f'{uri.path_in_repo}/' if uri.path_in_repo else ''
  snapshot = {'repo_type': uri.type, 'revision': uri.revision}
  download = functools.partial(
    huggingface_hub.snapshot_download,
    uri.id,
    allow_patterns=[prefix + pattern for pattern in patterns],
    ignore_patterns=list(ignored),
    **snapshot,
  )
  with _as_user_errors(uri):
    try:
      # Raises if the cache has no file list of this commit: a partial copy
      # would otherwise pass as complete.
      huggingface_hub.get_cached_repo_tree(uri.id, **snapshot)
      folder = download(local_files_only=True)
    except (
      huggingface_hub.errors.CachedRepoTreeNotFoundError,
      huggingface_hub.errors.LocalEntryNotFoundError,
    ):
      folder = download()
  return pathlib.Path(folder, uri.path_in_repo)


def fetch_matching(pattern: str) -> str:
  """Downloads the files matching a glob; returns the glob in the cache.

  Args:
    pattern: address with a glob as its path, such as
      `hf://datasets/ORG/NAME/*.parquet`.

  Raises:
    UserError: see `pinned`.
  """
  path = _parse(pattern).path_in_repo
  root = pinned(pattern).removesuffix(f'/{path}')
  # Exclude deeper files, as the client's * matches slashes too.
  deeper = '/'.join('*' * (path.count('/') + 2))
  folder = fetch(root, [path], [] if '**' in path else [deeper])
  return f'{folder}/{path}'


def push(folder: pathlib.Path, repo: str, *, public: bool) -> str:
  """Uploads a model folder without confirmation.

  Args:
    folder: a local folder.
    repo: ORG/NAME; created if missing.
    public: whether the repository is public.

  Returns:
    The URL of the repository.

  Raises:
    UserError: the repository has the other visibility, or the Hub refuses.
  """
  uri, api = _parse(f'{SCHEME}{repo}'), huggingface_hub.HfApi()
  if uri.id != repo:
    raise errors.UserError(f'--repo={repo} must be ORG/NAME.')
  with _as_user_errors(uri):
    url = api.create_repo(repo, private=not public, exist_ok=True)
    # The client does not change the visibility of an existing repository.
    if api.repo_info(repo).private == public:
      raise errors.UserError(
        f'{url} exists and is {"private" if public else "public"};'
        f' {"leave out" if public else "give"} --public, or another --repo.'
      )
    api.upload_folder(
      repo_id=repo,
      folder_path=folder,
      commit_message='Upload a model of encdec_adapt',
      # Stale shards would be read along with the new shards.
      delete_patterns=['*.safetensors', '*.safetensors.index.json'],
    )
  return str(url)


def _parse(address: str) -> Any:
  """Returns `type`, `id`, `revision` and `path_in_repo` of an address."""
  try:
    uri = huggingface_hub.parse_hf_uri(address.rstrip('/'))
    if uri.type not in ('model', 'dataset'):
      raise huggingface_hub.errors.HfUriError(address, f'It is a {uri.type}.')
  except huggingface_hub.errors.HfUriError as error:
    raise errors.UserError(
      f'{address} is not a model on the Hub ({error.msg}); give'
      f' {SCHEME}ORG/NAME, {SCHEME}ORG/NAME@REVISION, or of a data set'
      f' {SCHEME}datasets/ORG/NAME/*.parquet.'
    ) from error
  return uri


@contextlib.contextmanager
def _as_user_errors(uri: Any) -> Iterator[None]:
  import httpx2

  try:
    yield
  except (
    OSError,
    httpx2.HTTPError,
    huggingface_hub.errors.RevisionResolutionError,
  ) as error:
    # Disk errors have an errno; the client's errors have none.
    if getattr(error, 'errno', None) is not None:
      raise
    # Without an answer, the client falls back to its cache, and raises an error
    # about the missing cache entry.
    cause = error
    if not isinstance(error, httpx2.HTTPError):
      cause = error.__cause__ or error
    raise _user_error(uri, cause) from error


def _user_error(uri: Any, error: Exception) -> errors.UserError:
  import httpx2

  name = f'datasets/{uri.id}' if uri.type == 'dataset' else uri.id
  page = f'{huggingface_hub.constants.ENDPOINT}/{name}'
  status = getattr(getattr(error, 'response', None), 'status_code', None)
  if isinstance(error, huggingface_hub.errors.RevisionNotFoundError):
    remedy = (
      f'has no revision {uri.revision}; `git ls-remote {page}` lists them.'
    )
  elif status and status < 500 and status not in (408, 429):
    remedy = (
      f'is refused ({status}: {type(error).__name__}). Check its name, accept'
      f' the terms at {page} if it is gated, and log in with `hf auth login` or'
      ' set HF_TOKEN, with a token that may read it, or write it for a push.'
    )
  elif isinstance(
    error,
    (
      httpx2.ConnectError,
      httpx2.TimeoutException,
      ConnectionError,
      huggingface_hub.errors.LocalEntryNotFoundError,
    ),
  ):
    remedy = (
      f'cannot be reached, and {huggingface_hub.constants.HF_HUB_CACHE} has no'
      f' copy. Where there is a network, run `hf download {uri.id}'
      f' --repo-type={uri.type}`, and copy that folder; or unset HF_HUB_OFFLINE'
      ' if it is set.'
    )
  else:
    # The same command may succeed: launchers restart on this status.
    return errors.AbsentError(
      f'{SCHEME}{name}: the Hub failed or limits requests ({status or error}).'
      ' Give the same command again, later if it limits them (`hf auth login`'
      ' raises the limit); complete files are not downloaded again.'
    )
  return errors.UserError(f'{SCHEME}{name} {remedy}')
