#!/bin/bash
# Compute maps in parallel on a Dask cluster in Slurm: sbatch --nodes=4 --ntasks-per-node=1 docs/scale/dask.sh
# Each worker computes one map at a time; results are byte-identical to those of a single machine.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
export PATH="$PWD/.venv/bin:$PATH"
DASK_SCHEDULER_ADDRESS="tcp://$(hostname):${PORT:-8786}"
export DASK_SCHEDULER_ADDRESS
dask scheduler --port "${PORT:-8786}" --no-dashboard &
scheduler=$!
# The environment variables select the portable arithmetic on all processors.
srun env $(python -m attnmix.core.arithmetic) dask worker "$DASK_SCHEDULER_ADDRESS" --nthreads 1 --nworkers "${SLURM_CPUS_ON_NODE:-1}" --no-dashboard &
workers=$!
trap 'kill "$workers" "$scheduler" 2>/dev/null || true' EXIT
dvc repro reduce
