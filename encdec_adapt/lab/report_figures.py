"""Figures of a report, drawn with matplotlib, each a PNG.

A model has the same style in all figures of a page (`styles`). matplotlib is
imported only to draw a figure: commands without figures do not need it.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import math
import pathlib
import statistics
import textwrap
from typing import Any

from encdec_adapt.evaluation.measures import inference_cost
from encdec_adapt.lab import verdicts

# Colour-blind safe palette (Okabe and Ito, 2008).
_COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')
_OF_VERDICTS = {
  verdicts.REPRODUCED: _COLOURS[0],
  verdicts.CONTRADICTED: _COLOURS[1],
}  # Others are grey.
# Styles of curves and points; models at their end have '--'.
_LINES = {'-': 'o', ':': 's', '-.': '^'}
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
_SIZE = 6.5, 4.5  # Size of a panel, in inches.

Styles = Mapping[str, Mapping[str, str]]


def styles(models: Sequence[str]) -> Styles:
  """Returns the colour and line style of every model."""
  count, lines = len(_COLOURS), list(_LINES)
  return {
    name: {
      'color': _COLOURS[i % count],
      'linestyle': lines[i // count % len(lines)],
    }
    for i, name in enumerate(models)
  }


@contextlib.contextmanager
def _subplots(
  path: pathlib.Path,
  shape: tuple[int, int] = (1, 1),
  size: tuple[float, float] = _SIZE,
) -> Iterator[tuple[Any, Any]]:
  """Creates a figure in our style, and saves it on exit.

  Args:
    path: path of the PNG.
    shape: rows and columns of the panels.
    size: width and height of the figure in inches.

  Yields:
    The figure, and its panels [rows, columns].
  """
  # Not pyplot: it may need a display, and shares its backend with a caller's
  # notebook.
  from matplotlib import figure as figure_lib
  from matplotlib import style

  with style.context(_STYLE):
    figure = figure_lib.Figure(figsize=size, layout='constrained')
    yield figure, figure.subplots(*shape, squeeze=False)
    # Without matplotlib's version: equal figures give equal files.
    figure.savefig(path, dpi=150, metadata={'Software': None})


def _set_log(axis: Any, values: Sequence[float]) -> None:
  from matplotlib import ticker

  axis.axes.set(**{f'{axis.axis_name}scale': 'log'})
  ratio = max(values) / min(values)
  if ratio < 10:  # Else at most one power of ten.
    axis.set_major_locator(ticker.MaxNLocator(4))
  else:
    subs = (1.0, 2.0, 5.0) if ratio < 100 else (1.0,)
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=6))
  axis.set_minor_locator(ticker.NullLocator())
  exponent = ticker.LogFormatterSciNotation(minor_thresholds=(9, 9))
  is_large = max(values) >= 1e12  # FLOPs have no common prefix.
  engineering = ticker.EngFormatter(sep='')
  axis.set_major_formatter(exponent if is_large else engineering)


def draw_claims(
  rows: Sequence[tuple[str, str, float, float | None, float | None]],
  *,
  path: pathlib.Path,
) -> None:
  """Draws the effects of claims with their intervals, one per line.

  Args:
    rows: label and outcome, then effect, lower and upper bound (None without an
      interval) in units of the smallest relevant difference; positive: in the
      claimed direction, worse for 'no better', more for 'equal'.
    path: path of the PNG.
  """
  with _subplots(path, size=(9, 1.2 + 0.55 * len(rows))) as (_, ((axes,),)):
    axes.axvspan(-1, 1, color='#e6e6e6', linewidth=0)
    axes.axvline(0, color='0.5', linewidth=0.8)
    limit = 10.0
    for y, (_, outcome, effect, *bounds) in enumerate(rows):
      colour = _OF_VERDICTS.get(outcome, '0.5')
      axes.plot(effect, y, 'o', color=colour)
      if None not in bounds:
        axes.plot(bounds, (y, y), color=colour, linewidth=2)
      limit = max(limit, *(abs(x) for x in (effect, *bounds) if x is not None))
      margin = axes.get_yaxis_transform()
      axes.text(1.01, y, outcome, transform=margin, va='center', fontsize=9)
    # Two lines of a label.
    texts = [textwrap.shorten(row[0], 90, placeholder=' ..') for row in rows]
    labels = [textwrap.fill(text, 46) for text in texts]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # The first on top.
    # Effects may be many times the smallest difference.
    axes.set_xscale('symlog', linthresh=1)
    limit = 10 ** math.ceil(math.log10(limit))
    ticks = sorted({0, *(sign * x for sign in (-1, 1) for x in (1, 10, limit))})
    axes.set_xticks(ticks, [f'{x:g}' for x in ticks])
    axes.minorticks_off()
    label = (
      'effect / smallest difference that matters; to the right: as claimed\n'
      '("no better": worse; "equal" is claimed to lie in the grey band)'
    )
    axes.set(xlim=(-limit, limit), xlabel=label)


def draw_bars(
  values: Mapping[str, float],
  label: str,
  model_styles: Styles,
  *,
  path: pathlib.Path,
) -> None:
  """Draws a number per model as horizontal bars, the first on top.

  Args:
    values: number of every model.
    label: label of the numbers.
    model_styles: style of every model.
    path: path of the PNG.
  """
  size = 9, 1 + 0.45 * len(values)
  with _subplots(path, size=size) as (_, ((axes,),)):
    colours = [model_styles[name]['color'] for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colours)
    axes.bar_label(bars, fmt='%.3f', padding=4)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set(xlabel=label)
    axes.margins(x=0.1)


def draw_curves(
  curves: Mapping[str, Sequence[Mapping[str, Sequence[float]]]],
  finals: Mapping[str, float],
  axis: str,
  axis_label: str,
  model_styles: Styles,
  metric: str = 'loss',
  *,
  path: pathlib.Path,
) -> None:
  """Draws the mean of a metric over seeds with its range, from step 0.

  Values at the end are not printed: tables have it on all held-out rows,
  which jobs evaluate a part of.

  Args:
    curves: curves of the seeds of every model (`collected.Run.curve`).
    finals: loss of models without a curve on these rows, as horizontal lines.
    axis: entry of the curves for the x axis: 'target_tokens', 'flops' or
      'step'.
    axis_label: label of the x axis.
    metric: entry of the curves for the y axis.
    path: path of the PNG.
    model_styles: style of every model.
  """
  with _subplots(path) as (_, ((axes,),)):
    ends = [*finals.values()]
    for model, seeds in curves.items():
      # A run may have stopped early.
      points = [
        (statistics.fmean(x), losses)
        for x, losses in zip(
          *(
            zip(*(seed[name] for seed in seeds), strict=False)
            for name in (axis, metric)
          ),
          strict=True,
        )
      ]
      if not points:
        continue
      x, losses = zip(*points, strict=True)
      y, style = [*map(statistics.fmean, losses)], model_styles[model]
      ends.append(y[-1])
      label = model + (f' ({len(seeds)} seeds)' if len(seeds) > 1 else '')
      axes.plot(x, y, **style, linewidth=2, label=label)
      band = [*map(min, losses)], [*map(max, losses)]
      axes.fill_between(x, *band, color=style['color'], alpha=0.25, linewidth=0)
    for model, loss in finals.items():
      style = {**model_styles[model], 'linestyle': '--'}
      axes.axhline(loss, **style, label=f'{model} at its end')
    label = 'nats per target token' if metric == 'loss' else metric
    axes.set(xlabel=axis_label, ylabel=label)
    # The ends are compared; the first losses are in numbers.csv.
    finite = [x for x in ends if math.isfinite(x)]
    if metric == 'loss' and finite and axes.get_ylim()[1] > max(finite) + 1:
      axes.set_ylim(top=max(finite) + 1)
    axes.set_xlim(left=0)
    if ends:
      axes.legend(fontsize=9)


def draw_points(
  points: Mapping[str, tuple[inference_cost.Spread, inference_cost.Spread]],
  labels: tuple[str, str],
  model_styles: Styles,
  title: str = '',
  *,
  is_cost: bool = False,
  lower_is_better: bool = False,
  path: pathlib.Path,
) -> None:
  """Draws a scatter plot of two numbers per model.

  Args:
    points: both numbers of every model: lower bound, value, upper bound.
    labels: names of the numbers.
    model_styles: style of every model.
    title: title of the figure.
    is_cost: whether the first is a cost, with a logarithmic axis and the Pareto
      front of the intervals.
    lower_is_better: whether lower values of the second are better.
    path: path of the PNG.
  """
  with _subplots(path) as (_, ((axes,),)):
    for name, ((x_low, x, x_high), (y_low, y, y_high)) in points.items():
      bars = {
        'xerr': [[x - x_low], [x_high - x]],
        'yerr': [[y - y_low], [y_high - y]],
      }
      style = model_styles[name]
      fmt = _LINES[style['linestyle']]
      axes.errorbar(x, y, **bars, fmt=fmt, color=style['color'])
      offset = {'xytext': (6, 4), 'textcoords': 'offset points'}
      axes.annotate(name, (x, y), **offset, fontsize=9)
    axes.margins(0.2)  # Room for the names beside the points.
    axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
    if is_cost:
      pairs = list(points.values())
      goods = [
        (x, tuple(-bound for bound in y[::-1]) if lower_is_better else y)
        for x, y in pairs
      ]
      front = [pairs[i] for i in inference_cost.pareto_front(goods)]
      line = zip(*((x[1], y[1]) for x, y in front), strict=True)
      axes.plot(*line, color='0.6', linewidth=1, label='Pareto front')
      axes.legend(fontsize=9)
      # Models differ by factors, not by amounts.
      _set_log(axes.xaxis, [x for spread, _ in pairs for x in spread])
    if lower_is_better:
      axes.invert_yaxis()  # Better values on top in all figures.


def draw_calibration(
  curves: Mapping[str, Sequence[tuple[float, float, float]]],
  *,
  path: pathlib.Path,
) -> None:
  """Draws each model's preference accuracy by its confidence.

  Args:
    curves: `preference_scores.Curve` by model; bars are 95 % intervals.
    path: path of the PNG.
  """
  with _subplots(path) as (_, ((axes,),)):
    axes.plot((0.5, 1), (0.5, 1), color='0.6', linewidth=1, label='calibrated')
    for (name, curve), style in zip(
      curves.items(), styles(list(curves)).values(), strict=True
    ):
      x, y, errors = zip(*curve, strict=True)
      bars = [1.96 * error for error in errors]
      axes.errorbar(x, y, bars, **style, marker='o', label=name)
    axes.set(xlabel='confidence', ylabel='accuracy')
    axes.legend(fontsize=9)


def draw_needles(
  grids: Mapping[str, Mapping[str, Mapping[str, float]]],
  *,
  path: pathlib.Path,
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
        # In task order, ascending.
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
  models: Mapping[str, Mapping[str, Any]],
  *,
  path: pathlib.Path,
) -> None:
  """Draws the attention analysis into a PNG, a row of panels per model.

  Left: shares of the attention by part of the keys. Middle: share on the inputs
  by layer and head. Right: increase of the loss without the cross-attention of
  a layer.

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
