"""Converts config.json files of GPT-2, BERT, RoBERTa and ModernBERT, and back.

Families with LayerNorm. Source of names and rules: transformers 5.24,
`configuration_gpt2.py`, `configuration_bert.py`, `configuration_roberta.py` and
`configuration_modernbert.py`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.huggingface import class_choice, families, weights
from encdec_adapt.models import heads, model_config
from encdec_adapt.ops import relative_bias

Raw = Mapping[str, Any]

_FIXED = {
  'attention_softcap': None,
  'final_softcap': None,
  'norm': 'layer',
  'norm_gain': 'direct_fp32',
  'post_norms': False,
  'scale_embeddings': False,
}
BIASED = {
  **_FIXED,
  'pattern': ('global',),
  'norm_bias': True,
  'mlp_gated': False,
  'attention_bias': 'qkvo',
  'mlp_bias': True,
}
_POOLINGS = {'cls': 'first', 'mean': 'mean'}  # Of classifiers.
ACTIVATIONS = {
  'gelu': 'gelu',
  'gelu_new': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'relu': 'relu',
  'silu': 'silu',
}


@dataclasses.dataclass(frozen=True)
class Family:
  """A family with LayerNorm.

  Attributes:
    defaults: defaults of the fields of its class.
    supported: fields that change the function, and the supported value.
    fields: field of the file -> our field.
    activation: field of the activation.
    fixed: our fields with the same value in every model.
    tokens: classes that predict tokens, the first of which is written.
    layouts: class -> tensor names.
    read: returns our further fields, given the object and the file's name.
    write: returns their further fields of a stack.
    head_activation: activation of the head, whatever that of the layers; ''
      for the same.
    plain: transformers class without a head; '' if we write none.
    reward: class of sequence classifiers; '' if we read none.
    classifier: class of classifiers of texts; '' if we read none.
    layer: the layer of their head, of `heads.Labels`.
  """

  defaults: Raw
  supported: Raw
  fields: Mapping[str, str]
  activation: str
  fixed: Mapping[str, Any]
  tokens: tuple[str, ...]
  layouts: Mapping[str, weights.Layout]
  read: Callable[[Raw, str], dict[str, Any]]
  write: Callable[[model_config.StackConfig], dict[str, Any]]
  head_activation: str = ''
  plain: str = ''
  reward: str = ''
  classifier: str = ''
  layer: str = 'pooler'


# -- Positions ----------------------------------------------------------------


def _learned(field: str) -> dict[str, Callable]:
  """Learned positions, whose number a field states."""

  def read(raw: Raw, file: str) -> dict[str, Any]:
    return {'positions': relative_bias.Positions('learned', rows=raw[field])}

  return {
    'read': read,
    'write': lambda stack: {field: stack.positions.rows},
  }


def _read_after_padding(raw: Raw, file: str) -> dict[str, Any]:
  # Position 0 has the vector after that of padding, numbered by its id.
  padding = raw['pad_token_id']
  if type(padding) is not int or padding < 0:
    raise errors.UserError(
      f'{file} has pad_token_id = {padding!r}; positions of RoBERTa follow it,'
      ' so it must be an integer from 0.'
    )
  rows, offset = raw['max_position_embeddings'], padding + 1
  positions = relative_bias.Positions('learned', rows=rows, offset=offset)
  return {'positions': positions}


def _write_after_padding(stack: model_config.StackConfig) -> dict[str, Any]:
  positions = stack.positions
  return {
    'max_position_embeddings': positions.rows,
    'pad_token_id': positions.offset - 1,
  }


def _read_modern_bert(raw: Raw, file: str) -> dict[str, Any]:
  every, layers = raw['global_attn_every_n_layers'], raw['num_hidden_layers']
  full, sliding = 'full_attention', 'sliding_attention'
  kinds = raw['layer_types'] or [
    sliding if i % every else full for i in range(layers)
  ]
  if len(kinds) != layers or {*kinds} - families.KINDS.keys():
    raise errors.UserError(
      f'{file} has layer_types {kinds}; it must list {full} or {sliding} for'
      f' each of its {layers} layers.'
    )
  bases, rope = {}, raw['rope_parameters'] or {}
  if raw.get('rope_scaling') or rope.keys() - families.KINDS.keys():
    raise errors.UserError(
      f'{file} has rope_scaling = {raw.get("rope_scaling")!r} and'
      f' rope_parameters = {rope!r}; supported are bases of {full} and'
      f' {sliding} without scaling.'
    )
  for kind, old in ((full, 'global_rope_theta'), (sliding, 'local_rope_theta')):
    stated = rope.get(kind) or {}
    if stated.get('rope_type', 'default') != 'default':
      raise errors.UserError(
        f'{file} scales the rotation of {kind} layers'
        f' ({stated["rope_type"]!r}); only the default is supported.'
      )
    bases[kind] = float(stated.get('rope_theta', raw[old]))
  return {
    'pattern': families.pattern_of(kinds),
    'window': raw['local_attention'] // 2,
    'rope_theta': bases[full],
    'local_rope_theta': bases[sliding],
  }


def _write_modern_bert(stack: model_config.StackConfig) -> dict[str, Any]:
  theirs = {ours: name for name, ours in families.KINDS.items()}
  kinds = [theirs[stack.layer_kind(i)] for i in range(stack.layers)]
  bases = stack.rope_theta, stack.local_rope_theta or stack.rope_theta
  return {
    'layer_types': kinds,
    'local_attention': 2 * stack.window,
    'rope_parameters': {
      theirs[kind]: {'rope_type': 'default', 'rope_theta': base}
      for kind, base in zip(('global', 'local'), bases, strict=True)
    },
  }


# -- Families -----------------------------------------------------------------

_BERT_SUPPORTED = {
  'is_decoder': False,
  'add_cross_attention': False,
  'position_embedding_type': 'absolute',
}
_BERT_DEFAULTS = {
  'hidden_size': 768,
  'num_hidden_layers': 12,
  'num_attention_heads': 12,
  'intermediate_size': 3072,
  'max_position_embeddings': 512,
  'type_vocab_size': 2,
  'hidden_act': 'gelu',
  'layer_norm_eps': 1e-12,
  'tie_word_embeddings': True,
  **_BERT_SUPPORTED,
}
_SIZES = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'width',
  'num_hidden_layers': 'layers',
  'num_attention_heads': 'heads',
  'intermediate_size': 'mlp_width',
}
# Of the head, in `weights.bert_layout`.
_HEADS = {
  'bert': (
    'cls.predictions.',
    *('transform.dense', 'transform.LayerNorm', 'cls.predictions.bias'),
    *('bert.pooler.dense', 'classifier'),
  ),
  'roberta': (
    *('lm_head.', 'dense', 'layer_norm', 'lm_head.bias'),
    *('classifier.dense', 'classifier.out_proj'),
  ),
}


def _bert(
  kind: str, name: str, *tokens: str, defaults: Raw, **options: Any
) -> Family:
  with_head = weights.bert_layout(f'{kind}.', *_HEADS[kind])
  classifier = f'{name}ForSequenceClassification'
  return Family(
    {**_BERT_DEFAULTS, **defaults},
    _BERT_SUPPORTED,
    {**_SIZES, 'layer_norm_eps': 'norm_eps', 'type_vocab_size': 'token_types'},
    'hidden_act',
    {
      **BIASED,
      'role': 'bidirectional',
      'norms_after_sum': True,
      'embedding_norm': True,
    },
    tokens,
    {
      **dict.fromkeys((*tokens, classifier), with_head),
      f'{name}Model': weights.bert_layout('', *_HEADS[kind]),
    },
    plain=f'{name}Model',
    classifier=classifier,
    **options,
  )


_GPT2_SUPPORTED = {
  'scale_attn_weights': True,
  'scale_attn_by_inverse_layer_idx': False,
  'reorder_and_upcast_attn': False,
  'add_cross_attention': False,
}
_GPT2_CLASSES = 'GPT2LMHeadModel', 'GPT2ForSequenceClassification'
_MODERN_BERT_CLASSES = (
  'ModernBertForMaskedLM',
  'ModernBertForSequenceClassification',
)
_MODERN_BERT_SUPPORTED = {
  'norm_bias': False,
  'attention_bias': False,
  'mlp_bias': False,
  'decoder_bias': True,
  'classifier_bias': False,
  'classifier_activation': 'gelu',
}
TYPES: Mapping[str, Family] = {
  'gpt2': Family(
    {
      'vocab_size': 50257,
      'n_positions': 1024,
      'n_embd': 768,
      'n_layer': 12,
      'n_head': 12,
      'n_inner': None,
      'activation_function': 'gelu_new',
      'layer_norm_epsilon': 1e-5,
      'tie_word_embeddings': True,
      **_GPT2_SUPPORTED,
    },
    _GPT2_SUPPORTED,
    {
      'vocab_size': 'vocab_size',
      'n_embd': 'width',
      'n_layer': 'layers',
      'n_head': 'heads',
      'n_inner': 'mlp_width',
      'layer_norm_epsilon': 'norm_eps',
    },
    'activation_function',
    BIASED,
    _GPT2_CLASSES[:1],
    dict.fromkeys(_GPT2_CLASSES, weights.DECODER_ONLY_GPT2),
    **_learned('n_positions'),
    reward=_GPT2_CLASSES[1],
  ),
  'bert': _bert(
    *('bert', 'Bert', 'BertForMaskedLM'),
    'BertForPreTraining',  # The first files have both heads.
    defaults={'vocab_size': 30522},
    **_learned('max_position_embeddings'),
  ),
  'roberta': _bert(
    *('roberta', 'Roberta', 'RobertaForMaskedLM'),
    defaults={'vocab_size': 50265, 'pad_token_id': 1},
    head_activation='gelu',
    read=_read_after_padding,
    write=_write_after_padding,
  ),
  'modernbert': Family(
    {
      'vocab_size': 50368,
      'hidden_size': 768,
      'intermediate_size': 1152,
      'num_hidden_layers': 22,
      'num_attention_heads': 12,
      'hidden_activation': 'gelu',
      'norm_eps': 1e-5,
      'tie_word_embeddings': True,
      'layer_types': None,
      'global_attn_every_n_layers': 3,
      'local_attention': 128,
      'rope_parameters': None,
      'global_rope_theta': 160000.0,
      'local_rope_theta': 10000.0,
      **_MODERN_BERT_SUPPORTED,
    },
    _MODERN_BERT_SUPPORTED,
    {**_SIZES, 'norm_eps': 'norm_eps'},
    'hidden_activation',
    {
      **_FIXED,
      'role': 'bidirectional',
      'window_rule': 'inclusive',
      'embedding_norm': True,
      'first_norm': False,
    },
    _MODERN_BERT_CLASSES[:1],
    {
      **dict.fromkeys(
        _MODERN_BERT_CLASSES, weights.modern_bert_layout('model.')
      ),
      'ModernBertModel': weights.modern_bert_layout(''),
    },
    _read_modern_bert,
    _write_modern_bert,
    head_activation='gelu',
    plain='ModernBertModel',
    classifier=_MODERN_BERT_CLASSES[1],
    layer='transform',
  ),
}


def model_from_raw(
  raw: Mapping[str, Any], file: str
) -> tuple[model_config.ModelConfig, weights.Layout]:
  """Returns the model of a config.json, and its tensor names.

  Args:
    raw: parsed file with a `model_type` in `TYPES` and checked fields.
    file: name of the file, for error messages.

  Raises:
    UserError: a field has a value that our models do not support.
  """
  family = TYPES[raw['model_type']]
  raw = {**family.defaults, **raw}
  check_supported(raw, file, family.supported, family.activation)
  architecture = class_of(raw, file, list(family.layouts))
  needed, given = family.head_activation, raw[family.activation]
  transforms = architecture in family.tokens or (
    architecture == family.classifier and family.layer == 'transform'
  )
  if needed and transforms and given != needed:
    raise errors.UserError(
      f'{file} has {family.activation} = {given!r}, and the head of its class'
      f' has {needed!r}; with the head only that is supported.'
    )
  fields = {ours: raw[theirs] for theirs, ours in family.fields.items()}
  fields['mlp_width'] = fields['mlp_width'] or 4 * fields['width']
  fields |= head_fields(fields['width'], fields['heads'], file)
  head = heads.Tokens(raw['tie_word_embeddings'])
  if architecture == family.plain:
    head = heads.Tokens()
  elif architecture == family.classifier:
    head = _labels(raw, family, file)
  elif family.plain:
    head = dataclasses.replace(head, transform=True)
  try:
    stack = model_config.StackConfig(
      **fields | {'norm_eps': float(fields['norm_eps'])},
      **family.fixed,
      activation=ACTIVATIONS[raw[family.activation]],
      **family.read(raw, file),
      head=head,
    )
  except errors.UserError as error:
    raise errors.UserError(f'{file}: {error}') from error
  model = model_config.DecoderOnlyConfig(stack)
  if architecture == family.reward:
    if len(raw.get('id2label') or ()) != 1:
      raise errors.UserError(
        f'{file} has {len(raw.get("id2label") or ())} labels; a reward model'
        ' has one.'
      )
    model = model_config.reward_model(model)
  return model, family.layouts[architecture]


def _labels(raw: Raw, family: Family, file: str) -> heads.Labels:
  """Returns the head of a classifier."""
  pooling = 'cls'  # BERT and RoBERTa have no choice.
  if family.layer == 'transform':
    pooling = raw.get('classifier_pooling', pooling)
  if pooling not in _POOLINGS:
    raise errors.UserError(
      f'{file} has classifier_pooling = {pooling!r}; supported are'
      f' {" and ".join(_POOLINGS)}.'
    )
  return heads.Labels(count_labels(raw, file), _POOLINGS[pooling], family.layer)


def count_labels(raw: Raw, file: str, default: int = 2) -> int:
  """Returns the number of labels of a classifier.

  Args:
    raw: parsed file.
    file: name of the file.
    default: the number of its class.

  Raises:
    UserError: it has one label, or is no classifier with one label per text.
  """
  count = len(raw.get('id2label') or ()) or raw.get('num_labels', default)
  kind = raw.get('problem_type') or 'single_label_classification'
  if kind != 'single_label_classification' or count < 2:
    raise errors.UserError(
      f'{file} has problem_type = {kind!r} and {count} labels; supported are'
      ' single_label_classification and 2 labels or more.'
    )
  return count


def raw_from_model(
  config: model_config.ModelConfig,
) -> tuple[dict[str, Any], weights.Layout]:
  """Returns the config.json of a model with LayerNorm.

  Args:
    config: model config, written for the first class that supports it.

  Raises:
    UserError: no transformers class supports the model; names the reasons.
  """
  return class_choice.choose(config, TYPES, _raw, model_from_raw)


def class_of(raw: Raw, file: str, supported: Sequence[str]) -> str:
  """Returns the transformers class of a file, by default the first supported.

  Args:
    raw: parsed file.
    file: name of the file.
    supported: names of the classes.

  Raises:
    UserError: the file has another class, or several.
  """
  names = raw.get('architectures') or [supported[0]]
  if len(names) != 1 or names[0] not in supported:
    raise errors.UserError(
      f'{file} has architectures = {names}; supported is one of'
      f' {", ".join(supported)}.'
    )
  return names[0]


def check_supported(
  raw: Raw, file: str, supported: Raw, activation: str
) -> None:
  """Raises an error for a field with an unsupported value.

  Args:
    raw: parsed file.
    file: name of the file.
    supported: fields that change the function, and the supported value.
    activation: field of the activation.
  """
  allowed = {
    **{name: (value,) for name, value in supported.items()},
    activation: tuple(ACTIVATIONS),
  }
  for name, values in allowed.items():
    if raw[name] not in values:
      raise errors.UserError(
        f'{file} has {name} = {raw[name]!r}; supported are'
        f' {", ".join(map(str, values))}.'
      )


def head_fields(width: int, count: int, file: str) -> dict[str, Any]:
  """Returns our fields of `count` heads that divide the width of a stack."""
  if width % count:
    raise errors.UserError(
      f'{file} has a width of {width}, no multiple of its {count} heads.'
      ' Download it again.'
    )
  size = width // count
  return {'kv_heads': count, 'head_dim': size, 'query_scale': float(size)}


def activation_name(stack: model_config.StackConfig) -> str:
  """Returns the name of a stack's activation in a config.json."""
  names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
  return {**names, 'gelu_tanh': 'gelu_new'}[stack.activation]


def unnamed_labels(head: heads.Labels) -> dict[str, Any]:
  """Returns the fields of config.json for labels without names."""
  return label_names([f'LABEL_{i}' for i in range(head.labels)])


def label_names(names: Sequence[str]) -> dict[str, Any]:
  """Returns the fields of config.json for the labels of a classifier."""
  return {
    'id2label': {str(i): name for i, name in enumerate(names)},
    'label2id': {name: i for i, name in enumerate(names)},
  }


def _raw(config: model_config.ModelConfig, kind: str) -> dict[str, Any]:
  stack, family = config.decoder, TYPES[kind]
  head, labels = stack.head, {}
  architecture = family.tokens[0]
  if isinstance(head, heads.Reward) and family.reward:
    architecture = family.reward
    labels = label_names(['LABEL_0'])
  elif isinstance(head, heads.Labels) and family.classifier:
    architecture = family.classifier
    labels = unnamed_labels(head)
    if family.layer == 'transform':
      poolings = {ours: theirs for theirs, ours in _POOLINGS.items()}
      labels['classifier_pooling'] = poolings.get(head.pooled, 'cls')
  elif family.plain and not getattr(head, 'transform', False):
    architecture = family.plain
  return {
    'model_type': kind,
    'architectures': [architecture],
    **labels,
    **{theirs: getattr(stack, ours) for theirs, ours in family.fields.items()},
    **family.write(stack),
    family.activation: activation_name(stack),
    'tie_word_embeddings': getattr(head, 'tied', True),
  }
