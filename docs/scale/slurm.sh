#!/bin/bash
# Submit in a clone that all nodes see: sbatch docs/scale/slurm.sh
#SBATCH --job-name=mixing
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# A job that is preempted or out of time is submitted again by Slurm, or by you; it goes on where it stopped.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it by sbatch}"
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-0}"

stale() { [[ $(dvc repro --dry --single-item "$1") == *"Running stage"* ]]; }

dvc repro download
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
for stage in finetune capture inspect measure; do
  [[ "$stage" != capture ]] || dvc repro tokenize
  if stale "$stage"; then
    srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
      --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29400}" --module stages "$stage"
    dvc commit --force "$stage"
  fi
done
dvc repro # the stages that one process runs
