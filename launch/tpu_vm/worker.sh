#!/usr/bin/env bash
# Sets up a worker of a TPU slice and runs the job on it. launch/tpu_vm starts
# it on every worker, in the home folder, next to encdec_adapt.tar.gz:
#
#   bash worker.sh [--dry_run] ...
#   bash worker.sh setup SOURCE [gs://BUCKET/RECORDS | disk]
#   bash worker.sh run SOURCE ATTEMPT [NAME=VALUE ...] [flags of
#     encdec_adapt.train]
#   bash worker.sh stop
#   bash worker.sh profile
#
# SOURCE is the archive's checksum: gcloud (528, `PrepareNodeForSSH`) may skip a
# worker with only a warning, and that worker would run an older source.
#
# The job is not a child of the SSH connection, so it survives a broken
# connection and the end of the launcher; `run` with the same arguments shows
# its further output. Every line is prefixed with [slice.worker], and the last
# line has the exit status. With --dry_run, the commands are printed only.

set -euo pipefail

dry_run=0
if [ "${1:-}" = --dry_run ]; then
  dry_run=1
  shift
else
  cd "$HOME"
fi

SOURCE=encdec_adapt
ARCHIVE=encdec_adapt.tar.gz
# File with the checksum of the archive that this worker was set up with.
STAMP=encdec_adapt.source
JOB=encdec_adapt.job
# Bytes of disk reserved for logs and compiled programs.
SPARE=2000000000

# Prints a command, quoted for a shell.
show() {
  printf '$'
  printf ' %q' "$@"
  printf '\n'
}

# Prints a command; runs it unless --dry_run is given.
attempt() {
  show "$@"
  if [ "$dry_run" = 0 ]; then
    "$@"
  fi
}

# Prints a metadata attribute of this machine; nothing if it is not set.
attribute() {
  curl --silent --fail --header 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_IP:-metadata.google.internal}/computeMetadata/v1/instance/attributes/$1" ||
    true
}

# Prints the position of this worker as slice.worker.
position() {
  local slice worker
  if [ "$dry_run" = 1 ]; then
    echo worker
    return
  fi
  slice=$(attribute tpu-env | sed -n "s/^MEGASCALE_SLICE_ID: *'\{0,1\}\([0-9]*\).*/\1/p")
  worker=$(attribute agent-worker-number)
  printf '%s.%s\n' "${slice:-0}" "${worker:-0}"
}

# Whether the job is running. After a reboot, another process may have its id.
running() {
  local pid words
  [ -f "$JOB/pid" ] && pid=$(cat "$JOB/pid") && kill -0 "$pid" 2>/dev/null ||
    return 1
  words=$(tr '\0' '\n' <"/proc/$pid/cmdline")
  # The command line of a process is empty while it starts.
  [ -z "$words" ] || grep -qxF encdec_adapt.train <<<"$words"
}

setup() {
  local source=$1 records=${2:-}
  if running; then
    echo 'launch: a job runs here; its source and records are not changed'
    return
  fi
  require_source "$source"
  attempt rm -f "$STAMP"
  attempt mkdir -p "$SOURCE"
  attempt rm -rf "$SOURCE/encdec_adapt" "$SOURCE/configs" "$SOURCE/launch"
  attempt tar -xzf "$ARCHIVE" -C "$SOURCE"
  attempt bash "$SOURCE/launch/install.sh" --platform=tpu
  if [ "$dry_run" = 1 ]; then
    bash launch/install.sh --platform=tpu --dry_run
  fi
  case "$records" in
    '') ;;
    disk) mount_records ;;
    *) copy_records "$records" ;;
  esac
  if [ "$dry_run" = 0 ]; then
    printf '%s\n' "$source" >"$STAMP"
  fi
}

# Fails if the archive has another checksum.
require_source() {
  local found
  show cksum "$ARCHIVE"
  if [ "$dry_run" = 1 ]; then
    return
  fi
  found=$(cksum "$ARCHIVE" | awk '{ print $1 "-" $2 }')
  if [ "$found" != "$1" ]; then
    echo "launch: $ARCHIVE is $found, not $1: the source was not copied here"
    return 1
  fi
}

# Copies the records from a bucket.
copy_records() {
  require_space "$1"
  # Compares existing files by checksum, not by time and size; copied files are
  # always verified.
  attempt gcloud storage rsync --recursive --checksums-only \
    --delete-unmatched-destination-objects "$1" "$SOURCE/records"
}

# Returns 2 if the disk has no room for the records of a bucket.
require_space() {
  local size there=0 room
  show gcloud storage du --summarize "$1"
  if [ "$dry_run" = 1 ]; then
    return
  fi
  size=$(gcloud storage du --summarize "$1" | awk 'NF { n = $1 } END { print n }')
  if [ -d "$SOURCE/records" ]; then
    there=$(du -sb "$SOURCE/records" | cut -f 1)
  fi
  room=$(df --output=avail -B1 "$SOURCE" | tail -n 1)
  if [ $((size - there + SPARE)) -gt "$room" ]; then
    printf 'launch: the records %s have %s, %s of them on this disk, which has %s left\n' \
      "$1" "$(gigabytes "$size")" "$(gigabytes "$there")" "$(gigabytes "$room")"
    echo 'launch: put them on a separate disk (--data_disk), or make fewer, from' \
      'fewer passes or less text (config.data.max_bytes)'
    return 2
  fi
}

# Prints a number of bytes.
gigabytes() {
  awk -v n="$1" 'BEGIN { printf "%.1f GB", n / 1e9 }'
}

# Mounts the data disk by label, since device names depend on the type of disk.
mount_records() {
  if [ "$dry_run" = 0 ] && mountpoint -q "$SOURCE/records"; then
    return
  fi
  attempt mkdir -p "$SOURCE/records"
  if ! attempt sudo mount -t ext4 -o ro -o noload LABEL=records \
    "$SOURCE/records"; then
    echo 'launch: --data_disk must be attached when the machines are created, and' \
      'have an ext4 file system labeled records (mkfs.ext4 -L records)'
    return 2
  fi
}

run() {
  local source=$1 key status first=1
  shift
  if [ "$dry_run" = 1 ]; then
    start "${@:2}"
    return
  fi
  key=$(printf '%q ' "$@")
  shift
  # The same job may be running or have ended already.
  if [ -f "$JOB/pid" ] && [ "$(cat "$JOB/key")" = "$key" ]; then
    # The connection broke: continue after the last line that was printed.
    first=$(($(cat "$JOB/shown") + 1))
  elif running; then
    echo 'launch: another job runs here; stop it first'
    return 2
  elif [ "$(cat "$STAMP" 2>/dev/null)" != "$source" ]; then
    echo "launch: this worker is not set up with the source $source"
    echo 'launch: ended with status 1'
    return 1
  else
    rm -rf "$JOB"
    mkdir "$JOB"
    : >"$JOB/log"
    echo 0 >"$JOB/shown"
    printf '%s\n' "$key" >"$JOB/key"
    start "$@"
  fi
  follow "$first"
  [ -f "$JOB/status" ] || sleep 2 # The status follows the last line.
  status=$(cat "$JOB/status" 2>/dev/null || echo 137)
  echo "launch: ended with status $status"
  return "$status"
}

# Starts the job in a new session and writes its process id.
start() {
  local train=()
  # Environment variables stand before the flags.
  while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do
    train+=("$1")
    shift
  done
  [ ${#train[@]} = 0 ] || train=(env "${train[@]}")
  train+=(.venv/bin/python -m encdec_adapt.train --coordinator=auto "$@")
  show cd "$SOURCE"
  show "${train[@]}"
  if [ "$dry_run" = 1 ]; then
    return
  fi
  # shellcheck disable=SC2016 # Expanded by the inner shell.
  setsid nohup bash -c '
    job=$1
    shift
    cd "$1"
    shift
    "$@" &
    echo $! >"$job/pid"
    # A forwarded signal interrupts `wait`, so wait again for the status.
    trap "kill -TERM $!" TERM
    wait $! && status=0 || status=$?
    while kill -0 $! 2>/dev/null; do
      wait $! && status=0 || status=$?
    done
    echo $status >"$job/status.part"
    mv "$job/status.part" "$job/status"
  ' encdec_adapt "$PWD/$JOB" "$SOURCE" "${train[@]}" \
    </dev/null >>"$JOB/log" 2>&1 &
  while [ ! -s "$JOB/pid" ]; do
    sleep 0.1
  done
}

# Prints the log from a line on, until the job ends.
follow() {
  local line shown=$(($1 - 1)) more=()
  if running; then
    more=(--pid="$(cat "$JOB/pid")" -f)
  fi
  while IFS= read -r line; do
    printf '%s\n' "$line"
    shown=$((shown + 1))
    printf '%s\n' "$shown" >"$JOB/shown"
  done < <(tail -n "+$1" "${more[@]}" "$JOB/log")
}

stop() {
  send TERM 'sent SIGTERM: the job saves and exits with status 75'
}

profile() {
  send USR1 'sent SIGUSR1: the job traces its next steps into its work directory'
}

# Sends the job a signal and prints a message.
send() {
  if [ "$dry_run" = 1 ]; then
    show kill "-$1" PROCESS
  elif running; then
    kill "-$1" "$(cat "$JOB/pid")"
    echo "launch: $2"
  else
    echo 'launch: no job runs here'
  fi
}

case "${1:-}" in
  setup | run | stop | profile)
    "$@" 2>&1 | sed -u "s/^/[$(position)] /"
    ;;
  *)
    echo 'worker.sh: the first argument must be setup, run, stop or profile' >&2
    exit 2
    ;;
esac
