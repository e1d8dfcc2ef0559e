"""Models and data sets on the Hugging Face Hub, through its client.

Addresses are `hf://ORG/NAME[@REVISION][/PATH]`, and `hf://datasets/..` of data
sets; a revision is a branch, a tag or a commit. Files lie in the client's cache
(HF_HOME), which its variables govern (HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT).
It locks a file while it downloads it: of several processes of a host a single
one does, and the others wait. What a cache has of a commit is read without a
request. This module must not import anything of the package but errors.
"""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import importlib.util
import pathlib
import re
from typing import Any

from encdec_adapt.base import errors

SCHEME = 'hf://'
_COMMIT = re.compile('[0-9a-f]{40}')


def is_address(path: Any) -> bool:
  """Returns whether a path is an address on the Hub."""
  return str(path).startswith(SCHEME)


def repository(address: str) -> str:
  """Returns the repository of an address, as ORG/NAME."""
  return _parse(address).id


def pinned(address: str, before: str = '') -> str:
  """Returns an address with the commit that its revision stands for.

  Args:
    address: the address; a commit in it stays.
    before: an address that was pinned earlier: if it differs in the revision
      only, and `address` has no commit, its commit is taken.

  Raises:
    UserError: the Hub refuses, or cannot be reached and the cache has no such
      revision; AbsentError if the Hub fails.
  """
  uri = _parse(address)
  kind = 'datasets/' if uri.type == 'dataset' else ''
  stem = f'{SCHEME}{kind}{uri.id}@'
  path = f'/{uri.path_in_repo}' if uri.path_in_repo else ''
  if _COMMIT.fullmatch(uri.revision or ''):
    commit = uri.revision
  elif before.startswith(stem) and before[len(stem) + 40 :] == path:
    return before
  else:
    commit = commit_of(address, uri.type, uri.id, uri.revision)
  return f'{stem}{commit}{path}'


@functools.cache
def commit_of(address: str, kind: str, repo: str, revision: str | None) -> str:
  """Resolves a revision, once: a process reads one commit of a branch."""
  with _as_user_errors(address) as client:
    return (
      client.HfApi()
      .resolve_revision(repo, repo_type=kind, revision=revision)
      .resolved
    )


def fetch(address: str, patterns: Sequence[str]) -> pathlib.Path:
  """Downloads files that the cache lacks.

  Args:
    address: the address.
    patterns: globs of the files that are read, relative to the address.

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
  _parse(address)
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
      return client.parse_hf_uri(address.rstrip('/'))
    except client.errors.HfUriError as error:
      raise errors.UserError(
        f'{address} is no address on the Hub ({error.msg}); give'
        f' {SCHEME}ORG/NAME, or {SCHEME}ORG/NAME@REVISION.'
      ) from error


@contextlib.contextmanager
def _as_user_errors(address: str) -> Iterator[Any]:
  """Provides the client; raises its errors with the command to run."""
  if importlib.util.find_spec('huggingface_hub') is None:
    raise errors.UserError(
      f"{address} needs huggingface_hub: pip install 'encdec_adapt[hub]'"
    )
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

  repo = repository(address)
  page = f'{constants.ENDPOINT}/{repo}'
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
      f'cannot be reached, and {constants.HF_HUB_CACHE} does not have it. Run'
      f' `hf download {repo}` where there is a network, and copy that folder;'
      ' or unset HF_HUB_OFFLINE if it is set.'
    )
  else:
    # The same command may succeed: launchers restart on this status.
    return errors.AbsentError(
      f'{address}: the Hub failed or limits requests ({status or error}). Give'
      ' the same command again, later if it limits them (`hf auth login` raises'
      ' the limit); complete files are not downloaded again.'
    )
  return errors.UserError(f'{address} {remedy}')
