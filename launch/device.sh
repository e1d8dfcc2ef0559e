#!/usr/bin/env bash
# Checks a GPU machine that has jax but no network, and trains on it. First
# pack source, records and wheels on a machine with a network (training from
# records needs neither TensorFlow nor SeqIO):
#
#   bash launch/device.sh pack [--records=runs/quickstart/records]
#     [--without=flax,orbax-checkpoint] [--folder=device] [--python_version=3.12]
#     [--machine=x86_64] [--glibc=2.28] [--dry_run]
#
# Then copy the folder to the GPU machine and run in it:
#
#   bash launch/device.sh check [--output=device_check.json] [--chip=h100]
#   bash launch/device.sh train --config=... --workdir=... [flags of train]
#
# Both install missing packages next to the source and keep the machine's jax;
# PYTHON names another interpreter. `check` compares kernels with the reference
# and measures decoding and a training step of 2B-2B, in ten minutes
# (tests/benchmarks/device_check.py). `train` runs `python3 -m
# encdec_adapt.train`; it needs --records, which may be repeated to pack other
# folders too, such as checkpoints; paths are relative to the repository's root.
# --without names packages that the machine has or can do without.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

# jax and its dependencies are not packed, so the machine keeps its own.
WITH_JAX='jax jaxlib ml_dtypes numpy opt_einsum scipy'

dry_run=0
attempt() {
  show "$@"
  if [ "$dry_run" = 0 ]; then
    "$@"
  fi
}

pack() {
  local flag folder=device python_version machine=x86_64 glibc=28 without=''
  local minor package path
  local records=() downloads=() requirements=()
  python_version=$(version_of "${PYTHON:-python3}")
  for flag in "$@"; do
    case "$flag" in
      --records=*) records+=("${flag#*=}") ;;
      --without=*) without=${flag#*=} ;;
      --folder=*) folder=${flag#*=} ;;
      --python_version=*) python_version=${flag#*=} ;;
      --machine=*) machine=${flag#*=} ;;
      --glibc=2.*) glibc=${flag#*=2.} ;;
      --dry_run) dry_run=1 ;;
      *) fail "pack: unknown flag $flag; see --help" ;;
    esac
  done
  for path in ${records[@]+"${records[@]}"}; do
    case "$path" in
      /* | *..*) fail "pack: --records=$path must be below the repository" ;;
    esac
    [ -d "$path" ] || [ "$dry_run" = 1 ] ||
      fail "pack: --records=$path is not a folder; run materialize first"
  done
  downloads+=(--platform "manylinux2014_$machine")
  # Wheels are tagged with the oldest glibc that they support.
  for minor in $(seq 17 "$glibc"); do
    downloads+=(--platform "manylinux_2_${minor}_$machine")
  done
  attempt mkdir -p "$folder/wheels"
  for path in setup.py pyproject.toml encdec_adapt configs launch \
    tests/__init__.py tests/gemma_ids.py tests/benchmarks \
    ${records[@]+"${records[@]}"}; do
    attempt mkdir -p "$folder/$(dirname "$path")"
    attempt cp -R "$path" "$folder/$(dirname "$path")"
  done
  while IFS= read -r package; do
    requirements+=("$package")
  done < <(requirements "$python_version")
  attempt "${PYTHON:-python3}" -m pip download --quiet --only-binary=:all: \
    --implementation cp --python-version "$python_version" \
    "${downloads[@]}" --dest "$folder/wheels" "${requirements[@]}"
  # Names of wheels have no capitals or hyphens.
  for package in $WITH_JAX $(tr 'A-Z,-' 'a-z _' <<<"$without"); do
    attempt rm -f "$folder/wheels/$package"-*.whl
  done
  printf 'Copy %s to the machine, and run in it\n' "$folder"
  printf '  bash launch/device.sh check\n'
  printf '  bash launch/device.sh train --config=... --workdir=...\n'
}

# Prints the requirements of training from records on a GPU, of setup.py.
#   $1: version of the machine's Python; pip evaluates markers for its own.
requirements() {
  "${PYTHON:-python3}" - "$1" <<'PYTHON_CODE'
import ast
import sys

# tokamax has no version for Python 3.11.
names = ('CORE',) if sys.argv[1] == '3.11' else ('CORE', 'GPU')
for node in ast.parse(open('setup.py').read()).body:
  if isinstance(node, ast.Assign) and node.targets[0].id in names:
    for line in ast.literal_eval(node.value):
      print(line.split(';')[0])
PYTHON_CODE
}

# Prints the packages in wheels/ that an interpreter does not have.
missing_packages() {
  "$1" - <<'PYTHON_CODE'
from importlib import metadata
import pathlib

for wheel in sorted(pathlib.Path('wheels').glob('*.whl')):
  name = wheel.name.split('-')[0]
  try:
    metadata.distribution(name)
  except metadata.PackageNotFoundError:
    print(name)
PYTHON_CODE
}

# Installs the packages that an interpreter lacks and sets its path.
#   $1: the interpreter.
install_missing() {
  local name missing=()
  is_supported "$1" || fail "$1 must be Python 3.11, 3.12 or 3.13"
  "$1" -c 'import jax' || fail "$1 has no jax, which is not packed"
  export PYTHONPATH=$PWD/site:$PWD${PYTHONPATH:+:$PYTHONPATH}
  for name in $(missing_packages "$1"); do
    missing+=("$name")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    run "$1" -m pip install --quiet --no-index --no-deps \
      --find-links wheels --target site "${missing[@]}"
  fi
}

# Prints the driver's version, or why there is none.
driver() {
  command -v nvidia-smi >/dev/null || printf 'nvidia-smi is not installed\n'
  nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | tail -n 1
}

check() {
  local python=${PYTHON:-python3} error
  install_missing "$python"
  # JAX would compute on the processor where it finds no GPU.
  export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda}
  error=$("$python" -c 'import jax; jax.devices()' 2>&1) ||
    fail "JAX finds no GPU: ${error##*$'\n'} Driver: $(driver || true)." \
      'CUDA 13 needs driver 580 or newer, CUDA 12 needs 525.'
  show env "PYTHONPATH=$PYTHONPATH" "$python" -m tests.benchmarks.device_check \
    "$@"
  exec "$python" -m tests.benchmarks.device_check "$@"
}

train() {
  local python=${PYTHON:-python3}
  install_missing "$python"
  show env "PYTHONPATH=$PYTHONPATH" "$python" -m encdec_adapt.train "$@"
  exec "$python" -m encdec_adapt.train "$@"
}

case "${1:-}" in
  pack | check | train)
    mode=$1
    shift
    "$mode" "$@"
    ;;
  -h | --help) sed -n '2,22s/^# \{0,1\}//p' launch/device.sh ;;
  *) fail 'the first argument must be pack, check or train; see --help' ;;
esac
