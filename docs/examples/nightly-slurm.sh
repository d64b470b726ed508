#!/usr/bin/env bash
# A night on one GPU of a Slurm cluster. A line of cron on a login node begins it, from a checkout that the node sees too:
#   17 1 * * *  cd /srv/seamproof && sbatch --mail-type=FAIL docs/examples/nightly-slurm.sh
# NIGHTS is a directory that stays between nights. A night that is preempted ends with a report of what it ran, and a requeued job
# begins the next one; two never run at once. The job ends with the night's exit code, so that a finding is a failed job.
# The program is where `cargo install --path .` puts it, on a home that the nodes see; --time leaves room for what a night takes
# beyond its budget: stored cases, and the cases in flight.
#SBATCH --job-name=seamproof-nightly
#SBATCH --dependency=singleton
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=16
#SBATCH --time=02:00:00
#SBATCH --requeue
#SBATCH --signal=B:INT@120
set -u
export PATH="$HOME/.cargo/bin:$PATH"
# In the shell's place, so that the signal before the end of time reaches it.
exec seamproof nightly --backend "emulated;cuda" --workers 8 --budget "${BUDGET:-60m}" --out "${NIGHTS:-/srv/nights}"
