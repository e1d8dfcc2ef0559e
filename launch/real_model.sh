#!/usr/bin/env bash
# Adapts Gemma 3 270M into a pair on one GPU without a network, in 590 s, and
# compares it with its source trained on (configs/gemma3_270m.md):
#
#   bash launch/real_model.sh prepare    on the preparing machine, two cores:
#                                        makes and packs all files
#   bash launch/real_model.sh rates      on the preparing machine: tries learning
#                                        rates (hours) and writes them into the
#                                        last copy
#   bash launch/real_model.sh run        on the card: all parts in turn
#   bash launch/real_model.sh report     on the preparing machine: compares the
#                                        results
#
# `prepare` ends with the copying plan: six folders, each copied on its own to a
# checkout of the same commit. `run` writes a line of OUTPUT/parts.jsonl at the
# end of each part, with its scores and curve: copy OUTPUT back for `report`. A
# part that meets its deadline gets SIGTERM and is marked "not finished".
#
#   --folder=FOLDER  folder of all files, the same on both machines
#                    (runs/real_model); finished parts are reused
#   --output=OUTPUT  folder of the results (FOLDER/output)
#   --data=FOLDER    folder of the data sets for `prepare` (../shared/data)
#   --rehearsal      the shipped decoder in Gemma's place, small sizes, CPUs,
#                    and all four verbs in turn if none is given
#
# PYTHON names an interpreter.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

case "${1:-}" in
  -h | --help)
    sed -n '2,28s/^# \{0,1\}//p' launch/real_model.sh
    exit
    ;;
esac
python=${PYTHON:-$VENV/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m launch.real_model "$@"
