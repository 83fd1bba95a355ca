#!/bin/bash
# A training under Slurm, to be copied and changed. What follows job.sh goes to `photinus run` on each host:
#
#   sbatch job.sh train.py --epochs 90
#   sbatch --nodes=4 --time=8:00:00 --partition=gpu job.sh --max-restarts 5 train.py   # these options win over those below
#
#SBATCH --nodes=2
#SBATCH --exclusive
##SBATCH --gpus-per-node=4   (with GPUs: remove one #)
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60

set -u

# A secret of this run: only launchers that know it may join.
PHOTINUS_JOB_SECRET=$(od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n')
export PHOTINUS_JOB_SECRET

# Before a preemption or the end of the time limit, Slurm sends USR1 to this shell. The launchers (step 0) get SIGTERM, so
# the workers save first. Then the job is queued again, and continues from its newest checkpoint. (srun itself would kill
# them immediately.)
asked_to_leave=""
step=""
trap 'asked_to_leave=yes; if [ -n "$step" ]; then scancel --signal=TERM "$SLURM_JOB_ID.0"; fi' USR1

# One launcher on each host; it starts the workers there.
srun --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} photinus run "$@" &
step=$!

code=0
wait "$step" || code=$?
while kill -0 "$step" 2> /dev/null; do # the signal ended the wait, and not the step
  code=0
  wait "$step" || code=$?
done

if [ -n "$asked_to_leave" ] && [ "$code" -ne 0 ]; then
  echo "job.sh: asked to leave (exit code $code): job $SLURM_JOB_ID is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
