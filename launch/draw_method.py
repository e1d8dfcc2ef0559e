"""Draws method.svg, the picture of the top README: which weight goes where.

    python launch/draw_method.py

The text is dark on a light page and light on a dark one.
"""

import pathlib

_WIDTH, _HEIGHT = 880, 380
_COLOURS = {'embedding': '#8a8a8a', 'attention': '#2f7fd1', 'mlp': '#2b9a63'}
_BLOCK, _ROW = 206, 46  # Width and height of a block.
_STYLE = """
text { font-family: system-ui, sans-serif; font-size: 14px; fill: #222; }
.title { font-weight: 600; font-size: 15px; }
.small { font-size: 12px; }
.line { stroke: #555; fill: none; stroke-width: 2; }
.head { fill: #555; }
.layers { stroke: #888; fill: none; stroke-dasharray: 4 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd; }
  .line { stroke: #bbb; }
  .head { fill: #bbb; }
}
"""
# Blocks from top to bottom: colour, name, and origin of the weights.
_SOURCE = (
  ('mlp', 'feed-forward', ''),
  ('attention', 'causal self-attention', ''),
  ('embedding', 'embeddings', ''),
)
_ENCODER = (
  ('mlp', 'feed-forward', 'copied'),
  ('attention', 'bidirectional self-attention', 'copied; another mask'),
  ('embedding', 'embeddings', 'copied'),
)
_DECODER = (
  ('mlp', 'feed-forward', 'copied'),
  ('attention', 'cross-attention', 'a copy of self-attention'),
  ('attention', 'causal self-attention', 'copied'),
  ('embedding', 'embeddings', 'copied'),
)


def _text(x: int, y: int, text: str, kind: str = '', anchor: str = '') -> str:
  anchor = f' text-anchor="{anchor}"' if anchor else ''
  return f'<text x="{x}" y="{y}" class="{kind}"{anchor}>{text}</text>'


def _arrow(*points: tuple[int, int]) -> str:
  line = ' '.join(f'{x},{y}' for x, y in points)
  return f'<polyline points="{line}" class="line" marker-end="url(#head)"/>'


def _stack(x: int, title: str, blocks, reads: str, writes: str) -> str:
  """A stack whose embeddings stand at the bottom of the picture."""
  bottom, middle = _HEIGHT - 70, x + _BLOCK // 2
  top = bottom - len(blocks) * (_ROW + 10)
  parts = [
    _text(middle, 22, title, 'title', 'middle'),
    _text(middle, _HEIGHT - 30, reads, 'small', 'middle'),
    _text(middle, top - 34, writes, 'small', 'middle'),
    _text(x + _BLOCK + 10, top - 6, '× layers', 'small', 'end'),
    _arrow((middle, top), (middle, top - 26)),
    f'<rect x="{x - 10}" y="{top}" width="{_BLOCK + 20}" rx="8"'
    f' height="{(len(blocks) - 1) * (_ROW + 10)}" class="layers"/>',
  ]
  for i, (kind, name, origin) in enumerate(blocks):
    y = top + 5 + i * (_ROW + 10) + 6 * (kind == 'embedding')
    colour = _COLOURS[kind]
    parts.append(
      f'<rect x="{x}" y="{y}" width="{_BLOCK}" height="{_ROW}" rx="6"'
      f' fill="{colour}" fill-opacity=".22" stroke="{colour}"/>'
    )
    parts.append(_text(middle, y + (19 if origin else 28), name, '', 'middle'))
    parts.append(_text(middle, y + 36, origin, 'small', 'middle'))
  return '\n'.join(parts)


def main() -> None:
  source, encoder, decoder = 18, 350, 656
  bottom = _HEIGHT - 70
  level = bottom - 3 * (_ROW + 10) + 5 + _ROW // 2  # Of cross-attention.
  top = bottom - 3 * (_ROW + 10) - 54
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    ' role="img" aria-label="A decoder-only model becomes an encoder and a'
    ' decoder with cross-attention">',
    f'<style>{_STYLE}</style>',
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4"'
    ' markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" class="head"/></marker></defs>',
    _stack(source, 'Decoder-only model', _SOURCE, 'text', 'next token'),
    _stack(encoder, 'Encoder', _ENCODER, 'input', ''),
    _stack(decoder, 'Decoder', _DECODER, 'output so far', 'next token'),
    _arrow((source + _BLOCK + 24, 210), (encoder - 26, 210)),
    _text((source + _BLOCK + encoder) // 2, 200, 'adapt', '', 'middle'),
    _arrow(
      (encoder + _BLOCK // 2, top + 26),
      (encoder + _BLOCK // 2, top),
      (encoder + _BLOCK + 40, top),
      (encoder + _BLOCK + 40, level),
      (decoder - 2, level),
    ),
    '</svg>',
  ]
  path = pathlib.Path(__file__).with_name('method.svg')
  path.write_text('\n'.join(parts) + '\n', encoding='utf-8')


if __name__ == '__main__':
  main()
