"""JSON cache of measured step times, in the folder of a study."""

from collections.abc import Callable, Mapping
from typing import Any

from encdec_adapt.data.making import process_pool
from encdec_adapt.files import atomic, paths
from encdec_adapt.lab import stage_states


def find(
  states: stage_states.States,
  name: str,
  jobs: Mapping[str, Any],
  measure: Callable[..., None],
  *args: Any,
) -> dict[str, Any]:
  """Returns results from a file; those that it lacks are measured first.

  Args:
    states: states of the stages of a study.
    name: name of the file.
    jobs: inputs of the measurements, by the key of their result.
    measure: function of the file's path, the missing jobs and `args`, which
      calls `add`; importable by name.
    *args: further arguments.

  Returns:
    The results by key, without those that could not be measured.
  """
  path = states.root / name
  known = atomic.read_json(path) if path.exists() else {}
  if missing := {key: job for key, job in jobs.items() if key not in known}:
    # A process of its own: this one keeps no memory of the devices.
    process_pool.run_in_subprocess(measure, str(path), missing, *args)
    known = atomic.read_json(path) if path.exists() else {}
  return {key: known[key] for key in jobs if key in known}


def add(
  path: str,
  jobs: Mapping[str, Any],
  measure: Callable[[Any], dict[str, Any] | None],
) -> None:
  """Measures one job after the other, and adds each result to a file.

  Args:
    path: the file.
    jobs: inputs of the measurements, by the key of their result.
    measure: returns the result of a job, None if it has none.
  """
  file = paths.at(path)
  results = atomic.read_json(file) if file.exists() else {}
  for key, job in jobs.items():
    if result := measure(job):
      results[key] = result
      atomic.write_json(file, results)
