#!/usr/bin/env bash
# One campaign on as many GPUs as the array has tasks, and its result as a whole:
#   job=$(sbatch --parsable --array=0-15 docs/examples/slurm.sh)
#   sbatch --dependency=afterany:$job --gres=gpu:1 --wrap \
#       "seamproof merge $(seq -f 'shard-%g' -s ' ' 0 15) --out whole --junit junit.xml"
# A shard that was cut off goes on where it stopped, whether Slurm puts it back into the queue or somebody submits it again by
# `--array=3 --export=ALL,SHARDS=16`. The merge shrinks what no shard has, for which it needs the GPU.
# The program is where `cargo install --path .` puts it, on a home that the nodes see.
#SBATCH --job-name=seamproof
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
export PATH="$HOME/.cargo/bin:$PATH"
out=shard-$SLURM_ARRAY_TASK_ID
seamproof run --backend "${BACKEND:-cuda}" --workers 8 --seed "${SEED:-1}" --cases "${CASES:-2000000}" --resume \
    --shard "$SLURM_ARRAY_TASK_ID/${SHARDS:-$SLURM_ARRAY_TASK_COUNT}" --out "$out"
code=$?
# A finding is a result, and too few cases of one class in a shard mean nothing: the merge says what the whole comes to.
# A shard that was told to stop ends with the same codes, and is not done.
case $code in 0 | 2 | 3 | 4) grep -q '"interrupted": false' "$out/sums.json" || exit 75 ;; *) exit "$code" ;; esac
