#!/usr/bin/env bash
# The batch job of launch/slurm: runs a training job with one process per
# task, and is requeued after a preemption. In the root of the repository:
#
#   sbatch [flags] launch/slurm/job.sh PYTHON RETRIES NOTICE FOLDER \
#     [flags of srun] -- [flags of train]
#
# The coordinator is the first machine of the allocation; its port depends on
# the job's number, so that two jobs on a machine do not collide.

set -uo pipefail

python=$1 retries=$2 notice=$3 folder=$4
shift 4
step_flags=()
while [ "$1" != -- ]; do
  step_flags+=("$1")
  shift
done
shift
failures=$folder/failures.$SLURM_JOB_ID

# Share of a GPU's memory: plans assume 0.9, JAX's default is 0.75. A value that
# the user has set under either name is kept (JAX refuses both at once).
if [ -z "${XLA_CLIENT_MEM_FRACTION:-}" ]; then
  export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}
fi

# The job handles SIGTERM itself, and reports with its exit status.
trap : TERM

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
printf 'launch: job %s, start %s, %s processes, coordinator %s:%s\n' \
  "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$SLURM_NTASKS" "$host" "$port"

# shellcheck disable=SC2016 # Expanded by each task.
task='exec "$@" --processes="$SLURM_NTASKS" --process="$SLURM_PROCID"'

# After one task has ended, the others have $notice seconds to save.
srun --label --unbuffered --wait="$notice" --kill-on-bad-exit=0 \
  ${step_flags[@]+"${step_flags[@]}"} bash -c "$task" \
  task "$python" -m encdec_adapt.train --coordinator="$host:$port" "$@" &
step=$!
# A signal to this shell interrupts `wait`, not the step.
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  status=$?
done
printf 'launch: ended with status %s\n' "$status"

case "$status" in
  0 | 2 | 3)
    rm -f "$failures"
    exit "$status"
    ;;
  75) rm -f "$failures" ;;
  *)
    # Only failures within an hour of the start are consecutive.
    [ "$SECONDS" -lt 3600 ] || rm -f "$failures"
    printf 'x' >>"$failures"
    count=$(wc -c <"$failures")
    if [ "$count" -gt "$retries" ]; then
      printf 'launch: failed %s times in a row; not requeued\n' "$count"
      exit "$status"
    fi
    ;;
esac
# If SLURM ended the job, it was cancelled and must not be requeued, or it was
# preempted and SLURM requeues it.
if ! scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
  printf 'launch: SLURM has ended the job\n'
  exit "$status"
fi
printf 'launch: requeued; it resumes from its work directory\n'
scontrol requeue "$SLURM_JOB_ID" || exit "$status"
# Waits for the requeue to take effect.
sleep 60
exit "$status"
