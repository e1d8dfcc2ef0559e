# shellcheck shell=bash
# Creates the virtual environment of the other scripts, which source this file
# in the repository's root. Needs bash 3.2 or newer.
#
#   PYTHON   interpreter of .venv (default: python3, or python3.13, python3.12,
#            python3.11 if python3 has an unsupported version)

VENV=.venv

# Prints an error and exits with status 1.
fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Prints a command, then runs it.
run() {
  show "$@"
  "$@"
}

# Prints a command, quoted for a shell.
show() {
  printf '$'
  printf ' %q' "$@"
  printf '\n'
}

# Whether an interpreter works and has a supported version.
is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
    2>/dev/null
}

# Prints the interpreter for .venv.
choose_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" \
    ${PYTHON:+--} python3.13 python3.12 python3.11; do
    # An interpreter named by PYTHON is used or refused, never replaced.
    if [ "$candidate" = -- ]; then
      break
    fi
    if is_supported "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 ||
    true); Python 3.11, 3.12 or 3.13 is needed. Install one, and name it if" \
    "it is not found: PYTHON=/path/to/python3.12 bash launch/$(basename "$0")"
}

# Prints major.minor of an interpreter.
version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

# Creates .venv if it is missing, broken, or has another version than PYTHON.
make_venv() {
  local python
  if is_supported "$VENV/bin/python" && "$VENV/bin/python" -m pip --version \
    >/dev/null 2>&1; then
    if [ -z "${PYTHON:-}" ]; then
      return
    fi
    python=$(choose_python) || exit 1
    if [ "$(version_of "$python")" = "$(version_of "$VENV/bin/python")" ]; then
      return
    fi
  else
    python=$(choose_python) || exit 1
  fi
  run "$python" -m venv --clear "$VENV" ||
    fail "could not create $VENV. On Debian and Ubuntu, venv is a separate" \
      "package: apt install python$(version_of "$python")-venv"
}

# Prints a hash of all that an installation depends on.
installation_key() {
  "$VENV/bin/python" - "$PWD" <<'PYTHON_CODE'
import hashlib, pathlib, sys
key = hashlib.sha256(repr((sys.version, sys.argv[1])).encode())
for name in ('setup.py', 'pyproject.toml'):
  key.update(pathlib.Path(name).read_bytes())
print(key.hexdigest())
PYTHON_CODE
}

# Shortens pip's output to one line per package.
progress_lines() {
  local line rest
  while IFS= read -r line; do
    case "$line" in
      Collecting\ *)
        rest=${line#Collecting }
        printf '  %s\n' "${rest%% *}"
        ;;
      Installing\ collected\ packages:*)
        printf '  installing (a few minutes)\n'
        ;;
    esac
  done
}

# Whether an up-to-date installation has at least these extras.
#   $1: extras, separated by commas; empty for none.
#   $2: expected installation_key.
is_installed() {
  local stamp has extra missing
  for stamp in "$VENV"/installed "$VENV"/installed-*; do
    # install.sh uses the versions of a lock file, and another key.
    if [ "$stamp" = "$VENV/installed-from-lock" ] || [ ! -f "$stamp" ] ||
      [ "$(cat "$stamp")" != "$2" ]; then
      continue
    fi
    has=${stamp#"$VENV/installed"}
    has=,${has#-},
    missing=
    for extra in ${1//,/ }; do
      case "$has" in
        *",$extra,"*) ;;
        *) missing=$extra ;;
      esac
    done
    if [ -z "$missing" ]; then
      return 0
    fi
  done
  return 1
}

# Creates or updates the environment.
#   $1: extras to install, such as 'test,peer'; empty for none.
prepare_environment() {
  local extras=$1 key target=.
  make_venv
  key=$(installation_key)
  if is_installed "$extras" "$key"; then
    return
  fi
  if [ -n "$extras" ]; then
    target=".[$extras]"
  fi
  # Unbuffered, so that progress appears at once.
  show "$VENV/bin/python" -m pip install --editable "$target"
  PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip install \
    --disable-pip-version-check --no-input --progress-bar off \
    --editable "$target" | progress_lines ||
    fail "the installation failed, see above; run the same command again"
  printf '%s\n' "$key" >"$VENV/installed${extras:+-$extras}"
}
