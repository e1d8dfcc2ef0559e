#!/usr/bin/env bash
# Adapts Gemma 3 270M into a pair on one GPU without a network, in 590 s, and
# compares it with its source trained on (configs/gemma3_270m.md):
#
#   bash launch/real_model.sh prepare    here, two cores: makes and packs all
#   bash launch/real_model.sh rates      here: tries learning rates (hours) and
#                                        writes them into the last copy
#   bash launch/real_model.sh run        there: all parts, one after the other
#   bash launch/real_model.sh report     here: compares what came back
#
# `prepare` ends with the copying plan: six folders, each copied on its own to a
# checkout of the same commit. `run` writes a line of OUTPUT/parts.jsonl at the
# end of each part, with its scores and curve: copy OUTPUT back for `report`. A
# part that meets its deadline gets SIGTERM and is marked "not finished".
#
#   --folder=FOLDER  of everything made, the same here and there
#                    (runs/real_model); what is finished is kept
#   --output=OUTPUT  of the results (FOLDER/output)
#   --data=FOLDER    of the data sets that `prepare` reads (../shared/data)
#   --rehearsal      the shipped decoder in Gemma's place, small sizes, CPUs,
#                    and all four verbs in turn if none is given
#
# PYTHON names an interpreter.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

case "${1:-}" in
  -h | --help)
    sed -n '2,25s/^# \{0,1\}//p' launch/real_model.sh
    exit
    ;;
esac
python=${PYTHON:-$VENV/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m launch.real_model "$@"
