"""Classifiers of texts whose encoders were trained as encoders."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.configs import embeddings, pretrained
from encdec_adapt.models import heads, model_config, parameters
from tests import tiny, toy_models
from tests.parity import test_folders, tiny_models

pytestmark = pytest.mark.parity


def save(name, folder, **fields):
  """Saves a tiny classifier with three labels; returns it."""
  case = tiny_models.CASES[name]
  settings = case.settings()
  settings.num_labels = 3
  for field, value in fields.items():
    setattr(settings, field, value)
  architecture = re.sub(
    'MaskedLM|ConditionalGeneration',
    'SequenceClassification',
    case.architecture,
  )
  case = dataclasses.replace(case, architecture=architecture)
  model = tiny_models.make(case, settings=settings)
  model.save_pretrained(folder)
  return model


@pytest.mark.parametrize(
  'name, fields',
  [
    ('bert', {}),
    ('bert', {'classifier_pooling': 'mean'}),  # Not read by its class.
    ('roberta', {}),
    ('modernbert', {}),
    ('modernbert', {'classifier_pooling': 'mean'}),
  ],
)
def test_logits_and_the_round_trip(name, fields, saved, tmp_path):
  theirs = save(name, tmp_path / 'model', **fields)
  ours = encdec_adapt.load(tmp_path / 'model')
  if not fields:  # What the recipe makes of the masked language model.
    _, _, source = saved(name)
    assert model_config.classifier(source.config, 3) == ours.config
  rows = tiny_models.batch(tiny_models.CASES[name])
  tokens, mask = rows.decoder[:2], rows.decoder_mask[:2]
  inputs = {'input_ids': tokens, 'attention_mask': mask}
  inputs = {k: tiny_models.torch.tensor(v).long() for k, v in inputs.items()}
  with tiny_models.torch.no_grad():
    expected = theirs(**inputs).logits.numpy()
  logits = np.asarray(ours.logits(tokens, decoder_mask=mask))
  assert np.ptp(expected, axis=1).min() > 0.1
  # Every token has the logits of its text.
  expected = np.repeat(expected, mask.sum(1), axis=0)
  atol = tiny_models.TOLERANCE
  np.testing.assert_allclose(logits[mask], expected, rtol=0, atol=atol)
  test_folders.assert_comes_back(tmp_path / 'model', tmp_path / 'again')
  # Its states are those of the encoder alone.
  theirs.base_model.save_pretrained(tmp_path / 'encoder')
  encoder = encdec_adapt.load(tmp_path / 'encoder')
  states = [np.asarray(x.encode(tokens, mask))[mask] for x in (ours, encoder)]
  np.testing.assert_array_equal(*states)
  vectors = (
    x.embed_tokens({0: tokens[0]}, pooling='mean') for x in (ours, encoder)
  )
  np.testing.assert_array_equal(*(dict(x)[0] for x in vectors))


def test_a_pair_reads_each_text_with_both_stacks(saved, tmp_path):
  """BART's classifier: logits, gradients, packed texts, the round trip."""
  theirs = save('bart', tmp_path / 'model')
  ours = encdec_adapt.load(tmp_path / 'model')
  assert model_config.classifier(saved('bart')[2].config, 3) == ours.config
  tokens = np.random.default_rng(0).integers(5, 60, (2, 9), np.int32)
  eos = theirs.config.eos_token_id
  tokens[:, -1] = eos
  inputs = tiny_models.torch.tensor(tokens).long()
  labels = tiny_models.torch.tensor([1, 2])
  expected = theirs(input_ids=inputs, labels=labels)
  # Both texts in a row, between padding.
  gap = np.zeros(3, np.int32)
  batch = {
    'encoder_tokens': np.concatenate([*tokens, gap])[None],
    'encoder_segments': np.repeat([1, 2, 0], (9, 9, 3))[None],
    'encoder_positions': np.concatenate([*[np.arange(9)] * 2, gap])[None],
  }
  batch = {name: jnp.int32(x) for name, x in batch.items()}

  def loss(params):
    states = ours.config.architecture.predict(ours.model, params, batch)
    logits = ours.model.logits(params, states)[0, :18].reshape(2, 9, 3)
    picked = jax.nn.log_softmax(logits[:, 4])[jnp.arange(2), labels.numpy()]
    return -picked.mean(), logits

  gradients, logits = jax.grad(loss, has_aux=True)(ours.params)
  answers = expected.logits.detach().numpy()
  assert np.ptp(answers, axis=1).min() > 0.1
  # Every token has the logits of its text.
  answers = np.repeat(answers[:, None], 9, axis=1)
  atol = tiny_models.TOLERANCE
  np.testing.assert_allclose(logits, answers, rtol=0, atol=atol)
  expected.loss.backward()
  head, decoder = theirs.classification_head, gradients['decoder']
  for gradient, weight in (
    (decoder['head']['table'], head.out_proj.weight),
    (decoder['pooler']['dense'].T, head.dense.weight),
    (decoder['embedder']['table'], theirs.model.shared.weight),
  ):
    wanted = weight.grad.numpy()
    got = gradient[: len(wanted)]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
  test_folders.assert_comes_back(tmp_path / 'model', tmp_path / 'again')


def test_an_export_has_the_names_of_the_labels(tmp_path):
  names = dict(enumerate('abc'))
  ids = {name: i for i, name in names.items()}
  save('bert', tmp_path / 'model', id2label=names, label2id=ids)
  source, run = tmp_path / 'model', tmp_path / 'run'
  flags = f'--source={source}', f'--output={run}', '--vocab_multiple=1'
  assert tiny.convert('import', *flags) == 0
  for i, checkpoint in enumerate((source, run)):
    output = tmp_path / f'exported{i}'
    flags = f'--checkpoint={checkpoint}', f'--output={output}'
    assert tiny.convert('export', *flags) == 0
    settings = tiny_models.transformers.AutoConfig.from_pretrained(output)
    assert (settings.id2label, settings.label2id) == (names, ids)


def test_a_classifier_that_is_tuned_again_keeps_the_form_of_its_head(tmp_path):
  save('modernbert', tmp_path, classifier_pooling='mean')
  for labels in ('a|b', 'a|b|c'):
    config = pretrained.get_stack_config(str(tmp_path))
    config.data.objective = f'classify:labels={labels}'
    model = config_lib.load(config, 'run', sources=False).model
    head = heads.Labels(len(labels[::2]), 'mean', 'transform')
    assert model.decoder.head == head
    source = encdec_adapt.load(tmp_path).config
    # All parameters but those of the labels, if their number differs.
    names = parameters.parameter_table(model).keys()
    new = names - parameters.paths_in(source, model).keys()
    assert ('decoder/head/table' in new) == (head.labels == 2)
    assert not [x for x in new if '/head/' not in x]
  config = embeddings.get_config(f'source={tmp_path}')
  model = config_lib.load(config, 'run', sources=False).model
  assert model.decoder.head.kind == 'embedding'


@pytest.mark.parametrize(
  'name, fields, message',
  [
    ('bert', {'problem_type': 'regression'}, "problem_type = 'regression'"),
    ('roberta', {'id2label': {'0': 'a'}}, '1 labels'),
    ('modernbert', {'classifier_pooling': 'max'}, "pooling = 'max'"),
    ('bart', {'problem_type': 'regression'}, "problem_type = 'regression'"),
  ],
)
def test_other_classifiers_are_refused(name, fields, message, tmp_path):
  save(name, tmp_path)
  toy_models.change(tmp_path, lambda tensors: tensors, **fields)
  with pytest.raises(errors.UserError, match=message):
    encdec_adapt.load(tmp_path)
