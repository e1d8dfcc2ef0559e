#!/usr/bin/env bash
# Trains on a GPU machine that has jax and no network. First, where there is a
# network, packs what such a machine lacks: source, records, small wheels
# (TensorFlow and SeqIO are not needed to train from records):
#
#   bash launch/device.sh pack --records=runs/quickstart/records \
#     [--folder=device] [--python_version=3.12]
#     [--platform=manylinux_2_28_x86_64] [--dry_run]
#
# Then, in the folder's copy over there:
#
#   bash launch/device.sh train --config=... --workdir=... [flags of train]
#
# `train` installs beside the source those packages that the machine lacks,
# leaves its jax alone, and runs `python3 -m encdec_adapt.train` from there.
# PYTHON names another interpreter. Packing other folders than records (say
# checkpoints): repeat --records; paths stay what they are below the root.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

# What a machine with jax may lack. Installed without their dependencies, so
# that nothing pulls in another jax.
PACKAGES='absl-py aiofiles array-record cloudpickle etils flax grain humanize
  jaxtyping ml-collections msgpack optax orbax-checkpoint portpicker
  prometheus-client psutil pyyaml sentencepiece simplejson tensorboard
  tensorstore treescope uvloop wadler-lindig'

dry_run=0
attempt() {
  show "$@"
  if [ "$dry_run" = 0 ]; then
    "$@"
  fi
}

pack() {
  local flag folder=device python_version platforms='' package path
  local records=() downloads=()
  python_version=$(version_of "${PYTHON:-python3}")
  for flag in "$@"; do
    case "$flag" in
      --records=*) records+=("${flag#*=}") ;;
      --folder=*) folder=${flag#*=} ;;
      --python_version=*) python_version=${flag#*=} ;;
      --platform=*) platforms=${flag#*=} ;;
      --dry_run) dry_run=1 ;;
      *) fail "pack: $flag is not known; see the head of this file" ;;
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
  # Wheels are tagged with the oldest system they run on.
  : "${platforms:=manylinux_2_28_x86_64 manylinux_2_17_x86_64
    manylinux2014_x86_64}"
  for flag in $platforms; do
    downloads+=(--platform "$flag")
  done
  attempt mkdir -p "$folder/wheels"
  for path in setup.py pyproject.toml encdec_adapt configs launch \
    "${records[@]}"; do
    attempt mkdir -p "$folder/$(dirname "$path")"
    attempt cp -R "$path" "$folder/$(dirname "$path")"
  done
  for package in $PACKAGES; do
    attempt "${PYTHON:-python3}" -m pip download --quiet --no-deps \
      --only-binary=:all: --implementation cp \
      --python-version "$python_version" "${downloads[@]}" \
      --dest "$folder/wheels" "$package"
  done
  printf 'Copy %s to the machine; there, in it, run\n' "$folder"
  printf '  bash launch/device.sh train --config=... --workdir=...\n'
}

# Prints those of PACKAGES that this interpreter lacks.
missing_packages() {
  # shellcheck disable=SC2086  # One argument per package.
  "$1" - $PACKAGES <<'PYTHON_CODE'
from importlib import metadata
import sys

for name in sys.argv[1:]:
  try:
    metadata.distribution(name)
  except metadata.PackageNotFoundError:
    print(name)
PYTHON_CODE
}

train() {
  local python=${PYTHON:-python3} name
  is_supported "$python" || fail "$python must be Python 3.11, 3.12 or 3.13"
  "$python" -c 'import jax' || fail "$python has no jax; it is not carried"
  export PYTHONPATH=$PWD/site:$PWD${PYTHONPATH:+:$PYTHONPATH}
  for name in $(missing_packages "$python"); do
    run "$python" -m pip install --quiet --no-index --no-deps \
      --find-links wheels --target site "$name"
  done
  show env "PYTHONPATH=$PYTHONPATH" "$python" -m encdec_adapt.train "$@"
  exec "$python" -m encdec_adapt.train "$@"
}

case "${1:-}" in
  pack | train)
    mode=$1
    shift
    "$mode" "$@"
    ;;
  *) fail 'say pack or train; see the head of this file' ;;
esac
