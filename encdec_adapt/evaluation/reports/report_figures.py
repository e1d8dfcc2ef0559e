"""Figures of a report, drawn with matplotlib.

matplotlib is imported when a figure is drawn.
"""

from collections.abc import Iterator, Mapping
import contextlib
import pathlib
import statistics
from typing import Any

from encdec_adapt.evaluation.measures import inference_cost
from encdec_adapt.evaluation.results import number_format as numbers

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

  matplotlib.use('Agg')
  from matplotlib import pyplot

  with pyplot.style.context([_COLOURS, _STYLE]):
    figure, axes = pyplot.subplots(
      *shape, figsize=size, squeeze=False, layout='constrained'
    )
    yield figure, axes
    figure.savefig(path, dpi=150, metadata={'Software': None})
    pyplot.close(figure)


def draw_curves(report: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws the learning curves into a PNG.

  Left: held-out loss of the encoder-decoders, one thin line per seed and
  their mean, with the decoders' last loss on the same targets as horizontal
  lines. Right: the decoders' own training, where the study trains them.

  Args:
    report: the dictionary that `evaluation.reports.html_report` documents.
    path: path of the PNG.
  """
  from matplotlib import ticker

  runs = report['runs']
  pairs, decoders = [], []
  for model in numbers.models(runs):
    first = runs[numbers.seeds(runs, model)[0]]
    (pairs if numbers.has_encoder(first) else decoders).append(model)
  colours = {model: f'C{i % 10}' for i, model in enumerate(pairs + decoders)}
  panels = 1 + any(runs[model]['curve']['step'] for model in decoders)
  with _subplots(path, (1, panels), (6.5 * panels, 4.4)) as (_, axes):
    left, right = axes[0][0], axes[0][-1]
    for model in pairs:
      _draw_model(left, runs, model, colours[model])
    for model in decoders:
      final = statistics.fmean(
        [runs[name]['eval_loss'] for name in numbers.seeds(runs, model)]
      )
      if pairs and model in ('decoder_only', 'decoder_only_continued'):
        left.axhline(
          final,
          color=colours[model],
          linestyle='--' if model == 'decoder_only' else ':',
          linewidth=1.3,
          label=f'{model} at its end  {final:.3f}',
        )
      _draw_model(right, runs, model, colours[model], sources=True)
    right.set_title('Decoders: held-out loss in their own training')
    left.set_title('Adaptation: held-out loss')
    for panel in axes[0]:
      panel.set_xlabel('target tokens')
      panel.set_ylabel('nats per target token')
      panel.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
      if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=9)


def _draw_model(axes, runs, model, colour, sources=False) -> None:
  """Draws every seed of a model, and their mean where there are several."""
  names = [n for n in numbers.seeds(runs, model) if runs[n]['curve']['step']]
  if not names:  # An imported model.
    return
  curves, finals = [], []
  for name in names:
    run, curve = runs[name], runs[name]['curve']
    # Tokens of its sources, so that a continued run starts where they end.
    before = run['inclusive']['target_tokens'] - run['target_tokens']
    x = [before * sources + tokens for tokens in curve['target_tokens']]
    curves.append((x, curve['eval_loss']))
    # The right panel shows losses of pretraining, on other targets than the
    # evaluation that compares the models.
    finals.append(curve['eval_loss'][-1] if sources else run['eval_loss'])
  label = f'{model}  {statistics.fmean(finals):.3f}'
  if len(names) > 1:
    label += f'  ({len(names)} seeds)'
    for x, y in curves:
      axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
  # Seeds pack different rows, so equal steps have different token counts.
  middle = [
    [statistics.fmean(values) for values in zip(*each, strict=False)]
    for each in zip(*curves, strict=True)
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
    label: name of the quality, of which more is better.
    quality: quality of every model.
    per_query: cost of every model, by axis; one panel for each axis.
    path: path of the PNG.
  """
  names = [name for name in quality if name in per_query]
  panels = list(next(iter(per_query.values())))
  size = 5.2 * len(panels), 3.8
  with _subplots(path, (1, len(panels)), size) as (_, axes):
    for axis, panel in zip(axes[0], panels, strict=True):
      points = [(per_query[name][panel], quality[name]) for name in names]
      front = [points[i] for i in inference_cost.pareto_front(points)]
      axis.plot(
        *zip(*front, strict=True),
        color='0.6',
        linewidth=1,
        label='Pareto front',
      )
      for i, (name, point) in enumerate(zip(names, points, strict=True)):
        axis.plot(*point, 'o', color=f'C{i % 10}')
        axis.annotate(
          name, point, xytext=(6, 4), textcoords='offset points', fontsize=9
        )
      axis.set_xscale('log')
      axis.margins(0.2)
      axis.set_xlabel(f'{panel}, one prompt')
      axis.set_ylabel(label)
      axis.legend(fontsize=9)


def draw_needles(
  grids: Mapping[str, Mapping[str, Mapping[str, float]]], path: pathlib.Path
) -> None:
  """Draws heat maps of depth and length into a PNG.

  Args:
    grids: model -> metric -> 'LENGTH/DEPTH' -> value from 0 to 1; one column of
      panels for each model, one row for each metric.
    path: path of the PNG.
  """
  metrics = list(next(iter(grids.values())))
  shape = len(metrics), len(grids)
  size = 1 + 3.2 * len(grids), 2.6 * len(metrics)
  with _subplots(path, shape, size) as (figure, axes):
    for column, (name, own) in zip(axes.T, grids.items(), strict=True):
      for axis, metric in zip(column, metrics, strict=True):
        lengths, depths = (
          list(dict.fromkeys(place.split('/')[i] for place in own[metric]))
          for i in (0, 1)
        )
        values = [
          [own[metric][f'{length}/{depth}'] for length in lengths]
          for depth in depths
        ]
        image = axis.imshow(
          values, vmin=0, vmax=1, aspect='auto', cmap='cividis'
        )
        for y, row in enumerate(values):
          for x, value in enumerate(row):
            axis.text(
              x,
              y,
              f'{value:.2f}',
              ha='center',
              va='center',
              fontsize=8,
              color='black' if value > 0.5 else 'white',
            )
        axis.set_title(f'{name}: {metric}')
        axis.grid(False)
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), depths)
        axis.set_xlabel('tokens')
        axis.set_ylabel('depth')
    figure.colorbar(image, ax=axes)


def draw_attention(
  models: Mapping[str, Mapping[str, Any]], path: pathlib.Path
) -> None:
  """Draws the attention analysis into a PNG, a line of panels for each model.

  Left: shares of the attention by part of what is read. Middle: share on the
  inputs by layer and head. Right: what the loss grows by without the
  cross-attention of a layer.

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
      ablation.set_visible(bool(values))
      ablation.barh(list(map(str, model['layers']))[: len(values)], values)
      ablation.invert_yaxis()
      ablation.set(title="without a layer's cross-attention", ylabel='layer')
      ablation.set_xlabel('more nats per target token')
