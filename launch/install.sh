#!/usr/bin/env bash
# Makes .venv from a lock file: the tested versions for a platform. TPU VMs,
# the container and GPU clusters are set up with it:
#
#   bash launch/install.sh --platform=cpu|tpu|gpu-cuda12 [--python=3.12]
#     [--dry_run]
#
# Needs uv, or a python3 with pip to bring it. A machine without the wanted
# Python is given one by uv. What is installed already is left alone.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

UV_VERSION=0.13.8

platform='' version=3.12 dry_run=0
for flag in "$@"; do
  case "$flag" in
    -h | --help)
      sed -n '2,9s/^# \{0,1\}//p' launch/install.sh
      exit
      ;;
    --platform=*) platform=${flag#*=} ;;
    --python=*) version=${flag#*=} ;;
    --dry_run) dry_run=1 ;;
    *) fail "$flag is not known; see --help" ;;
  esac
done
lock=launch/locks/$platform.txt
[ -n "$platform" ] && [ -f "$lock" ] ||
  fail "--platform=$platform has no lock file; choose cpu, tpu or gpu-cuda12"
case "$version" in
  3.11 | 3.12) ;;
  *) fail "--python=$version: the lock files hold for 3.11 and 3.12" ;;
esac

# Prints a command; runs it unless told not to.
attempt() {
  show "$@"
  if [ "$dry_run" = 0 ]; then
    "$@"
  fi
}

# What the environment was made from.
key=$(cat "$lock" setup.py <(printf '%s %s\n' "$version" "$PWD") | cksum)
stamp=$VENV/installed-from-lock
if [ "$dry_run" = 0 ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
  printf '%s is as %s has it\n' "$VENV" "$lock"
  exit
fi
if ! command -v uv >/dev/null; then
  export PATH=$HOME/.local/bin:$PATH
  attempt python3 -m pip install --quiet --user "uv==$UV_VERSION" ||
    fail "uv $UV_VERSION could not be installed; put it on PATH"
fi
attempt uv venv --quiet --clear --python "$version" "$VENV"
attempt uv pip install --quiet --python "$VENV/bin/python" \
  --requirement "$lock"
attempt uv pip install --quiet --python "$VENV/bin/python" --no-deps \
  --editable .
if [ "$dry_run" = 0 ]; then
  printf '%s\n' "$key" >"$stamp"
fi
