#!/usr/bin/env bash
# Runs the main job on text of Python's standard library, and writes a report:
#
#   bash launch/quickstart.sh [flags of the study]
#
# With the installation it takes 10 minutes on two cores. The same command
# resumes an interrupted run. PYTHON names an interpreter.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

case "${1:-}" in
  -h | --help)
    sed -n '2,8s/^# \{0,1\}//p' launch/quickstart.sh
    exit
    ;;
esac

prepare_environment ''
command=("$VENV/bin/python" -m encdec_adapt.study
  --study=configs/quickstart.py "$@")
show "${command[@]}"
"${command[@]}"
[ $# -eq 0 ] || exit 0
cat <<END

The report is runs/quickstart/report.html. To go on with the tuned pair:

  source $VENV/bin/activate
  python -m encdec_adapt.generate --checkpoint=runs/quickstart/adapted_tuned \\
    --prompts=configs/decoders/questions.jsonl
END
