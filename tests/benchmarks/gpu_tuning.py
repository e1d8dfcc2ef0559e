"""Adapters and policies of a pair on one GPU: LoRA against PEFT, rollouts.

    python -m tests.benchmarks.gpu_tuning --peer --output=gpu_tuning.json

LoRA of rank 16 on all projections of 2B-2B (random weights, AdamW) over a base
in bf16, int8 and NF4, on rows of each of `--shapes`; with `--peer` also by
transformers and PEFT (bf16, eager attention, gradient checkpointing). `ratio`
is over PEFT on the same rows. `MFU of 4 N` counts four FLOPs for each token and
parameter of the products that read it, as public records do, `MFU` the formula
of `training.setup.step_flops`. Then each of `--policies`: tokens sampled a
second, and the seconds of sampling and of the update by Adafactor, with
`--samples` completions of each of `--prompts`. The file is written after each
part. Other flags are those of `training_step`, as are the workers.
"""

import argparse
from collections.abc import Sequence
import re
import time
from typing import Any

from tests.benchmarks import gpu_step, results, training_step


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
  """Measures and prints."""
  parser = results.parser(
    __doc__,
    shapes=['8x1024+256', '2x4096+512'],
    bases=['bfloat16', 'int8', 'nf4'],
    policies=['rloo', 'grpo:beta=0.04'],
    peer=False,
    dtype='bfloat16',
    prompts=8,
    samples=8,
    tokens=256,
    prompt_tokens=1024,
    policy='',  # Loss that this process, a worker, optimises.
  )
  # Given ones come last, and count.
  defaults = ['--pair=2b_2b', '--attention=tokamax', '--remat=auto']
  defaults += ['--peer_device=cuda', '--peer_checkpointing']
  arguments, model = parser.parse_known_args(argv)
  if arguments.policy:
    _work(arguments, training_step.make_parser().parse_args(model))
    return None
  model, rows, content = defaults + model, [], None
  for shape in arguments.shapes:
    peer = float('nan')
    for base in ['PEFT'] * arguments.peer + arguments.bases:
      row = _tune(base, shape, arguments, model)
      peer = row['tokens/s'] if base == 'PEFT' else peer
      rows.append(row | {'ratio': row['tokens/s'] / peer})
      content = results.report('gpu_tuning', rows, arguments)
  for kind in arguments.policies:
    rows.append(_optimise(kind, arguments, model))
    content = results.report('gpu_tuning', rows, arguments)
  return content


def _tune(
  base: str, shape: str, arguments: argparse.Namespace, model: Sequence[str]
) -> dict[str, Any]:
  """Measures steps of LoRA.

  Args:
    base: 'PEFT' for the peer, or the dtype of our base.
    shape: rows, and tokens of the encoder and the decoder, as '8x1024+256'.
    arguments: flags.
    model: flags of `training_step`.
  """
  from encdec_adapt.models import parameters
  from encdec_adapt.training import setup

  rows, source, target = map(int, re.split(r'[x+]', shape))
  flags = [*model, '--lora_rank=16', f'--batch_size={rows}']
  if base in ('int8', 'nf4'):
    flags.append(f'--lora_base={base}')
  flags += [f'--encoder_length={source}', f'--decoder_length={target}']
  side = 'transformers' if base == 'PEFT' else 'ours'
  first, *steps = training_step.measured(
    training_step.Worker(side, arguments.dtype, flags, gpu_step.ENVIRONMENT), 5
  )
  parsed = training_step.make_parser().parse_args(flags)
  pair = training_step.make_pair(parsed)
  counts = parameters.count_by_stack(pair)
  # The decoder's table is its head; lookups multiply nothing.
  decoder = counts['decoder']
  products = target * (decoder.other + decoder.cross + decoder.embeddings)
  products += source * counts['encoder'].other
  recipe = training_step.make_recipe(pair, parsed)
  flops = setup.step_flops(recipe, rows, frozen=True)
  seconds = results.median(steps, 'seconds')
  rate = seconds * (first['peak_flops'] or float('nan'))
  return {
    'job': f'LoRA, {base}',
    'rows': shape,
    'remat': first['remat'],
    'tokens/s': rows * (source + target) / seconds,
    'peak GiB': steps[-1]['peak_mib'] / 2**10,
    'MFU of 4 N': 4 * rows * products / rate,
    'MFU': flops / rate,
    'loss': first['loss'],
    'trained': first['parameters'],
  }


def _optimise(
  kind: str, arguments: argparse.Namespace, model: Sequence[str]
) -> dict[str, Any]:
  """Measures sampling and updates of a policy."""
  names = 'prompts', 'samples', 'tokens', 'prompt_tokens'
  flags = [f'--{name}={getattr(arguments, name)}' for name in names]
  flags += [f'--policy={kind}', '--optimizer=adafactor', '--microbatches=4']
  worker = training_step.Worker(
    'ours', arguments.dtype, flags + model, gpu_step.ENVIRONMENT, 'gpu_tuning'
  )
  _, *steps = training_step.measured(worker, 3)
  sampling = results.median(steps, 'sampling')
  return {
    'job': kind,
    'rows': f'{arguments.prompts}x{arguments.samples}x{arguments.tokens}',
    'sampled tokens/s': steps[-1]['tokens'] / sampling,
    'sampling s': sampling,
    'update s': results.median(steps, 'update'),
    'peak GiB': steps[-1]['peak_mib'] / 2**10,
  }


def _work(arguments: argparse.Namespace, model: argparse.Namespace) -> None:
  """Runs steps of a policy as `train.py` does; see `answer_steps`.

  Args:
    arguments: flags of this benchmark.
    model: flags of `training_step`.
  """
  import jax
  import numpy as np

  from encdec_adapt.data.records import record_sets
  from encdec_adapt.objectives import framing, row_fields
  from encdec_adapt.tokenizers import special_ids, vocabulary_pair
  from encdec_adapt.training import rollouts, setup, step
  from encdec_adapt.training.metrics import token_metrics
  from encdec_adapt.training.recipes import policy_recipe
  from encdec_adapt.training.recipes import recipe as recipe_lib
  from tests.training import conftest

  sampling = recipe_lib.Sampling(arguments.samples, arguments.tokens, 1.0)
  where = training_step.place(model)
  loss = conftest.make_loss(arguments.policy)
  rows = policy_recipe.CompletionRows(
    row_fields.PAIRS,
    framing.Lengths(arguments.prompt_tokens, arguments.tokens),
    arguments.samples,
    arguments.tokens,
    policy_recipe.AXES,
  )
  recipe = policy_recipe.Policies(
    loss, token_metrics.Completions(), where.model.config, rows
  )
  references = loss.references
  models = dict.fromkeys(references, where.model)
  job = training_step.make_job(where, recipe, model, models=models)
  params = where.place(where.model.init, jax.random.key(0))
  dtype = where.model.compute.dtype
  frozen = jax.tree.map(lambda x: jax.numpy.array(x, dtype), params)
  references = dict.fromkeys(references, frozen)
  state = job.create(params)
  del params, frozen  # The first is donated.

  # No completion ends: the id is beyond the vocabulary that is sampled from.
  vocabulary = vocabulary_pair.open_vocabulary('bytes')
  side = special_ids.SideIds(pad=0, eos=vocabulary.size, bos=2)
  records = record_sets.RecordSet.__new__(record_sets.RecordSet)
  records.framing = special_ids.Framing(side, side)
  records.spec = record_sets.RecordSpec(
    '', 'train', 'pairs', arguments.prompt_tokens, arguments.tokens
  )
  sampler = rollouts.Sampler(where, records, vocabulary, sampling, seed=0)
  rng, count = np.random.default_rng(0), arguments.prompts
  shape = count, arguments.prompt_tokens - 1  # And BOS.
  prompts = rng.integers(5, vocabulary.size, shape, np.int32)
  pairs = [framing.Pair(prompt, np.zeros(0, np.int32)) for prompt in prompts]
  rewards = rng.random((count, arguments.samples), np.float32)
  model.batch_size = count
  batch = setup.abstract_batch(where, rows, count, teacher=False)
  train = training_step.by_memory(
    job, recipe, model, state, batch, references, {}
  ).make_step(training_step.schedule())

  def measure() -> dict[str, Any]:
    nonlocal state
    start = time.perf_counter()
    samples = sampler(state.params, pairs, range(count), 0)
    middle = time.perf_counter()
    groups = [
      [
        [pair._replace(targets=samples.completion(i, j))]
        for j in range(sampling.samples)
      ]
      for i, pair in enumerate(pairs)
    ]
    batch = rows.of_groups(groups, records.framing, teacher=False)
    batch |= {'rewards': rewards, 'sampler_log_probs': samples.log_probs}
    placed = step.place_batch(batch, where, rows.axes)
    state, metrics = train(state, placed, references, {})
    jax.block_until_ready((state, metrics))
    times = {'sampling': middle - start, 'update': time.perf_counter() - middle}
    return times | {'tokens': int(samples.counts.sum())}

  training_step.answer_steps(measure)


if __name__ == '__main__':
  main()
