"""A tiny job of every kind of training and of every kind of option.

    python -m tests.golden.jobs FOLDER [NAME ..]

trains each for 50 steps in FOLDER, once in one go and once resumed after 25,
and prints a line for each: losses of the last step and a digest of the
parameters of both. The lines of two commits that should train alike are equal
on one machine. `saved/NAME.json` is the config.json of such a run, of the
version before.
"""

import argparse
import hashlib
import json
import os
import pathlib

import numpy as np

from encdec_adapt import materialize, train
from encdec_adapt.telemetry import metrics
from tests import tiny

STEPS, HALF = 50, 25
SMALL = 'configs/decoders/small'
SFT = f'sft:source={SMALL}'
REWARD = """
def vowels(prompts, completions, fields):
  return [sum(c in 'aeiou' for c in x) / (1 + len(x)) for x in completions]
"""
PREFERENCES = (
  'data.source=preferences:preferences.jsonl#prompt,chosen,rejected,margin=by',
  'data.objective=preferences:separator=":"',
)
PAIRS = ('data.source=pairs:pairs.jsonl#q,a',)
POLICY = (
  *PAIRS,
  'train.rollouts.samples=4',
  'train.rollouts.tokens=8',
  'train.rewards.functions=mine.py#vowels',
)
TEXT = (
  *(f'model.{side}.{k}={v}' for side in ('encoder', 'decoder')
    for k, v in tiny.STACK.items() if k != 'pattern'),
  "model.encoder.pattern=('local',)",
  "model.decoder.pattern=('local',)",
  'model.vocab_multiple=8',
  'data.source=text:text.txt#lines',
  'data.vocabulary=vocabulary.model',
)  # fmt: skip
# Name: configuration, and changed keys.
JOBS = {
  'mixture_with_rates': (
    'base',
    *TEXT,
    'data.objective=prefix_lm | span_corruption',
    'data.rates=tokens:1,0; 30=tokens:1,3',
    'checkpoint.every=0.2',
    'model.kind=encoder_decoder',
    'evaluation.loss=0.1',
    'evaluation.samples=0.5',
  ),
  't5_positions': (
    'base',
    *TEXT,
    'data.objective=span_corruption',
    'model.kind=encoder_decoder',
    'model.encoder.positions.kind=relative',
    'model.encoder.positions.buckets=8',
    'model.encoder.positions.distance=32',
    'model.decoder.positions.kind=relative',
    'model.decoder.positions.buckets=8',
    'model.decoder.positions.distance=32',
    'model.encoder.attention_softcap=0',
    'model.decoder.attention_softcap=0',
    'optimizer.kind=adafactor',
    'optimizer.schedule=rsqrt',
  ),
  'llama3_rope': (
    'base',
    *TEXT,
    'data.objective=causal_lm',
    'data.encoder_length=0',
    'model.kind=decoder_only',
    'model.decoder.rope_scaling.kind=llama3',
    'model.decoder.rope_scaling.original_length=16',
    'train.cross_attention_warmup=0',
  ),
  'labels': (
    f'classification:source={SMALL}',
    'data.source=labels:labels.jsonl#first,second,label',
    'data.objective=classify:labels=absent|present',
    'data.decoder_length=0',
  ),
  'distillation_by_share': (
    'sft:source=pair',
    *PAIRS,
    'loss.kind=distill',
    'loss.distill.share=0.3',
    f'teacher.checkpoint={SMALL}',
  ),
  'stored_teacher': (
    'sft:source=pair', *PAIRS, 'data.objective=pairs', 'loss.kind=distill'
  ),
  'stored_teacher_of_spans': (
    'sft:source=pair',
    'data.source=text:text.txt#lines',
    'data.objective=t5gemma2',
    'loss.kind=distill',
  ),
  'distillation_on_policy': (
    SFT,
    *PAIRS,
    'loss.kind=distill',
    'loss.distill.divergence=reverse',
    'loss.distill.on_policy=0.45',
    'train.rollouts.tokens=8',
    'train.rollouts.temperature=0.9',
    'train.rollouts.top_k=20',
    f'teacher.checkpoint={SMALL}',
  ),
  'dpo_and_cross_entropy': (
    SFT,
    *PREFERENCES,
    'loss.kind=dpo',
    'loss.dpo.beta=0.2',
    'loss.dpo.smoothing=0.1',
    'loss.dpo.cross_entropy=0.3',
  ),
  'ipo_by_means': (
    SFT, *PREFERENCES, 'loss.kind=ipo', 'loss.ipo.log_probs=mean'
  ),
  'orpo': (SFT, *PREFERENCES, 'loss.kind=orpo', 'loss.orpo.weight=0.4'),
  'reward': (SFT, *PREFERENCES, 'loss.kind=reward'),
  'rloo_with_a_judge': (
    SFT,
    *POLICY,
    'loss.kind=rloo',
    'loss.rloo.beta=0.1',
    'train.rollouts.temperature=0.9',
    'train.rewards.models=reward',
    'train.rewards.model_weights=0.5',
  ),
  'grpo_with_options': (
    'sft:source=pair',
    *POLICY,
    'loss.kind=grpo',
    'loss.grpo.beta=0.1',
    'loss.grpo.clip=0.3',
    'loss.grpo.divisor=constant',
    'loss.grpo.deviation=none',
    'train.rollouts.cut=penalty',
    'train.rollouts.cut_penalty=0.5',
    'train.rollouts.max_kl=50',
  ),
  'infonce_with_a_learnt_temperature': (
    'embeddings:source=pair',
    'model.head.projections=(24,16)',
    'model.head.dimensions=(8,)',
    'data.source=embed:embed.jsonl#q,p,n',
    'data.objective=embed:texts=6,query=find: ',
    'loss.kind=infonce',
    'loss.infonce.temperature=0.1',
    'loss.infonce.learn_temperature=True',
    'data.decoder_length=0',
    'train.microbatches=2',
  ),
  'lora_over_int8': (
    'sft:source=pair',
    *PAIRS,
    'train.lora.rank=2',
    'train.lora.alpha=8',
    'train.lora.base=int8',
    'train.lora.dropout=0.1',
  ),
  'lora_over_nf4': (
    'sft:source=pair',
    *PAIRS,
    'train.lora.rank=2',
    "train.lora.targets=('attention','mlp')",
    "train.lora.full=('cross_attention','norms')",
    'train.lora.base=nf4',
  ),
}  # fmt: skip
COMMON = (
  'data.encoder_length=32',
  'data.decoder_length=32',
  'data.eval_fraction=0.2',
  'data.shards=1',
  'data.workers=1',
  'data.passes=20',
  'compute.dtype=float32',
  'train.batch_size=8',
  'train.eval_batch_size=8',
  'evaluation.loss=25',
  'evaluation.samples=0',
  'checkpoint.every=25',
  'checkpoint.keep_best=False',
  'optimizer.learning_rate=1e-3',
  'optimizer.schedule=constant',
  'optimizer.warmup_steps=0',
)


def write_files(folder: pathlib.Path) -> None:
  """Writes the texts, rewards and models that the jobs read."""
  numbers = range(120)
  rows = {
    'pairs': [
      {'q': f'The name of number {i} is', 'a': f' value_{i}'} for i in numbers
    ],
    'preferences': [
      {
        'prompt': f'The name of number {i} is',
        'chosen': f' value_{i}' * (1 + i % 3),
        'rejected': f' other {i}' * (1 + i % 2),
        'by': 0.5,
      }
      for i in numbers
    ],
    'labels': [
      {
        'first': f'{i} red',
        'second': 'x',
        'label': ('absent', 'present')[i % 2],
      }
      for i in numbers
    ],
    'embed': [
      {'q': f'one {i}', 'p': f'{i} one', 'n': [f'two {i}']} for i in numbers
    ],
  }
  for name, lines in rows.items():
    file = folder / f'{name}.jsonl'
    file.write_text('\n'.join(map(json.dumps, lines)))
  (folder / 'mine.py').write_text(REWARD)
  (folder / 'text.txt').write_text('\n'.join(tiny.text(150)))
  assert tiny.convert('adapt', f'--encoder={SMALL}', '--output=pair') == 0


def flags(name: str, *more: str) -> list[str]:
  """Returns the flags of a job, with more changed keys."""
  config, *changes = JOBS[name]
  values = dict(x.split('=', 1) for x in (*COMMON, *changes, *more))
  values = {'data.folder': f'records/{name}'} | values
  return [
    f'--config={config}',
    *(f'--config.{k}={v}' for k, v in values.items()),
  ]


def run(name: str) -> dict[str, object]:
  """Trains a job twice; returns its last losses and digests."""
  digests, options = {}, flags(name)
  if name.startswith('stored'):
    store = f'--teacher={SMALL}', '--teacher_tokens=7'
    assert tiny.call(materialize, *options, *store) == 0
    folder = f'stored:records/{name}/teacher-counts-7'
    options.append(f'--config.teacher.checkpoint={folder}')
  for workdir, ends in ((name, [STEPS]), (f'{name}.resumed', [HALF, STEPS])):
    for end in ends:
      job = f'--workdir={workdir}', f'--config.train.steps={end}'
      assert tiny.call(train, *options, *job) == 0
    digests[workdir] = digest(pathlib.Path(workdir))
  lines = metrics.read_metrics(name)
  losses = {x['kind']: x['loss'] for x in lines if 'loss' in x}
  return {'name': name, 'losses': losses, 'params': [*digests.values()]}


def digest(workdir: pathlib.Path) -> str:
  """Returns a digest of the parameters of a run."""
  params = sorted(tiny.read_params(workdir).items())
  content = hashlib.sha256()
  for path, value in params:
    content.update(path.encode() + np.ascontiguousarray(value).tobytes())
  return content.hexdigest()[:16]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('names', nargs='*', default=[*JOBS])
  arguments = parser.parse_args()
  arguments.folder.mkdir(parents=True)
  os.chdir(arguments.folder)
  pathlib.Path('configs').symlink_to(tiny.ROOT / 'configs')
  write_files(pathlib.Path())
  for name in arguments.names:
    print(json.dumps(run(name)), flush=True)


if __name__ == '__main__':
  main()
