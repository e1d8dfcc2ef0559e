"""Figures of a report, drawn with matplotlib.

matplotlib is imported when a figure is drawn: commands that draw nothing do not
need it.
"""

from collections.abc import Iterator, Mapping
import contextlib
import math
import pathlib
import statistics
from typing import Any

from encdec_adapt.evaluation.measures import inference_cost
from encdec_adapt.evaluation.reports import report_findings, run_groups

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
  # Without pyplot, which may need a display, and whose backend is that of a
  # caller's notebook.
  from matplotlib import figure as figure_lib
  from matplotlib import style

  with style.context([_COLOURS, _STYLE]):
    figure = figure_lib.Figure(figsize=size, layout='constrained')
    yield figure, figure.subplots(*shape, squeeze=False)
    # Without the version of matplotlib, so that equal figures are equal files.
    figure.savefig(path, dpi=150, metadata={'Software': None})


def draw_curves(report: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws the learning curves into a PNG.

  Left: held-out loss of every model, a thin line per seed and their mean. Where
  encoder-decoders are compared with decoders, which train on other targets,
  these are horizontal lines: their last loss on the targets of the pairs. A
  mark shows where `adapted` crosses its source. Right: loss and cost of a
  request of the fine-tuned models, where the report has them.

  Args:
    report: the dictionary that `evaluation.reports.html_report` documents.
    path: path of the PNG.
  """
  from matplotlib import ticker

  runs = report['runs']
  models = run_groups.models(runs)
  has_pairs = any(map(run_groups.has_encoder, runs.values()))
  # A model has the same colour in all panels, of the 10 in the style's cycle.
  colours = {model: f'C{i % 10}' for i, model in enumerate(models)}
  bars = _bars(report['tuned']['runs']) if report['tuned'] else {}
  shape = (len(bars), 2) if bars else (1, 1)
  with _subplots(path, shape, (6.5 * shape[1], 5)) as (figure, axes):
    grid, finals = axes[0][0].get_gridspec(), []
    for panel in axes[:, 0]:
      panel.remove()
    curves = figure.add_subplot(grid[:, 0])
    for model in models:
      names = run_groups.seeds(runs, model)
      finals.append(statistics.fmean(runs[name]['eval_loss'] for name in names))
      if run_groups.has_encoder(runs[names[0]]) or not has_pairs:
        _draw_model(curves, runs, model, colours[model])
        continue
      curves.axhline(
        finals[-1],
        color=colours[model],
        linestyle='--' if model == 'decoder_only' else ':',
        linewidth=1.3,
        label=f'{model} at its end  {finals[-1]:.3f}',
      )
    if point := report_findings.crossing(runs):
      label = f'adapted below decoder_only at step {point[0]}'
      curves.axvline(point[1], color='0.5', linewidth=0.8, label=label)
    curves.set(
      title=report_findings.verdict(runs) or 'Held-out loss',
      xlabel='target tokens',
      ylabel='nats per target token',
    )
    # The ends are compared: of the first steps the losses are in the tables.
    curves.set_ylim(top=max(filter(math.isfinite, finals), default=0) + 1)
    curves.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
    # matplotlib warns of a legend without entries.
    if curves.get_legend_handles_labels()[0]:
      curves.legend(fontsize=9)
    panels = zip(axes[:, -1], bars.items(), strict=False)
    for panel, (title, values) in panels:
      names = list(values)[::-1]  # The first on top.
      means = [statistics.fmean(values[name]) for name in names]
      drawn = panel.barh(names, means, color=[colours[name] for name in names])
      panel.bar_label(drawn, [f'{mean:.3g}' for mean in means], padding=14)
      panel.set_title(title)
      panel.margins(x=0.25)  # Room for the numbers.
      for name in names:
        seeds = values[name]
        panel.plot(seeds, [name] * len(seeds), '|', color='black')


def _bars(runs: run_groups.Runs) -> dict[str, dict[str, list[float]]]:
  """Returns what tuned models are compared in: title -> model -> seeds."""
  models = {
    model: [runs[name] for name in run_groups.seeds(runs, model)]
    for model in run_groups.models(runs)
  }
  title = 'After tuning: nats per target token'
  panels = {title: {m: [x['eval_loss'] for x in models[m]] for m in models}}
  for axis in ('FLOPs', 'ms at batch 1'):
    panels[f'Cost of a request: {axis}'] = {
      # Measured of one seed, as the others have its shape.
      model: [run['request'][axis] for run in seeds if run['request']]
      for model, seeds in models.items()
    }
  return panels


def _draw_model(axes, runs, model, colour) -> None:
  """Draws every seed of a model, and their mean where there are several."""
  names = [n for n in run_groups.seeds(runs, model) if runs[n]['curve']['step']]
  if not names:  # An imported model.
    return
  curves = [
    (runs[name]['curve']['target_tokens'], runs[name]['curve']['eval_loss'])
    for name in names
  ]
  final = statistics.fmean(runs[name]['eval_loss'] for name in names)
  label = f'{model}  {final:.3f}'
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
  per_query: Mapping[str, Mapping[str, inference_cost.Spread]],
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
      x, y = zip(*((cost[1], y) for cost, y in front), strict=True)
      axis.plot(x, y, color='0.6', linewidth=1, label='Pareto front')
      for i, (name, (cost, y)) in enumerate(zip(names, points, strict=True)):
        axis.plot(cost, (y, y, y), color='0.6', linewidth=3)
        axis.plot(cost[1], y, 'o', color=f'C{i % 10}')
        axis.annotate(
          name,
          (cost[1], y),
          xytext=(6, 4),
          textcoords='offset points',
          fontsize=9,
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
