"""The configuration section `data`: text, vocabularies and records.

This module imports neither TensorFlow nor SeqIO: training jobs load it too.
"""

from collections.abc import Mapping
import dataclasses
import functools

from encdec_adapt.base import errors, keys
from encdec_adapt.data.records import record_sets, row_rates
from encdec_adapt.data.sources import mixtures, text_sources
from encdec_adapt.files import paths
from encdec_adapt.objectives import (
  denoising,
  example_maker,
  framing,
  objective_names,
)
from encdec_adapt.tokenizers import chat_format, vocabulary_pair

# Prefix of paths below the work directory.
WORKDIR = '{workdir}'


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Keys of `config.data`.

  `python -m encdec_adapt.materialize` makes missing records from the text.

  Attributes:
    table_sizes: vocabulary size of each stack.
    samples: whether the job samples completions of the rows' prompts.
  """

  source: str = keys.key(
    'python',
    "'python' (the text that every Python carries; 'python:FILE' holds out"
    " the documents whose hashes FILE lists, configs/decoders), 'text:GLOB',"
    " 'text:GLOB#paragraphs', 'jsonl:GLOB#FIELD', 'parquet:GLOB#FIELD',"
    " 'tfds:NAME:SPLIT',"
    " 'pairs:GLOB#INPUTS,TARGETS', 'prompts:GLOB#TEMPLATES.yaml', 'chat:GLOB',"
    " 'preferences:GLOB#PROMPT,CHOSEN,REJECTED', 'labels:GLOB#TEXT,LABEL',"
    " 'embed:GLOB#QUERY,POSITIVE' or 'seqio:NAME' (a registered task or"
    ' mixture); or several with how often a pass draws their documents, as in'
    " 'python@2 + jsonl:/data/*.jsonl@0.25'. '' in configurations that leave it"
    ' to you: no records can be made.',
  )
  seqio_modules: tuple[str, ...] = keys.key(
    (),
    'Modules to import, which register sources (`document_source.register`) or'
    ' SeqIO tasks.',
    names=True,
  )
  bad_documents: str = keys.key(
    'fail',
    'What a document that cannot be read does (not UTF-8, a missing field):'
    " 'fail' ends the command, 'skip' leaves it out and counts it.",
    one_of=('fail', 'skip'),
  )
  lossy_targets: str = keys.key(
    'fail',
    "'fail' refuses records of examples, chats or preferences of which more"
    ' than 1 % of the targets lose text in the vocabulary (by more than spaces'
    " and NFKC), or more than half are empty; 'allow' trains on them.",
    one_of=('fail', 'allow'),
  )
  deduplicate: bool = keys.key(
    False, 'Leave out documents whose text an earlier document has.'
  )
  max_bytes: int = keys.key(
    0,
    'Only the first bytes of each source, of its files or else of its text, are'
    ' used, up to the end of a paragraph; 0 for all.',
    at_least=0,
  )
  folder: str = keys.key('', "Folder of the records; '' for WORKDIR/records.")
  vocabulary: str = keys.key(
    '',
    'A SentencePiece file, a tokenizer.json, a folder with one of them (or'
    " hf://ORG/NAME), 'bytes' or 'byt5'; '' for FOLDER/vocabulary.model."
    " '{workdir}/..' is a path below the work directory.",
  )
  encoder_vocabulary: str = keys.key(
    '', "Vocabulary of the encoder; '' for the decoder's."
  )
  train_vocabulary: bool = keys.key(
    True, 'Train a BPE vocabulary where the file does not exist.'
  )
  chat_format: str = keys.key(
    '',
    'Chat format that a vocabulary trained here has the special tokens of, so'
    " that the model can be tuned on conversations later; '' for none.",
    one_of=('', *chat_format.TEMPLATES),
  )
  add_sentinels: int = keys.key(
    0,
    'New sentinels at the end of the vocabulary, with the mode tokens that it'
    ' lacks; config.model.*.vocab_size has to cover them.',
    at_least=0,
  )
  objective: str = keys.key(
    'causal_lm',
    "What is predicted: 'causal_lm', 'prefix_lm' (cut in half, as"
    " Encoder-Decoder Gemma), 'prefix_lm_uniform' (Wang et al. 2022), 'ul2',"
    ' .. with options; all are in configs/objectives.md. Several that'
    " share the training rows: 'prefix_lm | ul2'; held-out rows are of the"
    ' first.',
  )
  rates: str = keys.key(
    '',
    'How often training rows are of each objective and source:'
    " 'tokens:1,3' is one target token to three, likewise 'examples:' and"
    " 'rows:', and 'batches:', by which each batch has the rows of a single"
    " part; 'examples:sizes,temperature=2,cap=10000' takes the numbers of"
    ' examples, at most 10000 each, to the power 1/2;'
    " 'tokens:1,0; 9000=tokens:0,1' switches at step 9000. '' reads every row"
    ' once in a pass, or takes the rates of a SeqIO mixture.',
  )
  encoder_length: int = keys.key(
    0,
    'Encoder length S of a row in tokens; 0 for objectives without inputs.',
    at_least=0,
  )
  decoder_length: int = keys.key(
    256,
    'Decoder length T of a row in tokens; 0 for encoder-only models.',
    at_least=0,
  )
  sentinels: str = keys.key(
    'recycle',
    "When a window needs more spans than there are sentinels: 'unique' is an"
    " error; 'recycle' uses the ids again in order; 'extend_vocabulary' adds"
    " as many as are needed; 'single' has one for all; 'limit_segment' ends"
    ' the window before.',
    one_of=denoising.POLICIES,
  )
  passes: int = keys.key(
    1,
    'Passes over the text; each draws its own masks, splits and packing.',
    at_least=1,
  )
  repeat: bool = keys.key(False, 'Start over after the last pass, or stop.')
  pack: bool = keys.key(
    True,
    'Several examples in a training row, but for preferences and sampled'
    ' completions, which are never packed.',
  )
  shards: int = keys.key(
    4, 'Files of a pass; more workers than this are of no use.', at_least=1
  )
  workers: int = keys.key(2, 'Processes that make records.', at_least=1)
  seed: int = keys.key(
    0, 'Seed of the records: split, masks, packing.', at_least=0
  )
  eval_fraction: float = keys.key(
    0.04, 'Share of documents held out by their id.', above=0, below=1
  )
  eval_rows: int = keys.key(64, 'Held-out rows; 0 for all.', at_least=0)
  eval_pack: bool = keys.key(
    False, 'Several texts in a held-out row; each is scored by itself.'
  )
  development_rows: int = keys.key(
    0,
    'Most held-out rows that a job evaluates on, of the development part: every'
    ' third group of held-out documents, by digest. Studies choose learning'
    ' rates and checkpoints there and report the other groups. 0: all held-out'
    ' rows.',
    at_least=0,
  )
  # Not keys: `config` fills them in from the model and loss sections, and
  # comparisons ignore them.
  table_sizes: Mapping[str, int] = dataclasses.field(
    default_factory=dict, compare=False
  )
  samples: bool = dataclasses.field(default=False, compare=False)

  def __post_init__(self):
    keys.check(self, 'config.data.')
    lengths = framing.Lengths(self.encoder_length, self.decoder_length)
    for objective in self.objectives:
      objective.check_lengths(lengths)
    if self.source:  # Optional for plans and dry runs.
      self._check_sources()
    if self.eval_pack and self.development_rows:
      raise errors.UserError(
        'config.data.eval_pack is set with config.data.development_rows='
        f'{self.development_rows}, which chooses rows of one document; set one'
        ' of them to False or 0.'
      )
    # Parsed to raise its errors before any record is made.
    row_rates.parse(self.rates)
    # Both keys may name the same file.
    if self.encoder_vocabulary not in ('', self.vocabulary):
      for objective in self.objectives:
        objective.check_vocabularies()

  def _check_sources(self) -> None:
    objective_kinds = {
      objective.maker.documents for objective in self.objectives
    }
    source_kinds = set()
    for source, _ in mixtures.parse(self.source):
      kinds = text_sources.document_kinds(source, self.seqio_modules)
      # A SeqIO task has text or pairs, whichever the objective reads.
      source_kinds |= objective_kinds & kinds or kinds
    if source_kinds != objective_kinds:
      forms = [x for k in objective_kinds for x in text_sources.forms(k)]
      raise errors.UserError(
        f'config.data.source is {self.source!r}, which has'
        f' {" and ".join(sorted(source_kinds))}, but config.data.objective'
        f' {self.objective!r} is made of'
        f' {" and ".join(sorted(objective_kinds))}; change one of them: sources'
        f' of {" and ".join(sorted(objective_kinds))} are {", ".join(forms)}.'
      )

  def check_fields(self, fields: Mapping[str, bool], loss: str) -> None:
    """Checks that the sources have exactly the fields read by a loss.

    Args:
      fields: source field, such as `scores` -> whether the loss reads it.
      loss: `config.loss.kind`.

    Raises:
      UserError: a field is missing, or present and unused.
    """
    names = [
      text_sources.named_fields(source, self.seqio_modules)
      for source, _ in (mixtures.parse(self.source) if self.source else ())
    ]
    for name, is_read in fields.items() if names and None not in names else ():
      if is_read == any(name in entry for entry in names):
        continue
      remedy = f'lacks {name}=FIELD; name the field'
      if not is_read:
        remedy = f'has {name}=FIELD; give {name} a weight'
      raise errors.UserError(
        f'config.loss.kind is {loss!r} and config.data.source {self.source!r}'
        f' {remedy}, or leave it out of both.'
      )

  def require_source(self) -> None:
    """Checks that the configuration names a text source.

    Raises:
      UserError: names the key and the objective's kinds of sources.
    """
    if not self.source:
      forms = text_sources.forms(self.objectives[0].maker.documents)
      raise errors.UserError(
        'config.data.source is empty, and this configuration has no text of its'
        f' own; set it to {" or ".join(forms)} (see configs/data.md).'
      )

  @functools.cached_property
  def objectives(self) -> tuple[example_maker.Objective, ...]:
    """Objectives of the training rows."""
    return objective_names.parse(self.objective)

  def in_workdir(self, workdir: str) -> 'DataConfig':
    """Returns the section with paths resolved in a work directory."""
    folder = self.folder or paths.join(workdir, 'records')
    return dataclasses.replace(
      self,
      folder=folder,
      # Stays empty if both stacks share the decoder's vocabulary.
      vocabulary=_below(self.vocabulary, workdir)
      or paths.join(folder, 'vocabulary.model'),
      encoder_vocabulary=_below(self.encoder_vocabulary, workdir),
    )

  @property
  def vocabularies(self) -> vocabulary_pair.Choice:
    """Vocabularies of the two stacks."""
    # The decoder's embedding table serves all objectives of a run.
    added = max(
      denoising.added_sentinels(
        objective.options, self.sentinels, self.train.lengths
      )
      for objective in self.objectives
    )
    return vocabulary_pair.Choice(
      self.vocabulary, self.encoder_vocabulary, max(added, self.add_sentinels)
    )

  @functools.cached_property
  def train(self) -> record_sets.RecordSpec:
    """Spec of the training records."""
    return self._spec(
      split='train',
      objective=self.objective,
      passes=self.passes,
      # Prompts are never packed.
      pack=self.pack and not self.samples and self.objectives[0].rows.packs,
      max_rows=0,
    )

  @functools.cached_property
  def evaluation(self) -> record_sets.RecordSpec:
    """Spec of the held-out records."""
    # A held-out loss over several objectives would depend on their shares. A
    # second pass would repeat the documents.
    return self._spec(
      split='eval',
      objective=self.objectives[0].text,
      passes=1,
      pack=self.eval_pack and self.objectives[0].maker.documents == 'text',
      max_rows=self.eval_rows,
    )

  def _spec(self, **fields) -> record_sets.RecordSpec:
    return record_sets.RecordSpec(
      source=self.source,
      max_bytes=self.max_bytes,
      seqio_modules=','.join(self.seqio_modules),
      bad_documents=self.bad_documents,
      deduplicate=self.deduplicate,
      encoder_length=self.encoder_length,
      decoder_length=self.decoder_length,
      sentinels=self.sentinels,
      seed=self.seed,
      eval_fraction=self.eval_fraction,
      shards=self.shards,
      **fields,
    )


def _below(path: str, workdir: str) -> str:
  # Not `format`: other braces in a path are text.
  if path.startswith(WORKDIR):
    return paths.join(workdir, path.removeprefix(WORKDIR).lstrip('/'))
  return path
