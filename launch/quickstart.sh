#!/usr/bin/env bash
# Runs the main job on text of Python's standard library, and writes a report:
#
#   bash launch/quickstart.sh [--size=default|full] [flags of the study]
#
# With the installation the default size takes 10 minutes on two cores; full,
# which trains long enough to compare results, at most two and a half hours. The
# same command resumes an interrupted run. PYTHON names an interpreter.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

size=default
flags=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      sed -n '2,9s/^# \{0,1\}//p' launch/quickstart.sh
      exit
      ;;
    --size=*) size=${1#*=} ;;
    --size)
      [ $# -gt 1 ] || fail '--size needs a value: default or full'
      size=$2
      shift
      ;;
    *) flags+=("$1") ;;
  esac
  shift
done
case "$size" in
  default | full) ;;
  *) fail "--size=$size: choose default or full" ;;
esac

prepare_environment ''
command=("$VENV/bin/python" -m encdec_adapt.study
  "--study=configs/quickstart.py:size=$size" ${flags[@]+"${flags[@]}"})
show "${command[@]}"
"${command[@]}"
[ ${#flags[@]} -eq 0 ] || exit 0
run=quickstart
[ "$size" = default ] || run=quickstart_$size
cat <<END

The report is runs/$run/report.html. To go on with the tuned pair:

  source $VENV/bin/activate
  python -m encdec_adapt.generate --checkpoint=runs/$run/adapted_tuned \\
    --prompts=configs/decoders/questions.jsonl
END
