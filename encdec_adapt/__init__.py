"""Adapts decoder-only language models to encoder-decoders.

    import encdec_adapt
    model = encdec_adapt.load('runs/adapted')
    print(model.generate(['The quick'])[0])

The functions are the commands without flags; see `encdec_adapt/README.md`. They
import their dependencies lazily, and none has the name of a command, as
commands are modules of the package. Bad input raises `UserError`.
"""

from collections.abc import Mapping, Sequence
import importlib.util
import os
import sys
import typing
from typing import Any

# `-m` is the first argument while Python looks for the command to run.
if sys.argv[:1] == ['-m'] and importlib.util.find_spec('absl') is None:
  sys.exit(
    f'{sys.executable} lacks the packages that encdec_adapt needs: activate the'
    ' environment it is installed in (source .venv/bin/activate), or install it'
    " (pip install -e '.[data]' in a clone)."
  )

from encdec_adapt.base.errors import UserError as UserError  # noqa: E402

if typing.TYPE_CHECKING:
  from jax.sharding import Mesh
  from jax.typing import DTypeLike
  import ml_collections

  from encdec_adapt.generation import model_in_memory

__version__ = '0.2.0'


def load(
  path: str | os.PathLike[str],
  *,
  dtype: 'DTypeLike' = 'float32',
  mesh: 'Mesh | None' = None,
  encoder_window: str | None = None,
) -> 'model_in_memory.LoadedModel':
  """Loads a model; see `encdec_adapt.generation.model_in_memory.load`."""
  from encdec_adapt.generation import model_in_memory

  return model_in_memory.load(
    path, dtype=dtype, mesh=mesh, encoder_window=encoder_window
  )


def run_training(
  config: 'ml_collections.ConfigDict', workdir: str | os.PathLike[str]
) -> dict[str, Any]:
  """Trains or resumes a job, like the command `train`.

  Must be called in the main thread, as Ctrl-C saves and ends the job.

  Args:
    config: the configuration, such as from `get_config()` of a file in
      configs/; keys are set as attributes.
    workdir: work directory of the job.

  Returns:
    The content of the job's summary.json.

  Raises:
    UserError: bad input; see `train.train`.
    SystemExit: the job was stopped and saved after Ctrl-C or SIGTERM.
  """
  import ml_collections

  from encdec_adapt import train
  from encdec_adapt.files import atomic, paths
  from encdec_adapt.telemetry import compute_cost

  if not isinstance(config, ml_collections.ConfigDict):
    raise UserError(
      f'config is {config!r:.80}, and must be a ConfigDict: give the result of'
      ' get_config() of a configuration file.'
    )
  if not os.fspath(workdir):
    raise UserError("workdir is ''; give the work directory of the job.")
  if status := train.run(config, os.fspath(workdir)):
    raise SystemExit(status)
  return atomic.read_json(paths.join(workdir, compute_cost.SUMMARY))


def adapt_checkpoint(
  encoder: str | os.PathLike[str],
  output: str | os.PathLike[str],
  *,
  model: Mapping[str, Any] | None = None,
  **options: Any,
) -> str:
  """Adapts decoder-only models to an encoder-decoder, like `convert adapt`.

  Args:
    encoder: source of the encoder, and of the decoder without `decoder`.
    output: new or empty work directory.
    model: overrides of config.model, such as {'encoder.kv_heads': 8}.
    **options: further flags of `convert adapt`, such as `decoder`.

  Returns:
    The output.

  Raises:
    UserError: see `exchange.adapting.adapt_models`.
  """
  from encdec_adapt import convert
  from encdec_adapt.cli import command

  changes = {f'model.{key}': value for key, value in (model or {}).items()}
  flags = {'encoder': encoder, 'output': output, **options, **changes}
  argv = ['adapt', *command.arguments(flags)]
  command.run_subcommand('', convert.COMMANDS, argv)
  return os.fspath(output)


def evaluate_checkpoints(
  checkpoints: Sequence[str | os.PathLike[str]],
  output: str | os.PathLike[str],
  **options: Any,
) -> list[dict[str, Any]]:
  """Evaluates and compares models, like the command `evaluate`.

  Args:
    checkpoints: work directories of runs or Hugging Face folders.
    output: folder of results and report.
    **options: further flags of `evaluate`, such as `records` and `limit`.

  Returns:
    The scores of all models: `checkpoint`, `task`, `metric`, `value`, its
    standard error `stderr` (None if unknown), and `n`, the number of examples.

  Raises:
    UserError: bad input, raised before a model is read.
  """
  from encdec_adapt import evaluate
  from encdec_adapt.cli import command

  flags = {'checkpoint': checkpoints, 'output': output, **options}
  values = command.parse(evaluate.define_flags, command.arguments(flags))
  fields = ('task', 'metric', 'value', 'stderr', 'n')
  return [
    {'checkpoint': path, **{name: getattr(score, name) for name in fields}}
    for path, scores in evaluate.run(values).items()
    for score in scores
  ]
