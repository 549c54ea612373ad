#!/bin/bash
# Maps side by side on a Dask cluster, by Slurm: sbatch --nodes=4 --ntasks-per-node=1 docs/scale/dask.sh
# Each worker lays out a map at a time; the bytes are those of one machine.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it by sbatch}"
export PATH="$PWD/.venv/bin:$PATH"
DASK_SCHEDULER_ADDRESS="tcp://$(hostname):${PORT:-8786}"
export DASK_SCHEDULER_ADDRESS
dask scheduler --port "${PORT:-8786}" --no-dashboard &
scheduler=$!
# The workers compute as the pipeline does, whatever their processors are.
srun env $(python -m attnmix.core.arithmetic) dask worker "$DASK_SCHEDULER_ADDRESS" --nthreads 1 --nworkers "${SLURM_CPUS_ON_NODE:-1}" --no-dashboard &
workers=$!
trap 'kill "$workers" "$scheduler" 2>/dev/null || true' EXIT
dvc repro reduce
