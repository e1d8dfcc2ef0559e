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
part; none is left out: choose by the flags. Other flags are those of
`training_step`.
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
    peer_device='cuda',
    dtype='bfloat16',
    attention='tokamax',
    remat='auto',
    steps=5,
    prompts=8,
    samples=8,
    tokens=256,
    prompt_tokens=1024,
    microbatches=4,  # Of a policy's update.
    policy='',  # Loss that this process, a worker, optimises.
    worker='',
  )
  arguments, model = parser.parse_known_args(argv)
  if arguments.worker:
    model += [
      f'--attention={arguments.attention}',
      f'--remat={arguments.remat}',
    ]
    model += [f'--microbatches={arguments.microbatches}']
    _work(arguments, training_step.make_parser().parse_args(model))
    return None
  if not any(flag.startswith(('--pair', '--layers')) for flag in model):
    model += ['--pair=2b_2b']
  rows, content = [], None
  for shape in arguments.shapes:
    peers = []
    for base in ['PEFT'] * arguments.peer + arguments.bases:
      row = _tune(base, shape, arguments, model)
      peers += [row['tokens/s']] * (base == 'PEFT')
      row['ratio'] = row['tokens/s'] / peers[0] if peers else float('nan')
      rows.append(row)
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
    model: flags of the model.
  """
  rows, source, target = re.fullmatch(r'(\d+)x(\d+)\+(\d+)', shape).groups()
  lora = 'rank=16,alpha=32' + f',base={base}' * (base in ('int8', 'nf4'))
  flags = [*model, f'--lora={lora}', f'--batch_size={rows}']
  flags += [f'--encoder_length={source}', f'--decoder_length={target}']
  flags += [f'--attention={arguments.attention}', f'--remat={arguments.remat}']
  flags += [f'--peer_device={arguments.peer_device}', '--peer_checkpointing']
  side = 'transformers' if base == 'PEFT' else 'ours'
  worker = training_step.Worker(
    side, arguments.dtype, flags, gpu_step.ENVIRONMENT
  )
  first, *steps = training_step.measured(worker, arguments.steps)
  settings = training_step.make_parser().parse_args(flags)
  seconds = results.median(steps, 'seconds')
  peak = first['peak_flops'] or float('nan')
  simple, formula = _step_flops(settings)
  return {
    'job': f'LoRA, {base}',
    'remat': first['remat'],
    'rows': shape,
    'tokens/s': training_step.tokens_of(settings) / seconds,
    'step s': seconds,
    'peak GiB': steps[-1]['peak_mib'] / 2**10,
    'MFU of 4 N': simple / seconds / peak,
    'MFU': formula / seconds / peak,
    'first step s': first['seconds'],
    'loss': first['loss'],
    'trained': first['parameters'],
  }


def _step_flops(settings: argparse.Namespace) -> tuple[float, float]:
  """Returns FLOPs of a step of LoRA: 4 N a token, and by our formula."""
  from encdec_adapt.models import parameters
  from encdec_adapt.objectives import framing
  from encdec_adapt.training import setup
  from encdec_adapt.training.losses import cross_entropy

  pair, rows = training_step.make_pair(settings), settings.batch_size
  lengths = framing.Lengths(settings.encoder_length, settings.decoder_length)
  counts = parameters.count_by_stack(pair)
  # The decoder's table is its head; lookups multiply nothing.
  tokens = lengths.encoder * counts['encoder'].other + lengths.decoder * (
    sum(getattr(counts['decoder'], x) for x in ('other', 'cross', 'embedding'))
  )
  formula = setup.step_flops(
    cross_entropy.CrossEntropy(), pair, lengths, 1, rows, frozen=True
  )
  return 4.0 * rows * tokens, formula


def _optimise(
  kind: str, arguments: argparse.Namespace, model: Sequence[str]
) -> dict[str, Any]:
  """Measures sampling and updates of a policy."""
  names = ('prompts', 'samples', 'tokens', 'prompt_tokens', 'microbatches')
  flags = [f'--{x}={getattr(arguments, x)}' for x in (*names, 'attention')]
  flags += [f'--remat={arguments.remat}', f'--policy={kind}', *model]
  worker = training_step.Worker(
    'ours', arguments.dtype, flags, gpu_step.ENVIRONMENT, 'gpu_tuning'
  )
  first, *steps = training_step.measured(worker, arguments.steps)
  seconds = results.median(steps, 'sample s')
  return {
    'job': kind,
    'rows': f'{arguments.prompts}x{arguments.samples}x{arguments.tokens}',
    'sampled tokens/s': steps[-1]['tokens'] / seconds,
    'sample s': seconds,
    'update s': results.median(steps, 'update s'),
    'peak GiB': steps[-1]['peak_mib'] / 2**10,
    'first step s': first['sample s'] + first['update s'],
    'loss': first['loss'],
  }


def _work(arguments: argparse.Namespace, model: argparse.Namespace) -> None:
  """Runs steps of a policy as `train.py` does; see `answer_steps`.

  Args:
    arguments: flags of this benchmark.
    model: flags of `training_step`.
  """
  import dataclasses

  import jax
  import numpy as np

  from encdec_adapt.data.records import record_sets
  from encdec_adapt.objectives import framing, supervised
  from encdec_adapt.tokenizers import special_ids, vocabulary_pair
  from encdec_adapt.training import rollouts, setup, step, train_section
  from encdec_adapt.training.losses import policy

  options = f'samples={arguments.samples},tokens={arguments.tokens}'
  sampling = train_section.TrainConfig(rollouts=options).sampling
  model.optimizer = 'adafactor'
  where = training_step.place(model)
  loss = policy.Policy(kind=arguments.policy, rollouts=sampling)
  loss = dataclasses.replace(
    loss, models=dict.fromkeys(loss.references, where.model)
  )
  axes = framing.GROUP_AXES | loss.axes
  job = training_step.make_job(where, loss, model, axes=axes)
  params = where.place(where.model.init, jax.random.key(0))
  dtype = where.model.compute.dtype
  references = {
    name: jax.tree.map(lambda x: jax.numpy.array(x, dtype), params)
    for name in loss.references
  }
  state = job.create(params)
  del params  # Donated.
  # No completion ends: the id is beyond the vocabulary that is sampled from.
  vocabulary = vocabulary_pair.open_vocabulary('bytes')
  side = special_ids.SideIds(pad=0, eos=vocabulary.size, bos=2)
  records = record_sets.RecordSet.__new__(record_sets.RecordSet)
  records.framing = special_ids.Framing(side, side)
  records.spec = record_sets.RecordSpec(
    '', 'train', 'pairs', arguments.prompt_tokens, arguments.tokens
  )
  sampler = rollouts.Sampler(where, records, vocabulary, sampling, seed=0)
  rng, nothing = np.random.default_rng(0), np.zeros(0, np.int32)
  length = arguments.prompt_tokens - 1  # And BOS.
  prompts = rng.integers(
    5, vocabulary.size, (arguments.prompts, length), np.int32
  )
  pairs = [framing.Pair(prompt, nothing) for prompt in prompts]
  rewards = rng.random((arguments.prompts, arguments.samples), np.float32)
  model.batch_size = arguments.prompts
  lengths = records.spec.lengths
  batch = setup.abstract_batch(
    where,
    loss,
    supervised.Supervised,
    lengths,
    arguments.prompts,
    axes,
    teacher=False,
  )
  sizes = lengths, arguments.samples
  train = training_step.by_memory(
    job, loss, model, sizes, state, batch, references, {}
  ).make_step()

  def measure() -> dict[str, Any]:
    nonlocal state
    start = time.perf_counter()
    samples = sampler(state.params, pairs, range(len(pairs)), 0)
    sampled = time.perf_counter()
    groups = [
      [
        [pair._replace(targets=samples.completion(i, j))]
        for j in range(sampling.samples)
      ]
      for i, pair in enumerate(pairs)
    ]
    batch = loss.make_batch(
      groups, records.spec.lengths, records.framing, teacher=False
    )
    batch |= {'rewards': rewards, 'sampler_log_probs': samples.log_probs}
    placed = step.place_batch(batch, where, axes)
    state, metrics = train(state, placed, references, {})
    value = float(metrics['loss'])
    return {
      'sample s': sampled - start,
      'update s': time.perf_counter() - sampled,
      'tokens': int(samples.counts.sum()),
      'loss': value,
    }

  training_step.answer_steps(measure)


if __name__ == '__main__':
  main()
