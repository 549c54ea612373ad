"""Measure how much attention mixes the tokens of the sampled test texts.

    python -m stages measure
    torchrun --nproc-per-node 4 -m stages measure

Writes `features/measure/`, `reports/plots/measure/` and `reports/metrics/measure.json`; `docs/measures.md` defines
each number.
"""

from pathlib import Path

from attnmix.core.arithmetic.kernels import set_arithmetic
from attnmix.core.device import chosen_device
from attnmix.core.store.runs import Run
from attnmix.runs.measure import measure
from stages.common.parameters import Parameters
from stages.common.resume import unfinished_folder


def main(parameters: Parameters) -> None:
    """Measure the sampled texts with each checkpoint on the device of this process."""
    set_arithmetic(parameters.arithmetic)
    run = Run(Path())
    folder = unfinished_folder("measure", parameters, run.root)
    measure(
        parameters.measure,
        parameters.checkpoints,
        run,
        folder,
        seed=parameters.seed,
        batch_tokens=parameters.capture.batch_tokens,
        arithmetic=parameters.arithmetic,
        device=chosen_device(),
    )
