"""Figures of a report, drawn with matplotlib.

matplotlib is imported when a figure is drawn: commands that draw nothing do not
need it.
"""

from collections.abc import Iterator, Mapping
import contextlib
import pathlib
import statistics
from typing import Any

from encdec_adapt.evaluation.measures import inference_cost
from encdec_adapt.evaluation.reports import run_groups

# Colours that colour-blind readers tell apart.
_COLOURS = 'tableau-colorblind10'
_STYLE = {
  'font.size': 10,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'grid.color': '#e6e6e6',
  'axes.axisbelow': True,
  'axes.titlesize': 11,
  'axes.titlelocation': 'left',
  'legend.frameon': False,
}
_CELL = {'ha': 'center', 'va': 'center', 'fontsize': 8}


@contextlib.contextmanager
def _subplots(
  path: pathlib.Path, shape: tuple[int, int], size: tuple[float, float]
) -> Iterator[tuple[Any, Any]]:
  """Makes a figure in our style, and saves it at the end.

  Args:
    path: path of the PNG.
    shape: rows and columns of the panels.
    size: width and height of the figure in inches.

  Yields:
    The figure, and its panels [rows, columns].
  """
  import matplotlib

  # No display: other backends may fail on servers, or open windows.
  matplotlib.use('Agg')
  from matplotlib import pyplot

  with pyplot.style.context([_COLOURS, _STYLE]):
    figure, axes = pyplot.subplots(
      *shape, figsize=size, squeeze=False, layout='constrained'
    )
    yield figure, axes
    # Without the version of matplotlib, so that equal figures are equal files.
    figure.savefig(path, dpi=150, metadata={'Software': None})
    # pyplot keeps figures until they are closed.
    pyplot.close(figure)


def draw_curves(report: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws the learning curves into a PNG.

  Left: held-out loss of the encoder-decoders, a thin line per seed and their
  mean, with the decoders' last loss on the same targets as horizontal lines.
  Right: the training of the decoders, if the study trains them.

  Args:
    report: the dictionary that `evaluation.reports.html_report` documents.
    path: path of the PNG.
  """
  from matplotlib import ticker

  runs = report['runs']
  pairs, decoders = [], []
  for model in run_groups.models(runs):
    first = runs[run_groups.seeds(runs, model)[0]]
    (pairs if run_groups.has_encoder(first) else decoders).append(model)
  # A model has the same colour in both panels, of the 10 in the style's cycle.
  colours = {model: f'C{i % 10}' for i, model in enumerate(pairs + decoders)}
  panels = 1 + any(runs[model]['curve']['step'] for model in decoders)
  with _subplots(path, (1, panels), (6.5 * panels, 4.4)) as (_, axes):
    pair_panel, decoder_panel = axes[0][0], axes[0][-1]
    for model in pairs:
      _draw_model(pair_panel, runs, model, colours[model])
    for model in decoders:
      names = run_groups.seeds(runs, model)
      final = statistics.fmean(runs[name]['eval_loss'] for name in names)
      # The sources of the pairs: the loss that adaptation has to reach.
      if pairs and model in ('decoder_only', 'decoder_only_continued'):
        pair_panel.axhline(
          final,
          color=colours[model],
          linestyle='--' if model == 'decoder_only' else ':',
          linewidth=1.3,
          label=f'{model} at its end  {final:.3f}',
        )
      _draw_model(decoder_panel, runs, model, colours[model], sources=True)
    decoder_panel.set_title('Decoders: held-out loss in their own training')
    pair_panel.set_title('Adaptation: held-out loss')
    for panel in axes[0]:
      panel.set(xlabel='target tokens', ylabel='nats per target token')
      panel.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
      # matplotlib warns of a legend without entries.
      if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=9)


def _draw_model(axes, runs, model, colour, sources=False) -> None:
  """Draws every seed of a model, and their mean where there are several."""
  names = [n for n in run_groups.seeds(runs, model) if runs[n]['curve']['step']]
  if not names:  # An imported model.
    return
  curves, finals = [], []
  for name in names:
    run, curve = runs[name], runs[name]['curve']
    # Tokens of its sources, so that a continued run starts where they end.
    offset = run['inclusive']['target_tokens'] - run['target_tokens']
    x = [offset * sources + tokens for tokens in curve['target_tokens']]
    curves.append((x, curve['eval_loss']))
    # The decoders' panel shows losses of pretraining, on other targets than the
    # evaluation that compares the models.
    finals.append(curve['eval_loss'][-1] if sources else run['eval_loss'])
  label = f'{model}  {statistics.fmean(finals):.3f}'
  if len(names) > 1:
    label += f'  ({len(names)} seeds)'
    for x, y in curves:
      axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
  # Seeds pack different rows, so equal steps have different token counts. Not
  # strict: a run may have stopped early.
  middle = [
    [statistics.fmean(values) for values in zip(*columns, strict=False)]
    for columns in zip(*curves, strict=True)
  ]
  axes.plot(*middle, color=colour, linewidth=2, label=label)


def draw_costs(
  label: str,
  quality: Mapping[str, float],
  per_query: Mapping[str, Mapping[str, float]],
  path: pathlib.Path,
) -> None:
  """Draws quality against cost, with the Pareto front, into a PNG.

  Args:
    label: name of the quality; more is better.
    quality: quality of every model.
    per_query: cost of every model, by axis; each axis has a panel.
    path: path of the PNG.
  """
  names = [name for name in quality if name in per_query]
  panels = list(next(iter(per_query.values())))
  size = 5.2 * len(panels), 3.8
  with _subplots(path, (1, len(panels)), size) as (_, axes):
    for axis, panel in zip(axes[0], panels, strict=True):
      points = [(per_query[name][panel], quality[name]) for name in names]
      front = [points[i] for i in inference_cost.pareto_front(points)]
      x, y = zip(*front, strict=True)
      axis.plot(x, y, color='0.6', linewidth=1, label='Pareto front')
      for i, (name, point) in enumerate(zip(names, points, strict=True)):
        axis.plot(*point, 'o', color=f'C{i % 10}')
        axis.annotate(
          name, point, xytext=(6, 4), textcoords='offset points', fontsize=9
        )
      # Models differ by factors, not by amounts.
      axis.set(xscale='log', xlabel=f'{panel}, one prompt', ylabel=label)
      axis.margins(0.2)  # Room for the names beside the points.
      axis.legend(fontsize=9)


def draw_needles(
  grids: Mapping[str, Mapping[str, Mapping[str, float]]], path: pathlib.Path
) -> None:
  """Draws heat maps of depth and length into a PNG.

  Args:
    grids: model -> metric -> 'LENGTH/DEPTH' -> value from 0 to 1; each model
      has a column of panels, each metric a row.
    path: path of the PNG.
  """
  metrics = list(next(iter(grids.values())))
  shape = len(metrics), len(grids)
  size = 1 + 3.2 * len(grids), 2.6 * len(metrics)
  with _subplots(path, shape, size) as (figure, axes):
    for column, (name, by_metric) in zip(axes.T, grids.items(), strict=True):
      for axis, metric in zip(column, metrics, strict=True):
        grid = by_metric[metric]
        # In the order of the tasks, which is ascending.
        lengths, depths = (
          list(dict.fromkeys(cell.split('/')[i] for cell in grid))
          for i in (0, 1)
        )
        values = [
          [grid[f'{length}/{depth}'] for length in lengths] for depth in depths
        ]
        # Fixed limits, so that panels are compared by their colours.
        image = axis.imshow(
          values, vmin=0, vmax=1, aspect='auto', cmap='cividis'
        )
        for y, row in enumerate(values):
          for x, value in enumerate(row):
            # cividis is dark for low values.
            colour = 'black' if value > 0.5 else 'white'
            axis.text(x, y, f'{value:.2f}', color=colour, **_CELL)
        axis.set(title=f'{name}: {metric}', xlabel='tokens', ylabel='depth')
        axis.grid(False)
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), depths)
    figure.colorbar(image, ax=axes)


def draw_attention(
  models: Mapping[str, Mapping[str, Any]], path: pathlib.Path
) -> None:
  """Draws the attention analysis into a PNG, a line of panels for each model.

  Left: shares of the attention by part of the keys. Middle: share on the inputs
  by layer and head. Right: growth of the loss without the cross-attention of a
  layer.

  Args:
    models: result of `attention_analysis.figures`.
    path: path of the PNG.
  """
  shape, size = (len(models), 3), (13, 3.4 * len(models))
  with _subplots(path, shape, size) as (figure, lines):
    for (name, model), axes in zip(models.items(), lines, strict=True):
      parts, heads, ablation = axes
      shares = list(model['shares'])[::-1]
      parts.barh(shares, [model['shares'][part] for part in shares])
      parts.set_title(f'{name}: share of attention')
      drawn = heads.imshow(model['inputs'], vmin=0, vmax=1, aspect='auto')
      heads.grid(False)
      heads.set_yticks(range(len(model['layers'])), model['layers'])
      heads.xaxis.get_major_locator().set_params(integer=True)
      heads.set(title='on the inputs', xlabel='head', ylabel='layer')
      figure.colorbar(drawn, ax=heads)
      values = model['ablation']
      ablation.set_visible(bool(values))  # Decoder-only models have none.
      ablation.barh(list(map(str, model['layers']))[: len(values)], values)
      ablation.invert_yaxis()  # The first layer on top, as beside it.
      ablation.set(title="without a layer's cross-attention", ylabel='layer')
      ablation.set_xlabel('more nats per target token')
