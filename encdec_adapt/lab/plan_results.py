"""JSON cache of measured step times, in the folder of a study."""

from collections.abc import Callable, Mapping
from typing import Any

from encdec_adapt.data.making import process_pool
from encdec_adapt.files import atomic, paths
from encdec_adapt.lab import stage_states
from encdec_adapt.telemetry import progress


def find(
  states: stage_states.States,
  name: str,
  jobs: Mapping[str, Any],
  measure: Callable[..., None],
  *args: Any,
) -> dict[str, Any]:
  """Returns results from a file; missing ones are measured first.

  Args:
    states: states of the stages of a study.
    name: name of the file.
    jobs: inputs of the measurements, by result key.
    measure: function of the file's path, the missing jobs and `args` that
      calls `add`; importable by name.
    *args: further arguments.

  Returns:
    The results by key; failed measurements are absent.
  """
  path = states.root / name
  known = atomic.read_json(path) if path.exists() else {}
  if missing := {key: job for key, job in jobs.items() if key not in known}:
    # A separate process: this one reserves no device memory.
    process_pool.run_in_subprocess(measure, str(path), missing, *args)
    known = atomic.read_json(path) if path.exists() else {}
  return {key: known[key] for key in jobs if key in known}


def add(
  path: str,
  verb: str,
  jobs: Mapping[str, Any],
  measure: Callable[[Any], dict[str, Any] | None],
) -> None:
  """Measures jobs in sequence, and adds each result to a file.

  Prints the number of each job, and the mean time of those before.

  Args:
    path: the file.
    verb: what is printed with the number of each job, such as 'compiling'.
    jobs: inputs of the measurements, by result key.
    measure: returns the result of a job, or None.
  """
  file = paths.at(path)
  results = atomic.read_json(file) if file.exists() else {}
  for key in progress.counted(list(jobs), verb):
    if result := measure(jobs[key]):
      results[key] = result
      atomic.write_json(file, results)
