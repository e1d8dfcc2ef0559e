#!/usr/bin/env bash
# Trains on a GPU machine that has jax but no network. First pack source,
# records and wheels on a machine with a network (training from records needs
# neither TensorFlow nor SeqIO):
#
#   bash launch/device.sh pack --records=runs/quickstart/records \
#     [--folder=device] [--python_version=3.12] [--machine=x86_64]
#     [--glibc=2.28] [--dry_run]
#
# Then copy the folder to the GPU machine and run in it:
#
#   bash launch/device.sh train --config=... --workdir=... [flags of train]
#
# `train` installs missing packages next to the source, keeps the machine's jax,
# and runs `python3 -m encdec_adapt.train`. PYTHON names another interpreter.
# To pack other folders too, such as checkpoints, repeat --records; paths are
# relative to the repository's root.

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
  local flag folder=device python_version machine=x86_64 glibc=28 minor package path
  local records=() downloads=() requirements=()
  python_version=$(version_of "${PYTHON:-python3}")
  for flag in "$@"; do
    case "$flag" in
      --records=*) records+=("${flag#*=}") ;;
      --folder=*) folder=${flag#*=} ;;
      --python_version=*) python_version=${flag#*=} ;;
      --machine=*) machine=${flag#*=} ;;
      --glibc=2.*) glibc=${flag#*=2.} ;;
      --dry_run) dry_run=1 ;;
      *) fail "pack: unknown flag $flag; see --help" ;;
    esac
  done
  [ ${#records[@]} -gt 0 ] || fail 'pack: --records=FOLDER is missing'
  for path in "${records[@]}"; do
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
    "${records[@]}"; do
    attempt mkdir -p "$folder/$(dirname "$path")"
    attempt cp -R "$path" "$folder/$(dirname "$path")"
  done
  while IFS= read -r package; do
    requirements+=("$package")
  done < <(core_requirements)
  attempt "${PYTHON:-python3}" -m pip download --quiet --only-binary=:all: \
    --implementation cp --python-version "$python_version" \
    "${downloads[@]}" --dest "$folder/wheels" "${requirements[@]}"
  for package in $WITH_JAX; do
    attempt rm -f "$folder/wheels/$package"-*.whl
  done
  printf 'Copy %s to the machine, and run in it\n' "$folder"
  printf '  bash launch/device.sh train --config=... --workdir=...\n'
}

# Prints the requirements of training from records, CORE in setup.py.
core_requirements() {
  "${PYTHON:-python3}" - <<'PYTHON_CODE'
import ast

for node in ast.parse(open('setup.py').read()).body:
  if isinstance(node, ast.Assign) and node.targets[0].id == 'CORE':
    print('\n'.join(ast.literal_eval(node.value)))
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

train() {
  local python=${PYTHON:-python3} name missing=()
  is_supported "$python" || fail "$python must be Python 3.11, 3.12 or 3.13"
  "$python" -c 'import jax' || fail "$python has no jax, which is not packed"
  export PYTHONPATH=$PWD/site:$PWD${PYTHONPATH:+:$PYTHONPATH}
  for name in $(missing_packages "$python"); do
    missing+=("$name")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    run "$python" -m pip install --quiet --no-index --no-deps \
      --find-links wheels --target site "${missing[@]}"
  fi
  show env "PYTHONPATH=$PYTHONPATH" "$python" -m encdec_adapt.train "$@"
  exec "$python" -m encdec_adapt.train "$@"
}

case "${1:-}" in
  pack | train)
    mode=$1
    shift
    "$mode" "$@"
    ;;
  -h | --help) sed -n '2,17s/^# \{0,1\}//p' launch/device.sh ;;
  *) fail 'the first argument must be pack or train; see --help' ;;
esac
