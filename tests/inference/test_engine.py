"""The engine against a loop that knows no cache."""

import dataclasses
import functools
import gc
import pathlib

from flax import traverse_util
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.inference import (
  beam_search,
  decoding,
  lengths,
  quantization,
  sampling,
)
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import model_config
from encdec_adapt.ops import products
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from tests import tiny, toy_models

# Scanned blocks and a tail; windows shorter than what is generated; random
# models with a tied head repeat themselves.
STACK = toy_models.stack(
  layers=3, vocab_size=23, vocab_multiple=8, window=3, head=toy_models.UNTIED
)
CONFIGS = {
  **toy_models.pair_and_decoder(STACK),
  'merged': model_config.encoder_decoder(STACK, STACK, cross_merged=True),
  'global': model_config.encoder_decoder(STACK, STACK, cross_layers='global'),
  'prefix': model_config.DecoderOnlyConfig(
    dataclasses.replace(STACK, role='prefix')
  ),
  'gpt2': model_config.DecoderOnlyConfig(
    toy_models.stack(vocab_size=23, **toy_models.GPT2)
  ),
}
KINDS = ['encoder_decoder', 'decoder_only']
NEVER = -1  # an EOS that no model generates
IDS = engine_lib.SpecialIds(bos=2, eos=(NEVER,), pad=0)
SAMPLED = sampling.SamplingConfig(temperature=1.5, top_k=12, top_p=0.95)
# Two lengths of buckets. Cut to 8 tokens and at most 40 generated, rows need
# caches of 16, 32 and 64, and the 16 slots of local layers wrap around.
PROMPTS = [
  np.array([2, *(3 + np.arange(n) * (n + 5) % 20)])
  for n in (4, 1, 20, 7, 2, 18)
]
COUNTS = [7, 40, 5, 12, 30, 2]


@functools.cache
def _loaded(kind):
  return toy_models.load(CONFIGS[kind], scale=0.4)


def _requests(config=sampling.SamplingConfig(), **options):
  return [
    engine_lib.Request(
      prompt, count, dataclasses.replace(config, seed=i), **options
    )
    for i, (prompt, count) in enumerate(zip(PROMPTS, COUNTS, strict=True))
  ]


def _run(kind, requests, **options):
  made = _loaded(kind).engine(**{'ids': IDS, **options})
  return [found for _, found in sorted(made.run(requests), key=lambda x: x[0])]


def _logits(kind, prompt, tokens, loaded=None):
  """Uncached logits [n, V] of the tokens that follow a prompt."""
  loaded = loaded or _loaded(kind)
  start, source = prompt, ()
  if hasattr(loaded.config, 'encoder'):
    start, source = [2], (prompt[None],)
  text = np.array([[*start, *tokens]])
  if kind == 'prefix':
    positions = jnp.arange(text.shape[1])[None]
    hidden = loaded.model.decode(
      loaded.params,
      jnp.asarray(text),
      jnp.ones_like(positions),
      positions,
      prefix=jnp.int32(positions < len(prompt)),
    )
    logits = loaded.model.logits(loaded.params, hidden)
  else:
    logits = loaded.logits(text, *source)
  return logits[0, len(start) - 1 : -1]


def _log_probs(*arguments):
  return np.asarray(jax.nn.log_softmax(_logits(*arguments)))


def _check_log_probs(found, want):
  """Compares log-probabilities of tokens with those of all tokens, [n, V]."""
  want = np.take_along_axis(want, found.tokens[:, None], axis=1)[:, 0]
  # Programs that are not optimised round a little more.
  np.testing.assert_allclose(found.log_probs, want, atol=5e-5)


@pytest.mark.long
@pytest.mark.parametrize('config', [sampling.SamplingConfig(), SAMPLED])
@pytest.mark.parametrize(
  'kind', tiny.slow_except(['encoder_decoder', 'global', 'prefix'], CONFIGS)
)
def test_tokens_have_the_uncached_log_probs(kind, config):
  # Two rows for six prompts: rows are refilled while the other goes on.
  found = _run(kind, _requests(config), rows=2)
  for prompt, count, got in zip(PROMPTS, COUNTS, found, strict=True):
    assert len(got.tokens) == count
    assert got.ended == 'length'
    want = _log_probs(kind, prompt, got.tokens)
    if config.temperature == 0:
      np.testing.assert_array_equal(got.tokens, want.argmax(axis=1))
    _check_log_probs(got, want)
  # The rows differ, or the prompts would not have been read.
  assert len({tuple(got.tokens[:2]) for got in found}) > 1


@pytest.mark.long
def test_rows_beyond_the_vocabulary_are_not_generated():
  """Log-probabilities are those of all rows, of which a hidden one is first."""
  kind, prompt, size = 'encoder_decoder', PROMPTS[2], 17
  ids = dataclasses.replace(IDS, vocab_size=size)
  assert _log_probs(kind, prompt, [0]).argmax() >= size
  greedy, drawn = _run(
    kind,
    [
      engine_lib.Request(prompt, 12),
      engine_lib.Request(prompt, 12, sampling.SamplingConfig(1.5, top_k=20)),
    ],
    ids=ids,
  )
  engine = _loaded(kind).engine(ids=ids)
  searches = [
    beam_search.search(engine, [prompt], beams=beams, max_tokens=12)
    for beams in (1, 3)
  ]
  (_, first), (_, best) = (next(search) for search in searches)
  np.testing.assert_array_equal(first.tokens, greedy.tokens)
  for got in (greedy, drawn, best):
    assert got.tokens.max() < size
    want = _log_probs(kind, prompt, got.tokens)
    if got is greedy:
      np.testing.assert_array_equal(got.tokens, want[:, :size].argmax(axis=1))
    _check_log_probs(got, want)


def _pair(**changes):
  fields = dict(
    vocab_size=23, vocab_multiple=8, window=3, head=toy_models.UNTIED
  )
  stack = toy_models.stack(**fields | changes)
  return model_config.encoder_decoder(stack, stack)


QWEN = dict(attention_bias='qkv', qk_norm=True, mlp_bias=True)
EXPERTS = dict(experts=4, experts_per_token=2, shared_expert_width=8)
# Model, shards of the tensor axis, rules, whether kernels are integers, and
# rows that are computed, as on GPUs.
PREPARED = {
  'pair': (_pair(), 1, {}, False, 1),
  'biases and norms': (_pair(**QWEN), 1, {}, False, 1),
  't5': (_pair(**toy_models.T5), 1, {}, False, 3),
  'merged': (CONFIGS['merged'], 1, {}, False, 5),
  'experts': (_pair(**EXPERTS), 1, {}, False, 5),
  'int8': (_pair(), 1, {}, True, 1),
  'gpt2': (CONFIGS['gpt2'], 1, {}, True, 1),
  'sharded alike': (_pair(kv_heads=4), 4, {}, False, 1),
  'sharded apart': (_pair(kv_heads=1), 2, {'kv_heads': ()}, False, 5),
}


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize('case', PREPARED)
def test_merged_kernels_give_the_uncached_log_probs(case, monkeypatch):
  config, tensor, changes, int8, least_rows = PREPARED[case]
  monkeypatch.setitem(products.LEAST_ROWS, 'cpu', least_rows)
  loaded = toy_models.load(config, scale=0.4)
  made = engine_lib.Engine(
    loaded.model,
    loaded.params,
    IDS,
    rows=2,
    mesh=mesh_lib.make_mesh(
      mesh_lib.MeshConfig(fsdp=1, tensor=tensor), jax.devices()[:tensor]
    ),
    rules=dataclasses.replace(rules_lib.RULES['fsdp'], **changes),
    int8=int8,
  )
  attention = made.params['decoder']['tail']['layer_0']['attention']
  assert ('query' in attention) == bool(changes)
  config = sampling.SamplingConfig(top_log_probs=3)
  [(_, found)] = made.run([engine_lib.Request(PROMPTS[0], 10, config)])
  np.testing.assert_array_equal(found.top.ids[:, 0], found.tokens)
  if int8:
    rounded = quantization.rounded(loaded.params, loaded.model.table)
    loaded = dataclasses.replace(loaded, params=rounded)
  logits = _logits(case, PROMPTS[0], found.tokens, loaded)
  want = np.asarray(jax.nn.log_softmax(logits))
  np.testing.assert_array_equal(found.tokens, want.argmax(axis=1))
  _check_log_probs(found, want)
  # A device has the parts of a product of its heads and features.
  arguments = made._decode_arguments(made._state, engine_lib.UNLIMITED)
  program = made.programs.get(decoding.decode, *arguments, **made.choice)
  layers = [x for x in program.as_text().splitlines() if '/layer_' in x]
  assert layers and not [x for x in layers if 'collective-permute' in x]


@pytest.mark.long
def test_requests_of_adapters_are_those_of_merged_models():
  """Of two adapters over one base, in turns."""
  loaded = _loaded('encoder_decoder')
  options = adapters_lib.Options(rank=2, full=('decoder/norms', 'decoder/key'))
  adapters = adapters_lib.Adapters(loaded.config, options)
  flat = traverse_util.flatten_dict(loaded.params, sep='/')
  nest = functools.partial(traverse_util.unflatten_dict, sep='/')
  attached, merged = {}, {'': loaded.params}
  for seed, name in enumerate('ab'):
    rng = np.random.default_rng(seed)
    trained = nest(
      {
        path: jnp.asarray(0.4 * rng.normal(size=info.shape), jnp.float32)
        for path, info in adapters.table.items()
      }
    )
    attached[name] = adapters.attach(
      nest(dict.fromkeys(adapters.frozen)), trained
    )
    base = nest({path: flat[path] for path in adapters.frozen})
    merged[name] = quantization.merge(
      adapters.attach(base, trained), loaded.model.table
    )
  engine = loaded.engine(rows=2, ids=IDS, adapters=attached)
  order = ['', 'a', 'a', 'b', '', 'b']
  requests = [
    dataclasses.replace(request, adapters=name)
    for request, name in zip(_requests(), order, strict=True)
  ]
  decoding._COMPILED.clear()
  results = [*engine.run(requests)]
  # The base and the adapters, of equal shapes, each have programs of what reads
  # parameters, and share the others.
  owners = {
    function: {key[0] for key in decoding._COMPILED if key[1] is function}
    for function in (decoding.start, decoding.decode)
  }
  assert [len(x) for x in owners.values()] == [1, 2]
  for i, found in results:
    same = dataclasses.replace(loaded, params=merged[order[i]])
    [(_, wanted)] = same.engine(rows=1, ids=IDS).run([_requests()[i]])
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.log_probs, wanted.log_probs, atol=5e-5)
  with pytest.raises(errors.UserError, match="'c': the engine has a, b"):
    engine.submit(dataclasses.replace(requests[0], adapters='c'))


@pytest.mark.long
def test_rows_do_not_depend_on_their_batch():
  kind = 'encoder_decoder'
  one = _run(kind, _requests(SAMPLED), rows=1)
  for rows in (3, 8):
    for a, b in zip(
      one, _run(kind, _requests(SAMPLED), rows=rows), strict=True
    ):
      np.testing.assert_array_equal(a.tokens, b.tokens)
  other = _run(kind, _requests(dataclasses.replace(SAMPLED, seed=9))[:1])
  again = dataclasses.replace(
    _requests(SAMPLED)[0], sampling=dataclasses.replace(SAMPLED, seed=9)
  )
  assert (other[0].tokens == one[0].tokens).all()
  assert (_run(kind, [again])[0].tokens != one[0].tokens).any()


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize('kind', KINDS)
def test_on_a_mesh_the_tokens_are_the_same(kind):
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(fsdp=4, tensor=2))
  loaded = _loaded(kind)
  arguments = loaded.model, loaded.params, IDS
  options = {'mesh': mesh, 'rules': rules_lib.RULES['fsdp']}
  made = engine_lib.Engine(*arguments, rows=4, **options)
  found = dict(made.run(_requests()))
  # Rows over fsdp, heads over tensor.
  state = made.programs.run(decoding.start, rows=4, length=16, source=0)
  key = state.cache.layers['tail']['layer_0'].key
  assert key.addressable_shards[0].data.shape == (1, 1, 16, 8)
  for i, want in enumerate(_run(kind, _requests())):
    np.testing.assert_array_equal(found[i].tokens, want.tokens)
    np.testing.assert_allclose(found[i].log_probs, want.log_probs, atol=1e-4)
  with pytest.raises(errors.UserError, match='6 rows .* multiple of 4'):
    engine_lib.Engine(*arguments, rows=6, **options)


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_rows_end_at_eos_or_a_stop_string(kind):
  free = [found.tokens for found in _run(kind, _requests(SAMPLED))]
  ends = (int(free[0][2]), 22)  # Any of several tokens.

  def decode(tokens):
    return ''.join(chr(65 + token) for token in tokens)

  # Two tokens before a row's end.
  stop = next(
    decode(tokens[n : n + 2])
    for tokens in free[1:]
    for n in range(1, len(tokens) - 2)
    if not np.isin(tokens[: n + 2], ends).any()
  )
  reported = {i: [] for i in range(len(free))}
  made = _loaded(kind).engine(
    ids=dataclasses.replace(IDS, eos=tuple(ends)), decode=decode, steps=3
  )
  found = dict(
    made.run(
      _requests(SAMPLED, stop=(stop, 'no such text')),
      lambda i, tokens: reported[i].extend(tokens.tokens),
    )
  )
  endings = set()
  for i, tokens in enumerate(free):
    eos = np.flatnonzero(np.isin(tokens, ends))[:1] + 1
    start = decode(tokens).find(stop)
    stopped = [] if start < 0 else [start + len(stop)]
    count = min(*eos.tolist(), *stopped, len(tokens), len(tokens))
    np.testing.assert_array_equal(found[i].tokens, tokens[:count])
    assert len(found[i].log_probs) == count
    want = 'eos' if [count] == eos.tolist() else 'length'
    text = decode(tokens[: count - (want == 'eos')])
    if want != 'eos' and [count] == stopped:
      want, text = 'stop', decode(tokens[:start])
    assert (found[i].ended, found[i].text) == (want, text)
    endings.add(want)
    np.testing.assert_array_equal(reported[i], found[i].tokens)
  assert endings == {'eos', 'length', 'stop'}


@pytest.mark.long
def test_a_repetition_penalty_counts_what_the_decoder_read():
  penalty = sampling.SamplingConfig(repetition_penalty=1.8)
  for kind in KINDS:
    plain = _run(kind, _requests())
    changed = 0
    for i, got in enumerate(_run(kind, _requests(penalty), rows=4)):
      log_probs = _log_probs(kind, PROMPTS[i], got.tokens)
      read = set(PROMPTS[i].tolist() if kind == 'decoder_only' else [2])
      # The penalty is of logits; soft-capped ones follow up to a constant.
      logits = np.asarray(_logits(kind, PROMPTS[i], got.tokens))
      for n, token in enumerate(got.tokens):
        row = logits[n].copy()
        seen = sorted(read)
        row[seen] = np.where(row[seen] > 0, row[seen] / 1.8, row[seen] * 1.8)
        assert token == row.argmax()
        read.add(int(token))
      _check_log_probs(got, log_probs)
      changed += (got.tokens[:3] != plain[i].tokens[:3]).any()
    assert changed


def test_rows_that_ended_see_no_further_tokens():
  penalty = sampling.SamplingConfig(repetition_penalty=1.8)
  made = _loaded('encoder_decoder').engine(rows=2, ids=IDS)
  for count in (2, 20):
    made.submit(engine_lib.Request(PROMPTS[0], count, penalty))
  found = made.step()
  for row, (_, completion) in enumerate(found):
    seen = np.flatnonzero(made._state.seen[row])
    assert {*seen} == {IDS.bos, *completion.tokens}


@pytest.mark.long
def test_penalties_and_likeliest_tokens_are_of_their_row():
  penalty = sampling.SamplingConfig(
    presence_penalty=0.4, frequency_penalty=0.3, top_log_probs=3
  )
  for kind in KINDS:
    requests = _requests(penalty)
    requests[0] = _requests()[0]
    plain, *rows = _run(kind, requests, rows=3)
    assert plain.top is None
    np.testing.assert_array_equal(
      plain.tokens, _run(kind, requests[:1])[0].tokens
    )
    for prompt, got in zip(PROMPTS[1:], rows, strict=True):
      logits = np.asarray(_logits(kind, prompt, got.tokens))
      counts = np.zeros(logits.shape[1])
      for row, token in zip(logits, got.tokens, strict=True):
        assert token == (row - 0.4 * (counts > 0) - 0.3 * counts).argmax()
        counts[token] += 1
      # Of the model's distribution, without penalties.
      want = _log_probs(kind, prompt, got.tokens)
      _check_log_probs(got, want)
      order = np.argsort(-want, axis=1)[:, :5]
      np.testing.assert_array_equal(got.top.ids, order)
      np.testing.assert_allclose(
        got.top.log_probs, np.take_along_axis(want, order, 1), atol=5e-5
      )


@pytest.mark.long
def test_requests_come_and_go():
  made = _loaded('encoder_decoder').engine(rows=2, ids=IDS)
  want = _run('encoder_decoder', _requests())
  numbers = [made.submit(request) for request in _requests()[:3]]
  found = dict(made.step())
  made.cancel(numbers[1])
  numbers += [made.submit(request) for request in _requests()[3:]]
  while made.busy:
    found |= dict(made.step())
  assert found.keys() == set(numbers) - {numbers[1]}
  for number, got in found.items():
    np.testing.assert_array_equal(got.tokens, want[number].tokens)


def _maps():
  return len(pathlib.Path('/proc/self/maps').read_text().splitlines())


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_mixed_requests_compile_nothing_after_the_warm_up(kind):
  longest, most = 100, 40
  stack = toy_models.stack(layers=1, vocab_size=24, head=toy_models.UNTIED)
  loaded = toy_models.load(toy_models.pair_and_decoder(stack)[kind])
  sizes = lengths.state_sizes(longest, most, reads_encoder=kind == KINDS[0])
  made = loaded.engine(ids=IDS, steps=4, sizes=sizes)
  programs = [compile_it() for compile_it in made.programs_to_compile()]
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: (
      compiled.append(event)
      if event.endswith('backend_compile_duration')
      else None
    )
  )
  rng = np.random.default_rng(0)
  requests = [
    engine_lib.Request(
      rng.integers(3, 24, rng.integers(1, longest + 1)),
      int(rng.integers(1, most + 1)),
      (sampling.SamplingConfig(), dataclasses.replace(SAMPLED, seed=i))[i % 2],
    )
    for i in range(300)
  ]
  ended, waiting, used = 0, list(requests), set()
  while ended < 300:
    if ended < 200:
      compiled.clear()
      maps = _maps()
    # A few at a time, and none now and then: the state shrinks.
    while waiting and len(waiting) % 50 and sum(made.load) < 9:
      made.submit(waiting.pop())
    if not made.busy:
      made.submit(waiting.pop())
    before = made.busy and made._state and made._state.cache
    is_empty = not any(made._active)
    ended += len(made.step(lambda number, tokens: None))
    cache = made._state.cache
    used.add((cache.length, cache.source))
    if not is_empty:
      assert cache.length >= before.length and cache.source >= before.source
  assert not compiled
  assert _maps() - maps <= 200
  assert len(used) > 1
  assert used <= set(sizes)
  assert len(programs) + len(sizes) <= decoding.MOST_PROGRAMS


@pytest.mark.parametrize('reads_encoder', [True, False])
@pytest.mark.parametrize('prompt, most', [(4096, 1024), (100_000, 5), (2, 1)])
def test_few_programs_serve_any_limits(
  prompt, most, reads_encoder, monkeypatch
):
  sizes = lengths.state_sizes(prompt, most, reads_encoder=reads_encoder)
  assert len(sizes) <= 4
  assert sizes[-1].source >= (prompt if reads_encoder else 0)
  assert sizes[-1].length >= most + (0 if reads_encoder else prompt)
  resizes = sum(a.holds(b) and a != b for a in sizes for b in sizes)
  # Start and decode of each size, a prefill of each width, and stop.
  count = sum(2 + len(size.widths()) for size in sizes) + resizes + 1
  assert count <= 64
  if reads_encoder:
    return
  # The scores of prompts of any length do not evict these programs.
  engine, shapes = _loaded('decoder_only').engine(ids=IDS, sizes=sizes), set()

  def run(fn, params, tokens, counts, **static):
    shapes.add(tokens.shape)
    zeros = np.zeros(tokens.shape[1] - 1)
    return zeros, decoding.Top(zeros, zeros)

  monkeypatch.setattr(engine.programs, 'run', run)
  for count_of_tokens in np.unique(np.geomspace(1, prompt, 300).astype(int)):
    request = engine_lib.Request(np.full(count_of_tokens, 3), most)
    assert len(engine.score_prompt(request).tokens) == count_of_tokens
  assert count + len(shapes) <= decoding.MOST_PROGRAMS


@pytest.mark.long
def test_programs_that_were_not_used_lately_are_dropped(monkeypatch):
  want = _run('encoder_decoder', _requests(), rows=1)
  decoding._COMPILED.clear()
  monkeypatch.setattr(decoding, 'MOST_PROGRAMS', 2)
  made = _loaded('encoder_decoder').engine(rows=1, ids=IDS)
  counts = []
  for _ in range(3):
    for i, completion in made.run(_requests()):
      np.testing.assert_array_equal(completion.tokens, want[i].tokens)
    assert len(decoding._COMPILED) == 2
    gc.collect()
    counts.append(_maps())
  # The programs of a round take hundreds.
  assert counts[2] - counts[0] < 100


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_integer_kernels_give_nearly_the_same(kind):
  plain = _run(kind, _requests())
  found = _run(kind, _requests(), int8=True)
  assert (
    sum(
      (a.tokens[:2] == b.tokens[:2]).all()
      for a, b in zip(plain, found, strict=True)
    )
    > len(plain) // 2
  )
  first = [[got.log_probs[0] for got in results] for results in (plain, found)]
  np.testing.assert_allclose(*first, atol=0.2)
  assert np.abs(np.subtract(*first)).max() > 0


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_a_cache_adds_no_error_in_bfloat16(kind):
  plain = _loaded(kind)
  compute = dataclasses.replace(plain.model.compute, dtype='bfloat16')
  model = dataclasses.replace(plain.model, compute=compute)
  loaded = dataclasses.replace(plain, model=model)
  made = loaded.engine(ids=IDS)
  leaves = jax.tree.leaves(made.params)
  assert sum(leaf.dtype == jnp.bfloat16 for leaf in leaves) > len(leaves) // 2
  errors_of = {'engine': [], 'uncached': []}
  for i, found in made.run(_requests()):
    at = np.arange(len(found.tokens)), found.tokens
    exact = _log_probs(kind, PROMPTS[i], found.tokens)[at]
    uncached = _log_probs(kind, PROMPTS[i], found.tokens, loaded)[at]
    errors_of['engine'].extend(np.abs(found.log_probs - exact))
    errors_of['uncached'].extend(np.abs(uncached - exact))
  engine, uncached = map(np.mean, errors_of.values())
  assert 0 < engine < 1.5 * uncached


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: engine_lib.Request(PROMPTS[0], 0), 'max_tokens is 0'),
    (lambda: engine_lib.Request(PROMPTS[0], stop=('',)), 'stop string is'),
    (lambda: engine_lib.Request(PROMPTS[0][:0]), 'prompt has no tokens'),
    (
      lambda: _run('decoder_only', _requests(stop=('a',))),
      'stop strings need a tokenizer',
    ),
    (lambda: _loaded('decoder_only').engine(rows=0, ids=IDS), '0 rows'),
    (
      lambda: _run(
        'encoder_decoder', _requests(), sizes=[lengths.Size(64, 16)]
      ),
      r'request needs a state of .*\(5, 21\) .* largest has \(64, 16\)',
    ),
    (
      lambda: _run('decoder_only', [engine_lib.Request(np.array([2, 23]))]),
      'tokens of the prompt are 2 to 23; .* 0 to 22',
    ),
  ],
)
def test_bad_input_is_named(make, message):
  with pytest.raises(errors.UserError, match=message):
    make()
