#!/usr/bin/env bash
# Installs the test dependencies, checks the style and runs the tests:
#
#   bash launch/test.sh [--all] [arguments of pytest]
#
# --all also installs torch, transformers and libtpu, without which tests of
# parity and plans are skipped, runs the long tests, and prints the slowest 20
# and the total time by marker. PYTHON names an interpreter.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

extras='test'
case "${1:-}" in
  -h | --help)
    sed -n '2,8s/^# \{0,1\}//p' launch/test.sh
    exit
    ;;
  --all)
    extras=test,peer,tpu
    shift
    set -- -m 'not slow and not aot_gpu' --durations=20 "$@"
    ;;
esac
prepare_environment "$extras"
run "$VENV/bin/python" -m ruff check .
run "$VENV/bin/python" -m ruff format --check .
# One process per core. The tests of a file share fixtures and stay together.
# A process that crashes is not replaced: pytest-xdist would wait without end
# for the tests of two that crash. A test that takes a quarter of an hour hangs:
# its stack is printed and its process ended.
tests=("$VENV/bin/python" -m pytest --numprocesses=auto --maxprocesses=4
  --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
  -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true "$@")
show "${tests[@]}"
exec "${tests[@]}"
