#!/usr/bin/env bash
# Creates .venv from a lock file with the tested versions for a platform, on
# Linux x86-64. TPU VMs, the container and GPU clusters use it:
#
#   bash launch/install.sh --platform=cpu|tpu|gpu-cuda13|gpu-cuda12
#     [--python=3.12] [--seqio] [--dry_run]
#
# The locks have jax 0.12 for Python 3.12 and 3.13, and jax 0.10 for 3.11.
# gpu-cuda13 is for 3.12 and 3.13; gpu-cuda12, for drivers older than 580, for
# 3.11. --seqio adds SeqIO, TFDS and TensorFlow, for records of `seqio:` and
# `tfds:` sources. Needs uv, or a python3 with pip, which installs uv into a
# folder next to .venv. uv installs the first of these versions if it is missing;
# where it cannot, another one that is installed serves, unless --python names a
# version. Does nothing if .venv is up to date.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

UV_VERSION=0.13.8

platform='' version='' dry_run=0 seqio=0
for flag in "$@"; do
  case "$flag" in
    -h | --help)
      sed -n '2,16s/^# \{0,1\}//p' launch/install.sh
      exit
      ;;
    --platform=*) platform=${flag#*=} ;;
    --python=*) version=${flag#*=} ;;
    --seqio) seqio=1 ;;
    --dry_run) dry_run=1 ;;
    *) fail "unknown flag $flag; see --help" ;;
  esac
done
case "$platform" in
  cpu | tpu) supported='3.12 3.13 3.11' ;;
  gpu-cuda13) supported='3.12 3.13' ;;
  gpu-cuda12) supported='3.11' ;;
  *)
    fail "--platform=$platform has no lock file; choose cpu, tpu, gpu-cuda13 or" \
      'gpu-cuda12'
    ;;
esac
case " $supported " in
  *" ${version:-${supported%% *}} "*) ;;
  *) fail "--python=$version: the lock files of $platform are for $supported" ;;
esac

# Prints a command; runs it unless --dry_run is given.
attempt() {
  show "$@"
  if [ "$dry_run" = 0 ]; then
    "$@"
  fi
}

# Installs uv if it is missing. `pip --target` also works in an externally
# managed environment (PEP 668), and needs no venv, a separate Debian package.
install_uv() {
  local folder=$VENV-uv-$UV_VERSION
  export PATH=$PATH:$PWD/$folder/bin
  if [ "$dry_run" = 1 ]; then
    echo '# unless uv is installed'
  elif command -v uv >/dev/null; then
    return
  fi
  attempt python3 -m pip install --quiet --target "$folder" "uv==$UV_VERSION" ||
    fail "uv $UV_VERSION could not be installed. If python3 has no pip, run" \
      "apt install python3-pip; or put uv on PATH."
}

machine=$(uname -s)-$(uname -m)
if [ "$dry_run" = 0 ] && [ "$machine" != Linux-x86_64 ]; then
  fail "the lock files are for Linux-x86_64, and this is $machine; use" \
    "pip install -e '.[data,gcs]', which chooses versions for this machine"
fi
# Checksum of all that the environment depends on.
key=$(cat launch/locks/*.txt launch/locks/*/*.txt setup.py \
  <(printf '%s %s %s %s\n' "$platform" "$version" "$seqio" "$PWD") | cksum)
stamp=$VENV/installed-from-lock
if [ "$dry_run" = 0 ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
  printf '%s is up to date with the locks of %s\n' "$VENV" "$platform"
  exit
fi
install_uv
made=''
for candidate in ${version:-$supported}; do
  # --seed: messages of the package name commands of pip.
  environment=(uv venv --quiet --clear --seed --python "$candidate")
  if [ "$candidate" != "${version:-${supported%% *}}" ]; then
    environment+=(--no-python-downloads)
  fi
  if attempt "${environment[@]}" "$VENV"; then
    made=$candidate
    break
  fi
done
[ -n "$made" ] ||
  fail "uv found no Python ${version:-${supported// / or }} and could not" \
    'install it; install one'
folder=launch/locks
if [ "$made" = 3.11 ]; then
  folder+=/python3.11
fi
locks=("$folder/$platform.txt")
if [ "$seqio" = 1 ]; then
  locks+=("$folder/seqio.txt")
fi
attempt uv pip install --quiet --python "$VENV/bin/python" \
  "${locks[@]/#/--requirement=}"
attempt uv pip install --quiet --python "$VENV/bin/python" --no-deps \
  --editable .
if [ "$dry_run" = 0 ]; then
  printf '%s\n' "$key" >"$stamp"
fi
