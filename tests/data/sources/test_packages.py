"""Pieces of packages: labels and prompts; modules are held out whole."""

import collections
import json

import pytest

from encdec_adapt import configs
from encdec_adapt.configs import packages
from encdec_adapt.configs.studies import shared
from encdec_adapt.data.sources import document_source, text_sources

MODULE = ('encdec_adapt.configs.packages',)


@pytest.fixture(scope='module')
def labelled():
  source = text_sources.open_source('packages', 0, MODULE)
  return {x.id: json.loads(x.text) for x in source.documents()}


def test_pieces_of_a_module_are_one_group(labelled):
  assert {label for _, label in labelled.values()} == {*packages.PACKAGES}
  assert {len(text) for (text,), _ in labelled.values()} == {240}
  groups = {document_source.group(name) for name in labelled}
  assert 'asyncio/streams.py' in groups and len(labelled) > 10 * len(groups)
  for name, (_, label) in labelled.items():
    assert name.split('/')[0] == label


def test_the_split_of_studies_has_every_package_on_both_sides(labelled):
  size = shared.size('size=cpu')
  arm = shared.labelled(size, shared.pair(size, 'a', 1), 'rate')
  source = text_sources.open_source('packages', 0, MODULE)
  draw = arm.changes['data.eval_fraction'], arm.changes['data.seed']
  counts = {split: collections.Counter() for split in ('train', 'eval')}
  for name, (_, label) in labelled.items():
    if source.in_split(name, 'train', *draw):
      counts['train'][label] += 1
    elif not document_source.is_development(document_source.group(name)):
      counts['eval'][label] += 1
  for split, least in ('train', 50), ('eval', 25):
    assert min(counts[split][x] for x in packages.PACKAGES) >= least


def test_an_edit_of_the_templates_is_another_text(
  labelled, tmp_path, monkeypatch
):
  def read():
    source = text_sources.open_source('package_prompts', 0, MODULE)
    return source.fingerprint(), next(source.documents())

  before, document = read()
  name, _, template = document.id.rpartition(':')
  assert template == 'documentation'
  (text,), label = labelled[name]
  prompt = f'This is documentation of a package:\n{text.strip()}\nIts name is'
  assert json.loads(document.text) == [prompt, label]
  edited = tmp_path / 'packages.yaml'
  content = (configs.FOLDER / 'studies/packages.yaml').read_text()
  edited.write_text(content.replace('Its name', 'The name'))
  monkeypatch.setattr(configs, 'path', lambda _: str(edited))
  after, document = read()
  assert after != before and 'The name is' in document.text
