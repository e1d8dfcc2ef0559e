"""Models and data sets on the Hugging Face Hub, through its client.

Addresses are `hf://ORG/NAME[@REVISION][/PATH]`, and `hf://datasets/..` of data
sets; a revision is a branch, a tag or a commit. Files lie in the client's cache
(HF_HOME), which its variables govern (HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT).
It locks a file while it downloads it: of several processes of a host a single
one does, and the others wait. What a cache has of a commit is read without a
request. This module must not import anything of the package but `base`.
"""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import pathlib
import re
from typing import Any

from encdec_adapt.base import errors, packages

SCHEME = 'hf://'
_COMMIT = re.compile('[0-9a-f]{40}')
# In a source it ends before its field, or before the weight of the source.
_ADDRESS = re.compile(r'hf://[^#\s]+?(?=@[\d.]+(?:\s|$)|[#\s]|$)')


def is_address(path: Any) -> bool:
  """Returns whether a path is an address on the Hub."""
  return str(path).startswith(SCHEME)


def repository(address: str) -> str:
  """Returns the repository of an address, as ORG/NAME."""
  return _parse(address).id


def pinned(text: str, before: str = '') -> str:
  """Returns a text with the commits that revisions in its addresses stand for.

  Args:
    text: an address, or sources with addresses; commits in them stay.
    before: such a text that was pinned earlier. An address there that differs
      in its revision only gives its commit to one without.

  Raises:
    UserError: the Hub refuses, or cannot be reached and the cache has no such
      revision; AbsentError if the Hub fails.
  """
  earlier = _ADDRESS.findall(before)
  return _ADDRESS.sub(lambda match: _pin(match[0], earlier), text)


def _pin(address: str, earlier: Sequence[str]) -> str:
  """Returns an address with its commit, see `pinned`."""
  uri = _parse(address)
  stem = f'{SCHEME}{_page(uri)}@'
  path = f'/{uri.path_in_repo}' if uri.path_in_repo else ''
  if _COMMIT.fullmatch(uri.revision or ''):
    return f'{stem}{uri.revision}{path}'
  for other in earlier:
    if other.startswith(stem) and other[len(stem) + 40 :] == path:
      return other
  return f'{stem}{commit_of(address, uri.type, uri.id, uri.revision)}{path}'


@functools.cache
def commit_of(address: str, kind: str, repo: str, revision: str | None) -> str:
  """Resolves a revision, once: a process reads one commit of a branch."""
  with _as_user_errors(address) as client:
    return (
      client.HfApi()
      .resolve_revision(repo, repo_type=kind, revision=revision)
      .resolved
    )


def _page(uri: Any) -> str:
  """Returns the repository as the Hub's pages are called."""
  return f'datasets/{uri.id}' if uri.type == 'dataset' else uri.id


def fetch(
  address: str, patterns: Sequence[str], ignored: Sequence[str] = ()
) -> pathlib.Path:
  """Downloads files that the cache lacks.

  Args:
    address: the address.
    patterns: globs of the files that are read, relative to the address. A *
      matches any depth.
    ignored: globs of names in the repository that are not read.

  Returns:
    The folder of the address in the cache; it does not exist if the repository
    has no such files.

  Raises:
    UserError: see `pinned`.
  """
  uri = _parse(pinned(address))
  prefix = f'{uri.path_in_repo}/' if uri.path_in_repo else ''
  with _as_user_errors(address) as client:
    snapshot = {'repo_type': uri.type, 'revision': uri.revision}
    download = functools.partial(
      client.snapshot_download,
      uri.id,
      allow_patterns=[prefix + pattern for pattern in patterns],
      ignore_patterns=list(ignored),
      **snapshot,
    )
    try:
      # Raises where the cache does not know the files of this commit: it would
      # take a part of them for all.
      client.get_cached_repo_tree(uri.id, **snapshot)
      folder = download(local_files_only=True)
    except (
      client.errors.CachedRepoTreeNotFoundError,
      client.errors.LocalEntryNotFoundError,
    ):
      folder = download()
  return pathlib.Path(folder, uri.path_in_repo)


def fetch_matching(pattern: str) -> str:
  """Downloads the files that match a glob; returns the glob in the cache.

  Args:
    pattern: address with a glob as its path, such as
      `hf://datasets/ORG/NAME/*.parquet`.

  Raises:
    UserError: see `pinned`.
  """
  path = _parse(pattern).path_in_repo
  root = pinned(pattern).removesuffix(f'/{path}')
  # The client's * matches slashes too: deeper files are left out.
  deeper = '/'.join('*' * (path.count('/') + 2))
  folder = fetch(root, [path], [] if '**' in path else [deeper])
  return f'{folder}/{path}'


def push(folder: pathlib.Path, repo: str, *, public: bool) -> str:
  """Uploads a model folder; asks nothing.

  Args:
    folder: a local folder.
    repo: ORG/NAME; made if it does not exist.
    public: whether everybody may read it.

  Returns:
    The address of the repository in a browser.

  Raises:
    UserError: it exists with the other visibility, or the Hub refuses.
  """
  address = f'{SCHEME}{repo}'
  if _parse(address).id != repo:
    raise errors.UserError(f'--repo={repo} must be ORG/NAME.')
  with _as_user_errors(address) as client:
    api = client.HfApi()
    url = api.create_repo(repo, private=not public, exist_ok=True)
    # The client leaves the visibility of a repository that exists.
    if api.repo_info(repo).private == public:
      raise errors.UserError(
        f'{url} exists and is {"private" if public else "public"};'
        f' {"leave out" if public else "give"} --public, or another --repo.'
      )
    api.upload_folder(
      repo_id=repo,
      folder_path=folder,
      commit_message='Upload a model of encdec_adapt',
      # Shards of an earlier upload would be read with the new ones.
      delete_patterns=['*.safetensors', '*.safetensors.index.json'],
    )
  return str(url)


def _parse(address: str) -> Any:
  """Parses an address: `type`, `id`, `revision`, `path_in_repo`."""
  with _as_user_errors(address) as client:
    try:
      uri = client.parse_hf_uri(address.rstrip('/'))
      if uri.type not in ('model', 'dataset'):
        raise client.errors.HfUriError(address, f'It is a {uri.type}.')
    except client.errors.HfUriError as error:
      raise errors.UserError(
        f'{address} is no model on the Hub ({error.msg}); give'
        f' {SCHEME}ORG/NAME, {SCHEME}ORG/NAME@REVISION, or of a data set'
        f' {SCHEME}datasets/ORG/NAME/*.parquet.'
      ) from error
    return uri


@contextlib.contextmanager
def _as_user_errors(address: str) -> Iterator[Any]:
  """Provides the client; raises its errors with the command to run."""
  packages.require(address, 'hub', 'huggingface_hub')
  # Here, as it is installed for the Hub only.
  import httpx2
  import huggingface_hub
  from huggingface_hub import errors as client_errors

  try:
    yield huggingface_hub
  except (
    httpx2.HTTPError,
    client_errors.LocalEntryNotFoundError,
    client_errors.RevisionResolutionError,
  ) as error:
    # Without an answer the client looks into its cache, and raises that it has
    # nothing there.
    cause = error
    if not isinstance(error, httpx2.HTTPError) and error.__cause__ is not None:
      cause = error.__cause__
    raise _user_error(address, cause) from error
  except OSError as error:
    # An error of the disk has a number; the client's, of a file that is too
    # short, has none.
    if error.errno is not None:
      raise
    raise _user_error(address, error) from error


def _user_error(address: str, error: Exception) -> errors.UserError:
  """Describes an error of the client."""
  import httpx2
  from huggingface_hub import constants
  from huggingface_hub import errors as client_errors

  uri = _parse(address)
  page = f'{constants.ENDPOINT}/{_page(uri)}'
  status = getattr(getattr(error, 'response', None), 'status_code', None)
  offline = httpx2.ConnectError, httpx2.TimeoutException, ConnectionError
  absent = client_errors.LocalEntryNotFoundError
  if isinstance(error, client_errors.RevisionNotFoundError):
    remedy = f'has no such revision; `git ls-remote {page}` lists them.'
  elif status and status < 500 and status not in (408, 429):
    remedy = (
      f'is refused ({status}: {type(error).__name__}). Check its name, accept'
      f' the terms at {page} if it is gated, and log in with `hf auth login` or'
      ' set HF_TOKEN, with a token that may read it, or write it for a push.'
    )
  elif isinstance(error, (*offline, absent)):
    remedy = (
      f'cannot be reached, and {constants.HF_HUB_CACHE} does not have it. Where'
      f' there is a network, run `hf download {uri.id} --repo-type={uri.type}`,'
      ' and copy that folder; or unset HF_HUB_OFFLINE if it is set.'
    )
  else:
    # The same command may succeed: launchers restart on this status.
    return errors.AbsentError(
      f'{address}: the Hub failed or limits requests ({status or error}). Give'
      ' the same command again, later if it limits them (`hf auth login` raises'
      ' the limit); complete files are not downloaded again.'
    )
  return errors.UserError(f'{address} {remedy}')
