#!/usr/bin/env bash
# Writes the lock files of this folder: the versions of an environment in
# which the tests pass, plus the packages of each platform.
#
#   bash launch/locks/make.sh [--tested=.venv/bin/python]
#
# Needs uv. A lock is for Linux x86-64 and Python 3.11 and 3.12, and is checked
# to resolve on both. It has no hashes and no index URLs, so mirrors work.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/environment.sh

# libtpu's wheels are for glibc 2.31 and newer.
PLATFORM=x86_64-manylinux_2_31

tested=$VENV/bin/python
for flag in "$@"; do
  case "$flag" in
    -h | --help)
      sed -n '2,8s/^# \{0,1\}//p' launch/locks/make.sh
      exit
      ;;
    --tested=*) tested=${flag#*=} ;;
    *) fail "unknown flag $flag; see --help" ;;
  esac
done
"$tested" -c 'import jax, encdec_adapt' ||
  fail "--tested=$tested lacks jax or this package; give the Python of an" \
    "environment in which the tests pass"
command -v uv >/dev/null || fail 'uv is not installed; pip install uv'

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$tested" - >"$folder/tested.txt" <<'PYTHON_CODE'
from importlib import metadata

for found in metadata.distributions():
  # Local versions (1.0+cpu) and this package are on no index.
  if '+' not in found.version and found.name != 'encdec_adapt':
    print(f'{found.name}=={found.version}')
PYTHON_CODE

# Writes a lock.
#   $1: name of the lock; $2: requirements in addition to setup.py, if any.
lock() {
  local name=$1 extra=${2:-} file=launch/locks/$1.txt
  {
    printf '# Written by launch/locks/make.sh, with\n'
    printf '#   uv pip compile %ssetup.py --extra=gcs --constraint=tested.txt \\\n' \
      "${extra:+extra.in }"
    printf '#     --python-version=3.11 --python-platform=%s\n' "$PLATFORM"
    printf '# tested.txt: an environment in which the tests pass'
    printf '%s.\n' "${extra:+; extra.in: $extra}"
    printf '# Linux on x86-64, Python 3.11 and 3.12. Installed by'
    printf ' launch/install.sh.\n'
  } >"$folder/$name.txt"
  printf '%s\n' "$extra" >"$folder/extra.in"
  uv pip compile --quiet --no-header --no-annotate --no-emit-index-url \
    --no-emit-find-links --python-version 3.11 --python-platform "$PLATFORM" \
    --constraint "$folder/tested.txt" --extra gcs setup.py \
    "$folder/extra.in" \
    >>"$folder/$name.txt"
  for version in 3.11 3.12; do
    uv pip compile --quiet --no-header --no-annotate \
      --python-version "$version" --python-platform "$PLATFORM" \
      "$folder/$name.txt" >/dev/null ||
      fail "$name: cannot be installed on Python $version"
  done
  mv "$folder/$name.txt" "$file"
  printf '%s: %d packages\n' "$file" "$(grep -c == "$file")"
}

jax=$("$tested" -c 'import jax; print(jax.__version__)')
lock cpu
lock tpu "jax[tpu]==$jax"
lock gpu-cuda12 "jax[cuda12]==$jax"
