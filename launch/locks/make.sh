#!/usr/bin/env bash
# Writes lock files: the versions of an environment in which the tests pass,
# plus the packages of each platform and the extra `data`. seqio.txt has the
# extra `seqio`, with the versions that all of them allow.
#
#   bash launch/locks/make.sh [--tested=.venv/bin/python]
#
# Needs uv. With Python 3.12 it writes the locks of this folder, for Linux
# x86-64 and Python 3.12 and 3.13, and checks that they resolve on both; with
# Python 3.11 those of python3.11/, with the last jax for it. They have no
# hashes and no index URLs, so mirrors work.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/environment.sh

# libtpu's wheels are for glibc 2.31 and newer.
PLATFORM=x86_64-manylinux_2_31

tested=$VENV/bin/python
for flag in "$@"; do
  case "$flag" in
    -h | --help)
      sed -n '2,11s/^# \{0,1\}//p' launch/locks/make.sh
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
case "$(version_of "$tested")" in
  3.11)
    locks=launch/locks/python3.11 versions='3.11'
    platforms='cpu tpu gpu-cuda12'
    ;;
  3.12)
    locks=launch/locks versions='3.12 3.13'
    platforms='cpu tpu gpu-cuda13'
    ;;
  *) fail "--tested=$tested must be Python 3.11 or 3.12" ;;
esac

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$tested" - >"$folder/tested.txt" <<'PYTHON_CODE'
from importlib import metadata

for found in metadata.distributions():
  # Local versions (1.0+cpu) and this package are on no index.
  if '+' not in found.version and found.name != 'encdec_adapt':
    print(f'{found.name}=={found.version}')
PYTHON_CODE

# Prints the versions of setup.py's requirements.
#   $1: file of constraints; then flags of uv, and files of more requirements.
compile() {
  uv pip compile --quiet --no-header --no-annotate --no-emit-index-url \
    --no-emit-find-links --python-version "${versions%% *}" --python-platform "$PLATFORM" \
    --constraint "$1" --extra gcs --extra data setup.py "${@:2}"
}

# Writes a lock file from lines of versions.
#   $1: its name; $2: what it has besides the versions in tested.txt.
write() {
  local file=$locks/$1.txt
  {
    printf '# Written by launch/locks/make.sh: versions of an environment in'
    printf ' which the tests\n# pass%s. Linux on x86-64, Python %s.\n' \
      "${2:+, and $2}" "${versions/ / and }"
    printf '# Installed by launch/install.sh.\n'
    cat
  } >"$file"
  printf '%s: %d packages\n' "$file" "$(grep -c == "$file")"
}

# The extra decides versions that platforms share, so it is resolved first.
compile "$folder/tested.txt" --extra seqio >"$folder/full.txt"
jax=$("$tested" -c 'import jax; print(jax.__version__)')
for platform in $platforms; do
  extra='' flags=()
  case "$platform" in
    tpu) extra="jax[tpu]==$jax" ;;
    gpu-*) extra="jax[${platform#gpu-}]==$jax" flags=(--extra gpu) ;;
  esac
  printf '%s\n' "$extra" >"$folder/extra.in"
  compile "$folder/full.txt" ${flags[@]+"${flags[@]}"} "$folder/extra.in" \
    >"$folder/$platform.txt"
  for version in $versions; do
    cat "$folder/full.txt" "$folder/$platform.txt" | sort -u >"$folder/all.in"
    uv pip compile --quiet --python-version "$version" \
      --python-platform "$PLATFORM" "$folder/all.in" >/dev/null ||
      fail "$platform: cannot be installed on Python $version"
  done
  write "$platform" "$extra" <"$folder/$platform.txt"
done
grep -vxFf "$folder/cpu.txt" "$folder/full.txt" | write seqio
