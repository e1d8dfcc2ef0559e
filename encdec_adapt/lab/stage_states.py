"""States of a study's stages, in its folder, shared by workers.

    ROOT/NAME                          output of a stage
    ROOT/stages/NAME/stage.json        its state; job.lock while it runs
    ROOT/stages/study.json             name and claims of the study at the
                                       first start
    runs/studies/stages.jsonl          identity, root and folder of every
                                       finished stage, of all studies

A stage has the folder of its name. If that folder holds a stage with another
identity, as after a change of the page, a prefix of the identity is appended. A
stage finished by another study is read in place. A stage with stored results
(`stored_results`) is finished, unless an unfinished stage reads its folder.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
import itertools
import json
import threading
import time
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors, exit_status
from encdec_adapt.cluster import lock
from encdec_adapt.files import append_log, atomic, hub, paths
from encdec_adapt.lab import html_report, pages, stages, stored_results
from encdec_adapt.models import execution
from encdec_adapt.telemetry import environment

# The report names stages run in a different environment.
ENVIRONMENT = ('encdec_adapt', 'jax', 'python', 'cores')
FINISHED, FAILED, RUNNING = 'finished', 'failed', 'running'
# Exit statuses of jobs that saved, or a peer did not answer: they resume.
STOPPED = (exit_status.RESTART, exit_status.HANG, exit_status.INTERRUPTED)
_STATE = 'stage.json'
_STUDY = 'study.json'
_INDEX = 'stages.jsonl'
# Version of the identity rules. Format 2 hashes the keys of
# `config.evaluation`. Identities of format 1 cannot be compared: stages of this
# study match by name, stages of other studies by configuration too.
_FORMAT = 2
_BEAT = 5.0  # Seconds between two writes of a stage's elapsed time.


@dataclasses.dataclass
class State:
  """State of a stage.

  Attributes:
    name: name of the stage.
    identity: identity of the stage in the folder.
    status: 'running', 'finished' or 'failed'.
    command: command line of the last start.
    seconds: total time of all starts.
    starts: number of starts.
    error: why it failed, or ''.
    rate: learning rate chosen by a sweep.
    environment: versions and hardware of the last start.
    format: version of the rules of `identity`.
  """

  name: str
  identity: str
  status: str = RUNNING
  command: str = ''
  seconds: float = 0.0
  starts: int = 0
  error: str = ''
  rate: float | None = None
  environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  format: int = _FORMAT

  def difference(self, current: Mapping[str, Any]) -> list[str]:
    """Returns a line per difference of versions and cores."""
    made_in = {key: self.environment.get(key) for key in ENVIRONMENT}
    return environment.difference(
      made_in, {key: current.get(key) for key in ENVIRONMENT}
    )


class States:
  """The stages of a study and their folders.

  Attributes:
    root: folder of the study.
    stages: the stages by name.
    stored: stored results of stages that have no folder, by name.
    terms: claims at the first start (`pages.Study.terms`).
  """

  def __init__(
    self,
    study: pages.Study,
    resolved: Mapping[str, stages.Stage],
    shared: bool = True,
    needed: str = '',
  ):
    """Stores the stages.

    Args:
      study: the study.
      resolved: its stages by name.
      shared: whether to read stored results, and stages finished by other
        studies.
      needed: a stage that has to have its folder; '' for none.

    Raises:
      UserError: the folder has stages of a study of an earlier version, or of
        another study.
    """
    self.root, self.stages = paths.at(study.folder), resolved
    self._shared, parent = shared, self.root.parent
    self._index = parent if parent.name == 'studies' else parent / 'studies'
    if (self.root / 'study.json').exists():
      raise errors.UserError(
        f'{self.root} holds stages of an earlier version of encdec_adapt,'
        ' which identified them by the text of the page. Give --root another'
        ' folder, or remove this one.'
      )
    self._study, self._name = study, self.root / 'stages' / _STUDY
    for file in (self._name, self.root / html_report.JSON):
      name = atomic.read_json(file)['study'] if file.exists() else study.name
      if name != study.name:
        raise errors.UserError(
          f'{self.root} has the results of the study {name}, and this is'
          f' {study.name}; give --root another folder.'
        )
    self._started = atomic.read_json(self._name) if self._name.exists() else {}
    claims, results = stored_results.find(study.results)
    self.terms = claims or self._started.get('claims', study.terms)
    self.stored: dict[str, stored_results.Stored] = {}
    if shared and results:
      self._find_stored(results, {needed})

  def _find_stored(
    self, results: Mapping[str, stored_results.Stored], read: set[str]
  ) -> None:
    for stage in reversed(self.stages.values()):  # Readers first.
      if self.status(stage) != FINISHED:
        if stage.identity in results and stage.name not in read:
          self.stored[stage.name] = results[stage.identity]
        else:
          # Of a choice of rates, only the rate is read.
          read |= {x for x in stage.reads if not self.stages[x].rate}

  def folder(self, stage: stages.Stage) -> paths.Path:
    """Returns the output folder of a stage."""
    root, name = self._finished_elsewhere(stage) or (self.root, None)
    return root / (name or self._folder_name(stage))

  def state(self, stage: stages.Stage) -> State | None:
    """Returns the state of a stage; None if not started."""
    state = _read(self._state_folder(self.root, self._folder_name(stage)))
    if state is None or state.status != FINISHED:
      if location := self._finished_elsewhere(stage):
        return _read(self._state_folder(*location))
      if stage.name in self.stored:
        return State(**self.stored[stage.name].facts['state'])
    return state

  def status(self, stage: stages.Stage) -> str:
    """Returns the status of a stage; '' if not started."""
    state = self.state(stage)
    return state.status if state else ''

  @property
  def unfinished(self) -> list[stages.Stage]:
    """The stages that are not finished."""
    return [x for x in self.stages.values() if self.status(x) != FINISHED]

  def missing(self, stage: stages.Stage) -> list[str]:
    """Returns the unfinished input stages of a stage."""
    return [x for x in stage.reads if self.status(self.stages[x]) != FINISHED]

  def failed(self, stage: stages.Stage) -> bool:
    """Returns whether a stage or one of its inputs has failed."""
    return self.status(stage) == FAILED or any(
      self.failed(self.stages[x]) for x in self.missing(stage)
    )

  def values(self, stage: stages.Stage) -> dict[str, str]:
    """Returns the values of names in braces in a stage's arguments."""
    values = {'root': str(self.root), stage.name: str(self.folder(stage))}
    for name in stage.reads:
      read = self.stages[name]
      values[name] = str(self.folder(read))
      if read.rate:
        state = self.state(read)
        values[name] = f'{state.rate:g}' if state and state.rate else 'RATE'
    return values

  @contextlib.contextmanager
  def start(
    self, stage: stages.Stage, command: str, again: bool = False
  ) -> Iterator[State | None]:
    """Locks a stage for a run, and saves its state.

    Args:
      stage: the stage.
      command: its command line.
      again: whether to rerun a failed stage.

    Yields:
      The state, with the status left to the caller; None if the stage has ended
      meanwhile.

    Raises:
      InUseError: another worker runs the stage.
    """
    folder = self._state_folder(self.root, self._folder_name(stage))
    if 'claims' not in self._started:
      self._started = {'study': self._study.name, 'claims': self.terms}
      atomic.write_json(self._name, self._started)
    with lock.hold(folder):
      state = self.state(stage) or State(stage.name, stage.identity)
      if state.status == FINISHED or (state.status == FAILED and not again):
        yield None
        return
      state.starts += 1
      state = dataclasses.replace(
        self._adopted(state, stage), status=RUNNING, error='', command=command
      )
      with _timed(state, folder):
        yield state
      if state.status == FINISHED:
        self._add_to_index(stage)

  def adopt(self) -> None:
    """Updates stages of an earlier format to the current identity."""
    for stage in self.stages.values():
      folder = self._state_folder(self.root, self._folder_name(stage))
      with contextlib.suppress(lock.InUseError):
        state = _read(folder)
        if state and state.format < _FORMAT:
          with lock.hold(folder):
            state = self._adopted(state, stage)
            atomic.write_json(folder / _STATE, dataclasses.asdict(state))
            if state.status == FINISHED:
              self._add_to_index(stage)

  def _adopted(self, state: State, stage: stages.Stage) -> State:
    return dataclasses.replace(state, identity=stage.identity, format=_FORMAT)

  def reopen(self, names: Iterable[str]) -> None:
    """Lets ended pages run again and resume their own stages.

    A page is identified by its name, not its content.

    Args:
      names: names of stages; stages other than pages are unchanged.
    """
    for name in names:
      stage = self.stages[name]
      folder = self._state_folder(self.root, self._folder_name(stage))
      if stage.module == 'study' and (state := _read(folder)):
        with contextlib.suppress(lock.InUseError), lock.hold(folder):
          state.status = RUNNING
          atomic.write_json(folder / _STATE, dataclasses.asdict(state))

  def discard_others(self, cores: int) -> None:
    """Removes stages made with other versions or numbers of cores.

    Stages that read removed stages are removed, too.

    Args:
      cores: number of cores of a worker.
    """
    current, removed = {**environment.versions(), 'cores': cores}, set()
    for name, stage in self.stages.items():
      state = _read(self._state_folder(self.root, self._folder_name(stage)))
      if removed & {*stage.reads} or (state and state.difference(current)):
        removed.add(name)
        self._discard(stage)

  def _discard(self, stage: stages.Stage) -> None:
    name = self._folder_name(stage)
    # Another worker may have started this stage: it has already discarded it.
    with contextlib.suppress(lock.InUseError):
      with lock.hold(self._state_folder(self.root, name)):
        (self._state_folder(self.root, name) / _STATE).unlink(missing_ok=True)
        if (self.root / name).exists():
          paths.remove(self.root / name)

  def _folder_name(self, stage: stages.Stage) -> str:
    folder, state = stage.name, _read(self._state_folder(self.root, stage.name))
    if state and state.format < _FORMAT:
      # After a change of the page, its last version has another folder.
      for entry in self._indexed(f'"name": "{stage.name}"'):
        if entry['root'] == str(self.root):
          folder = entry['folder']
      state = _read(self._state_folder(self.root, folder))
    is_earlier = state is not None and state.format < _FORMAT
    if state is None or is_earlier or state.identity == stage.identity:
      return folder
    return f'{stage.name}-{stage.identity[:8]}'

  def _indexed(self, text: str) -> Iterator[dict[str, str]]:
    for line in append_log.read(self._index / _INDEX).splitlines():
      # Parsing every line would take seconds.
      if text.encode() in line:
        yield json.loads(line)

  def _state_folder(self, root: paths.Path, folder: str) -> paths.Path:
    return root / 'stages' / folder

  def _finished_elsewhere(
    self, stage: stages.Stage
  ) -> tuple[paths.Path, str] | None:
    state = _read(self._state_folder(self.root, self._folder_name(stage)))
    if not self._shared or (state and state.status == FINISHED):
      return None
    for entry in itertools.chain(
      self._indexed(stage.identity), self._indexed(f'"name": "{stage.name}"')
    ):
      root, folder = paths.at(entry['root']), entry['folder']
      state = _read(self._state_folder(root, folder))
      # The folder may have been removed since.
      if state and state.status == FINISHED and (root / folder).exists():
        if state.identity == stage.identity or (
          state.format < _FORMAT and self._is_alike(stage, root, folder)
        ):
          return root, folder
    return None

  def _is_alike(
    self, stage: stages.Stage, root: paths.Path, folder: str
  ) -> bool:
    if stage.module != 'train' or not all(
      self.folder(self.stages[name]).parent == root for name in stage.reads
    ):
      return False
    saved = environment.flat(config_lib.saved(str(root / folder)).to_dict())
    # Names in braces are paths, and a saved run has resolved commits and
    # device-dependent values.
    keys = [
      key
      for key, value in stage.values.items()
      if key in saved and value != execution.AUTO
      if '{' not in str(value) and hub.SCHEME not in str(value)
    ]
    saved, values = (
      {key: configs.portable(str(x[key])) for key in keys}
      for x in (saved, stage.values)
    )
    return not environment.difference(saved, values)

  def _add_to_index(self, stage: stages.Stage) -> None:
    entry = {'identity': stage.identity, 'name': stage.name}
    entry |= {'root': str(self.root), 'folder': self._folder_name(stage)}
    while True:
      with contextlib.suppress(lock.InUseError):
        # Two writers of a bucket's object would replace each other's lines.
        with lock.hold(self._index):
          log = append_log.append(self._index / _INDEX)
          log.write((json.dumps(entry) + '\n').encode())
          log.close()
          return
      time.sleep(0.1)


@contextlib.contextmanager
def _timed(state: State, folder: paths.Path) -> Iterator[None]:
  """Accumulates the time of a state, also on disk, to survive a kill."""
  before, start, stop = state.seconds, time.monotonic(), threading.Event()

  def write() -> None:
    state.seconds = before + time.monotonic() - start
    atomic.write_json(folder / _STATE, dataclasses.asdict(state))

  def beat() -> None:
    while not stop.wait(_BEAT):
      write()

  write()
  thread = threading.Thread(target=beat, daemon=True)
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()
    write()


def _read(folder: paths.Path) -> State | None:
  if not (folder / _STATE).exists():
    return None
  return State(**({'format': 1} | atomic.read_json(folder / _STATE)))
