#!/usr/bin/env bash
# Installs what the tests need, checks the style and runs the tests:
#
#   bash launch/test.sh [arguments of pytest]
#
# PYTHON names an interpreter. Ends with pytest's own closing line.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment test
run "$VENV/bin/python" -m ruff check .
run "$VENV/bin/python" -m ruff format --check .
show "$VENV/bin/python" -m pytest "$@"
exec "$VENV/bin/python" -m pytest "$@"
