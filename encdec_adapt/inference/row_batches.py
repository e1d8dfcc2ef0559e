"""Requests in batches, and their results in the order of the requests.

This module imports nothing from the package.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import operator
from typing import Any, TypeVar

import jax

_Result = TypeVar('_Result')


def outputs(
  run: Callable[[Sequence[int]], Any], order: Sequence[int], rows: int
) -> Iterator[tuple[int, Any]]:
  """Runs a compiled function on batches of requests.

  Args:
    run: maps the indices of at most `rows` requests to arrays [rows, ...]; it
      pads the last batch.
    order: indices of the requests.
    rows: batch size.

  Yields:
    Index of a request, and its row of the arrays on the host.
  """
  for start in range(0, len(order), rows):
    chosen = order[start : start + rows]
    arrays = jax.device_get(run(chosen))
    for row, i in enumerate(chosen):
      yield i, jax.tree.map(operator.itemgetter(row), arrays)


def in_order(
  results: Iterable[tuple[int, _Result]],
  report: Callable[[int], Any] = lambda done: None,
) -> list[_Result]:
  """Returns the results of requests 0, 1, .., which arrive in any order.

  Args:
    results: index and result of each request.
    report: called with the number of results after each.
  """
  arrived = {}
  for i, result in results:
    arrived[i] = result
    report(len(arrived))
  return [arrived[i] for i in range(len(arrived))]
