#!/usr/bin/env bash
# Trains on a GPU machine that has jax and no network. First, where there is a
# network, packs what such a machine lacks: source, records, small wheels
# (TensorFlow and SeqIO are not needed to train from records):
#
#   bash launch/device.sh pack --records=runs/quickstart/records \
#     [--folder=device] [--python_version=3.12] [--machine=x86_64]
#     [--glibc=2.28] [--dry_run]
#
# Then, in the folder's copy over there:
#
#   bash launch/device.sh train --config=... --workdir=... [flags of train]
#
# `train` installs the packages that the machine lacks next to the source,
# keeps its jax, and runs `python3 -m encdec_adapt.train` from there.
# PYTHON names another interpreter. Packing other folders than records (say
# checkpoints): repeat --records; paths stay what they are below the root.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

# What comes with jax: not carried, so that nothing replaces it there.
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
      *) fail "pack: $flag is not known; see --help" ;;
    esac
  done
  [ ${#records[@]} -gt 0 ] || fail 'pack: --records=FOLDER is needed'
  for path in "${records[@]}"; do
    case "$path" in
      /* | *..*) fail "pack: --records=$path must be below the root" ;;
    esac
    [ -d "$path" ] || [ "$dry_run" = 1 ] ||
      fail "pack: --records=$path is not a folder; run materialize first"
  done
  downloads+=(--platform "manylinux2014_$machine")
  # A wheel is tagged with the oldest C library that it runs with.
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
  printf 'Copy %s to the machine; there, in it, run\n' "$folder"
  printf '  bash launch/device.sh train --config=... --workdir=...\n'
}

# Prints what setup.py says that training from records needs.
core_requirements() {
  "${PYTHON:-python3}" - <<'PYTHON_CODE'
import ast

for node in ast.parse(open('setup.py').read()).body:
  if isinstance(node, ast.Assign) and node.targets[0].id == 'CORE':
    print('\n'.join(ast.literal_eval(node.value)))
PYTHON_CODE
}

# Prints the packages in wheels/ that an interpreter lacks.
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
  "$python" -c 'import jax' || fail "$python has no jax; it is not carried"
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
  *) fail 'say pack or train; see --help' ;;
esac
