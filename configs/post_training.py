r"""Post-training: reward models, preferences, policies and distillation.

    python -m encdec_adapt.train --workdir=runs/dpo \
      --config=configs/post_training.py:recipe=dpo,source=runs/tuned \
      --config.data.source='preferences:answers.jsonl#prompt,chosen,rejected'

`source` is a work directory or a Hugging Face folder, an encoder-decoder or a
decoder-only model, that `configs/sft.py` has tuned; it is the reference, too.
`recipe` is

  reward    a reward model of preferences
  dpo       the model, from preferences (arXiv:2305.18290)
  rloo      a policy, from rewards of what it samples (arXiv:2402.14740)
  grpo      the same, without a KL in the loss (arXiv:2402.03300, 2503.14476)
  distill   the model, from a `teacher` on what it samples (arXiv:2306.13649)

With `format=chat` the data are conversations. `configs/post_training.md` goes
through all of them, with commands, memory and what a study found. Lengths are
those of sft.py, batches count prompts, and the learning
rates are the papers' and TRL's for models of billions of parameters.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.configs import sft

# Recipe -> keys of the loss, learning rate, prompts of a step.
RECIPES = {
  # InstructGPT, arXiv:2203.02155, appendix C: 9e-6, batches of 64.
  'reward': ({'kind': 'reward'}, 9e-6, 64),
  # DPO, appendix B: 1e-6, batches of 64, beta 0.1.
  'dpo': ({'kind': 'dpo'}, 1e-6, 64),
  # TRL 1.16: 1e-6, KL 0.05.
  'rloo': ({'kind': 'rloo'}, 1e-6, 32),
  # DeepSeekMath, section 4.2: 1e-6; DAPO: divisor token, no KL.
  'grpo': ({'kind': 'grpo', 'grpo.divisor': 'token'}, 1e-6, 32),
  # GKD: reverse KL on samples of the student alone; the rate is ours.
  'distill': (
    {
      'kind': 'distill',
      'distill.divergence': 'reverse',
      'distill.on_policy': 1.0,
    },
    1e-5,
    32,
  ),
}


def get_config(arg=None, **values):
  """`recipe` (of RECIPES), `source`, `format` pairs or chat, and `teacher`."""
  args = config_lib.parse_arg(
    arg, recipe='dpo', source='', format='pairs', teacher=''
  )
  args |= values  # Of other configurations.
  recipe = args['recipe']
  if recipe not in RECIPES:
    raise errors.UserError(
      f'recipe={recipe} is unknown; choose one of {", ".join(RECIPES)}.'
    )
  if bool(args['teacher']) != (recipe == 'distill'):
    raise errors.UserError(
      f'teacher={args["teacher"]!r} with recipe={recipe}: distill needs the'
      ' model that it learns from, and only it has one.'
    )
  config = sft.get_config(source=args['source'], format=args['format'])
  config.teacher.checkpoint = args['teacher']
  set_recipe(config, recipe, args['format'])
  return config


def set_recipe(config, recipe, form='pairs'):
  """Changes the configuration of a tuning into that of a recipe."""
  loss, rate, prompts = RECIPES[recipe]
  config.loss.update_from_flattened_dict(loss)
  config.optimizer.learning_rate = rate
  config.train.batch_size = prompts
  config.data.passes = 1
  config.evaluation.loss, config.evaluation.samples = 100, 0
  config.checkpoint.every = 100
  if recipe in ('reward', 'dpo'):
    chat = 'chat_' if form == 'chat' else ''
    config.data.objective = f'{chat}preferences'
  elif recipe == 'rloo':
    config.train.rollouts.max_kl = 15.0
  elif recipe == 'grpo':
    config.train.rollouts.cut = 'mask'
