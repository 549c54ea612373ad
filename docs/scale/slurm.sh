#!/bin/bash
# Submit this script in a clone on a shared file system: sbatch docs/scale/slurm.sh
#SBATCH --job-name=mixing
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Slurm requeues a preempted job. Submit the script again after a timeout; the run resumes in both cases.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
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
dvc repro # the remaining stages, in one process
