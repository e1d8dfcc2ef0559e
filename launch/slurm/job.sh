#!/usr/bin/env bash
# The batch job of launch/slurm: runs a training job with one process per
# task, and goes back in line after a preemption. In the repository's root:
#
#   sbatch [flags] launch/slurm/job.sh PYTHON RETRIES NOTICE FOLDER \
#     [flags of train]
#
# The coordinator is the first machine of the allocation; its port follows
# from the job's number, so that two jobs on a machine do not meet.

set -uo pipefail

python=$1 retries=$2 notice=$3 folder=$4
shift 4
failures=$folder/failures.$SLURM_JOB_ID

# Of a GPU's memory; JAX would take 0.75, and plans count on 0.9. Who sets it,
# by either of its names (JAX refuses both at once), is left alone.
if [ -z "${XLA_CLIENT_MEM_FRACTION:-}" ]; then
  export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}
fi

# Whether the job is told to stop is its own business, and its status says so.
trap : TERM

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
printf 'launch: job %s, start %s, %s processes, coordinator %s:%s\n' \
  "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$SLURM_NTASKS" "$host" "$port"

# A task that ends leaves the others as long as the notice to save.
# shellcheck disable=SC2016 # Expanded by each task.
srun --label --unbuffered --wait="$notice" --kill-on-bad-exit=0 bash -c '
  exec "$@" --processes="$SLURM_NTASKS" --process="$SLURM_PROCID"
' task "$python" -m encdec_adapt.train --coordinator="$host:$port" "$@" &
step=$!
# A signal to this shell ends a wait, not the step.
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  status=$?
done
printf 'launch: ended with status %s\n' "$status"

case "$status" in
  0 | 2)
    rm -f "$failures"
    exit "$status"
    ;;
  75) rm -f "$failures" ;;
  *)
    # One after more than an hour begins a new count.
    [ "$SECONDS" -lt 3600 ] || rm -f "$failures"
    printf 'x' >>"$failures"
    count=$(wc -c <"$failures")
    if [ "$count" -gt "$retries" ]; then
      printf 'launch: failed %s times in a row; not started again\n' "$count"
      exit "$status"
    fi
    ;;
esac
# One that SLURM takes down is cancelled, and would come back, or preempted,
# and SLURM itself puts it back in line.
if ! scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
  printf 'launch: SLURM has ended the job\n'
  exit "$status"
fi
printf 'launch: back in line; it continues from its work directory\n'
scontrol requeue "$SLURM_JOB_ID" || exit "$status"
# It takes a moment for the order to arrive.
sleep 60
exit "$status"
