"""A profile of the default run: the share of each operation in the time of each stage.

    python -m benchmarks.operations    # replaces the section in benchmarks/RESULTS.md

Every stage runs once, in pipeline order, in one thread under Python's profiler. The time of an operation is the time
spent in its functions, excluding calls of other functions. Other threads, which fit UMAP in `reduce`, appear as waiting
time of the main thread. As the profiler slows short calls, the shares show the bottlenecks, but not the duration of a
stage.
"""

from __future__ import annotations

import argparse
import pstats
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnmix.core.arithmetic.environment import PORTABLE
from benchmarks.stages import REPOSITORY, TITLE, fresh_process, machine, replace_section, write_parameters
from stages.common.cli import STAGES

OPERATIONS = {
    "imports": r":<module>$|importlib|import_utils|marshal|_imp\.|builtins\.(?:exec|compile|__build_class__)",
    "attention": r"arithmetic/kernels\.py:(?:compute|softmax|_attend|_differentiate_attention)",
    "products": r"arithmetic/kernels\.py:<lambda>|linear|matmul|\b(?:mm|bmm|addmm|baddbmm)\b",
    "eigenvalues": r"numpy/linalg|linalg_(?:eig|qr|svd)|scipy/linalg",
    "other operations on tensors": r"torch|Tensor|attnmix/measures|arithmetic/kernels\.py",
    "maps": r"umap|pynndescent|numba|sklearn",
    "drawing": r"matplotlib|PIL|fontTools|kiwisolver",
    "other threads": r"_thread\.lock|select\.|posix\.waitpid",
    "tables, files": r"pandas|pyarrow|zarr|numcodecs|zlib|json|safetensors|_io\.|posix|hashlib|datasets|sqlite",
}
"""Patterns of operations by name. A function belongs to the first operation whose pattern occurs in `file:function`."""
OTHER = "other"


def operation(file: str, function: str) -> str:
    """Return the operation of a function; `OTHER` if no pattern matches."""
    for name, pattern in OPERATIONS.items():
        if re.search(pattern, f"{file}:{function}"):
            return name
    return OTHER


def profiled(stage: str, folder: Path) -> Counter[str]:
    """Run a stage in `folder` under Python's profiler, and return the time of each operation in seconds."""
    file = folder / f"{stage}.profile"
    fresh_process(["-m", "cProfile", "-o", str(file), "-m", "stages", stage], folder, threads=1)
    statistics: Any = pstats.Stats(str(file))  # typeshed lacks the attribute `stats`
    seconds: Counter[str] = Counter()
    for (path, _line, function), (_calls, _all_calls, own_seconds, *_) in statistics.stats.items():
        seconds[operation(path, function)] += own_seconds
    return seconds


def table(seconds: dict[str, Counter[str]]) -> str:
    """Return a Markdown table with the duration of each stage in seconds, and each operation's share of the duration.

    `seconds` contains the duration of each operation, by stage. The last row is for all stages together.
    """
    names = [*OPERATIONS, OTHER]
    lines = [["stage", "seconds", *names], ["---"] + ["---:"] * (1 + len(names))]
    whole: Counter[str] = Counter()
    for stage, by_operation in seconds.items():
        lines.append(_row(stage, by_operation, names))
        whole.update(by_operation)
    lines.append(_row("all", whole, names))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(stage: str, by_operation: Counter[str], names: Sequence[str]) -> list[str]:
    """Return the cells of a row: the name of the stage, its duration in seconds, and each operation's share of it.

    `by_operation` contains the duration of each operation; `names` determines the operations and their order.
    """
    total = by_operation.total()
    shares = [f"{by_operation[name] / total:.0%}" for name in names]
    return [stage, f"{total:.1f}", *shares]


def main() -> None:
    """Replace the profile in benchmarks/RESULTS.md."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        seconds = {stage: profiled(stage, folder) for stage in tqdm(STAGES, disable=None)}
    made_by = "`python -m benchmarks.operations`, with `arithmetic: portable`"
    replace_section(f"{TITLE}Where the time goes\n\n{made_by}.\n{machine(threads=1)}\n\n{table(seconds)}\n")


def prepare(folder: Path) -> None:
    """Write the parameters and the dataset of the default run."""
    write_parameters(folder, PORTABLE)
    shutil.copytree(REPOSITORY / "data" / "sample", folder / "data" / "sample")


if __name__ == "__main__":
    main()
