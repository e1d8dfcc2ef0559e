#!/usr/bin/env bash
# Runs the two commands of the README in fresh clones and environments, with
# every supported Python on PATH or in pyenv:
#
#   bash launch/matrix.sh [--only=3.12] [--commands=test,quickstart]
#
# Tests committed files only. Logs stay in the printed folder; clones whose
# commands passed are removed. Exits with 1 if a command failed or a Python is
# missing.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

versions='3.11 3.12 3.13'
commands='test quickstart'
for flag in "$@"; do
  case "$flag" in
    -h | --help)
      sed -n '2,10s/^# \{0,1\}//p' launch/matrix.sh
      exit
      ;;
    --only=*) versions=${flag#*=} ;;
    --commands=*) commands=${flag#*=} ;;
    *) fail "unknown flag $flag; see --help" ;;
  esac
done
versions=${versions//,/ }
commands=${commands//,/ }
for name in $commands; do
  case "$name" in
    test | quickstart) ;;
    *) fail "--commands=$name: choose test or quickstart" ;;
  esac
done

# Prints a working interpreter of a version.
find_python() {
  local candidate
  for candidate in "python$1" \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    # pyenv has shims for inactive versions too, which fail.
    if [ "$(version_of "$candidate" 2>/dev/null)" = "$1" ]; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  return 1
}

if [ -n "$(git status --porcelain)" ]; then
  printf 'Note: uncommitted changes are not tested.\n'
fi
folder=$(mktemp -d)
printf 'Logs and clones: %s\n' "$folder"
table=$folder/table.txt
printf '%-8s %-11s %-8s %9s  %s\n' python command result seconds \
  'last line' >"$table"
failed=0
for version in $versions; do
  if ! python=$(find_python "$version"); then
    printf '%-8s %-11s %-8s %9s\n' "$version" - missing - >>"$table"
    failed=1
    continue
  fi
  clone=$folder/$version
  git clone --quiet "$PWD" "$clone"
  clean=1
  for name in $commands; do
    log=$folder/$version-$name.log
    printf '\n== Python %s: bash launch/%s.sh (%s)\n' "$version" "$name" "$log"
    start=$SECONDS
    result=passed
    if ! env -u PYTHONPATH -u VIRTUAL_ENV PYTHON="$python" \
      bash "$clone/launch/$name.sh" 2>&1 | tee "$log"; then
      result=FAILED
      clean=0
      failed=1
    fi
    printf '%-8s %-11s %-8s %9d  %s\n' "$version" "$name" "$result" \
      $((SECONDS - start)) "$(tail -n 1 "$log")" >>"$table"
  done
  if [ "$clean" = 1 ]; then
    rm -rf "$clone"
  fi
done
printf '\n'
cat "$table"
exit "$failed"
