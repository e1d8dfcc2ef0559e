#!/usr/bin/env bash
# What one worker of a TPU slice does; launch/tpu_vm runs it on all of them.
# In the home folder, with the source beside it as encdec_adapt.tar.gz:
#
#   bash worker.sh setup [gs://BUCKET/RECORDS]
#   bash worker.sh run ATTEMPT [flags of encdec_adapt.train]
#   bash worker.sh stop
#   bash worker.sh profile
#
# The job is no child of the connection: one that breaks, or the launcher,
# may end, and `run` given again goes on showing it. Every line is printed
# after [slice.worker], and the last one says the status.

set -euo pipefail
cd "$HOME"

SOURCE=encdec_adapt
JOB=encdec_adapt.job

# Prints an attribute that the machine was made with; nothing if it has none.
attribute() {
  curl --silent --fail --header 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_IP:-metadata.google.internal}/computeMetadata/v1/instance/attributes/$1" ||
    true
}

# Prints slice.worker.
position() {
  local slice worker
  slice=$(attribute tpu-env | sed -n "s/^MEGASCALE_SLICE_ID: *'\{0,1\}\([0-9]*\).*/\1/p")
  worker=$(attribute agent-worker-number)
  printf '%s.%s\n' "${slice:-0}" "${worker:-0}"
}

# Whether the job's process is there.
running() {
  [ -f "$JOB/pid" ] && kill -0 "$(cat "$JOB/pid")" 2>/dev/null
}

setup() {
  local records=${1:-}
  if running; then
    echo 'launch: a job runs here; its source and records are left alone'
    return
  fi
  mkdir -p "$SOURCE"
  rm -rf "$SOURCE/encdec_adapt" "$SOURCE/configs" "$SOURCE/launch"
  tar -xzf encdec_adapt.tar.gz -C "$SOURCE"
  bash "$SOURCE/launch/install.sh" --platform=tpu
  if [ -n "$records" ]; then
    # Checksums of what is there already are compared, not times and sizes;
    # of what is copied, the tool compares them itself.
    gcloud storage rsync --recursive --checksums-only \
      --delete-unmatched-destination-objects "$records" "$SOURCE/records"
  fi
}

run() {
  local key status first=1
  key=$(printf '%q ' "$@")
  shift
  if [ -f "$JOB/key" ] && [ "$(cat "$JOB/key")" = "$key" ]; then
    # The connection broke meanwhile; what it has shown is not shown again.
    first=$(($(cat "$JOB/shown") + 1))
  elif running; then
    echo 'launch: another job runs here; stop it first'
    return 2
  else
    rm -rf "$JOB"
    mkdir "$JOB"
    : >"$JOB/log"
    echo 0 >"$JOB/shown"
    start "$@"
    printf '%s\n' "$key" >"$JOB/key"
  fi
  follow "$first"
  [ -f "$JOB/status" ] || sleep 2 # Between the last line and its status.
  status=$(cat "$JOB/status" 2>/dev/null || echo 137)
  echo "launch: ended with status $status"
  return "$status"
}

# Starts the job in a session of its own, and leaves its process' number.
start() {
  # shellcheck disable=SC2016 # Expanded by the inner shell.
  setsid nohup bash -c '
    job=$1
    shift
    cd "$1"
    shift
    .venv/bin/python -m encdec_adapt.train --coordinator=auto "$@" &
    echo $! >"$job/pid"
    # A signal is passed on; then one waits again, for the status.
    trap "kill -TERM $!" TERM
    wait $! && status=0 || status=$?
    while kill -0 $! 2>/dev/null; do
      wait $! && status=0 || status=$?
    done
    echo $status >"$job/status.part"
    mv "$job/status.part" "$job/status"
  ' encdec_adapt "$PWD/$JOB" "$SOURCE" "$@" \
    </dev/null >>"$JOB/log" 2>&1 &
  while [ ! -f "$JOB/pid" ]; do
    sleep 0.1
  done
}

# Prints the log from a line on, as long as the job runs.
follow() {
  local line shown=$(($1 - 1))
  while IFS= read -r line; do
    printf '%s\n' "$line"
    shown=$((shown + 1))
    printf '%s\n' "$shown" >"$JOB/shown"
  done < <(tail -n "+$1" --pid="$(cat "$JOB/pid")" -f "$JOB/log")
}

stop() {
  if running; then
    kill -TERM "$(cat "$JOB/pid")"
    echo 'launch: told to stop; it saves and ends with status 75'
  else
    echo 'launch: no job runs here'
  fi
}

profile() {
  if running; then
    kill -USR1 "$(cat "$JOB/pid")"
    echo 'launch: told to trace its next steps, into the work directory'
  else
    echo 'launch: no job runs here'
  fi
}

case "${1:-}" in
  setup | run | stop | profile)
    "$@" 2>&1 | sed -u "s/^/[$(position)] /"
    ;;
  *)
    echo 'worker.sh: say setup, run, stop or profile' >&2
    exit 2
    ;;
esac
