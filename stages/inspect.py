"""Measure the captured texts in detail: ratios of every token, contribution matrices, attention heads, token scores.

    python -m stages inspect
    torchrun --nproc-per-node 4 -m stages inspect

Writes `features/inspect/`; `docs/measures.md` defines the quantities.
"""

from pathlib import Path

from attnmix.core.arithmetic.kernels import set_arithmetic
from attnmix.core.device import chosen_device
from attnmix.core.store.runs import Run
from attnmix.runs.inspection import inspect
from stages.common.parameters import Parameters
from stages.common.resume import unfinished_folder


def main(parameters: Parameters) -> None:
    """Measure the captured texts with each checkpoint on the device of this process."""
    set_arithmetic(parameters.arithmetic)
    run = Run(Path())
    inspect(
        parameters.measure,
        parameters.checkpoints,
        run,
        unfinished_folder("inspect", parameters, run.root),
        seed=parameters.seed,
        batch_tokens=parameters.capture.batch_tokens,
        device=chosen_device(),
    )
