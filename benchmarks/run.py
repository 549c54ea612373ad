"""Time and memory of the default run, stage by stage, and of the parts of a forward pass, in both arithmetics.

    python -m benchmarks.run                # three runs of each, a quarter of an hour
    IMDB_FOLDER=../imdb python -m benchmarks.run --repeats 1

The stages of the last commit run in a clone, one after another, each time from nothing. The forward passes are of 110
reviews of IMDb where IMDB_FOLDER names a copy, else of the sample. Replaces two sections of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from attnmix.arithmetic import settings
from attnmix.arithmetic.settings import FASTEST, PORTABLE
from benchmarks.stages import RUN_TITLES, TITLE, keep, real_reviews
from benchmarks.timing import REPOSITORY, Timing, machine
from stages.common.cli import STAGES

FASTEST_AVX2 = "fastest, AVX2 only"
"""Torch's own kernels without AVX-512, to set the portable ones against the same instructions."""
ENVIRONMENTS: dict[str, dict[str, str]] = {
    PORTABLE: settings.SETTINGS,
    FASTEST: {},
    FASTEST_AVX2: {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
TEXTS, TOKENS, BATCH_TOKENS = 110, 512, 4096
ATTENTION = (16, 12, 512, 32)  # texts, heads, tokens, head width
Runs = dict[str, dict[str, list[Timing]]]
"""Runs by what is timed and by arithmetic."""
LINEAR = (8192, 384, 1536)  # rows, from width, to width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--forward", metavar="ARITHMETIC", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.forward:
        print(json.dumps(forward(arguments.forward)))
        return
    made_by = (
        f"`python -m benchmarks.run --repeats {arguments.repeats}`. The first run counts too; memory without workers; "
        f"threads as in a plain run, not as named here.\n{machine(os.cpu_count() or 1)}"
    )
    stages: Runs = defaultdict(lambda: defaultdict(list))
    parts: Runs = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "clone"
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
        for arithmetic in (PORTABLE, FASTEST) * arguments.repeats:
            file = clone / "params.yaml"
            text = file.read_text(encoding="utf-8")
            file.write_text(re.sub(r"(?m)^arithmetic: \w+", f"arithmetic: {arithmetic}", text), encoding="utf-8")
            subprocess.run(["git", "clean", "-qfdx"], cwd=clone, check=True)
            runs = {stage: run_stage(stage, clone) for stage in STAGES}
            for stage, run in runs.items():
                stages[stage][arithmetic].append(run)
            stages["all stages"][arithmetic].append(Timing(sum(run.seconds for run in runs.values()), None))
    write_section(RUN_TITLES[0], made_by, stages)
    for arithmetic in tuple(ENVIRONMENTS) * arguments.repeats:
        command = [sys.executable, "-m", "benchmarks.run", "--forward", arithmetic]
        environment = os.environ | ENVIRONMENTS[arithmetic]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for part, seconds in json.loads(printed.splitlines()[-1]).items():
            parts[part][arithmetic].append(Timing(seconds, None))
    write_section(RUN_TITLES[1], made_by, parts)


def write_section(title: str, made_by: str, runs: Runs) -> None:
    """Print a section, and put it into RESULTS.md."""
    section = f"{TITLE}{title}\n\n{made_by}\n\n{markdown_table(runs)}\n"
    print(section, flush=True)
    keep(section)


def markdown_table(runs: Runs) -> str:
    """Return minimum, median and maximum in each arithmetic, the ratios of medians, and peak memory."""
    names = list(next(iter(runs.values())))
    ratios = [f"{PORTABLE} / {other}" for other in names[1:]]
    lines = [["", *(f"{name}, s" for name in names), *ratios, "peak memory"], ["---"] + ["---:"] * (2 * len(names))]
    for part, timings in runs.items():
        seconds = {name: [run.seconds for run in each] for name, each in timings.items()}
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        spread = [f"{min(each):.3g} / {medians[name]:.3g} / {max(each):.3g}" for name, each in seconds.items()]
        compared = [f"{medians[PORTABLE] / medians[other]:.2f}" for other in names[1:]]
        peaks = [run.peak_mb for run in timings[PORTABLE] if run.peak_mb]
        lines.append([part, *spread, *compared, f"{statistics.median(peaks):,.0f} MB" if peaks else ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_stage(stage: str, folder: Path) -> Timing:
    """Return the wall time of a stage, imports included, and the most memory of its process without workers."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "stages", stage], cwd=folder, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"{stage} failed")
    return Timing(seconds, usage.ru_maxrss / 1024)


def forward(arithmetic: str) -> dict[str, float]:
    """Return the seconds of forward passes of real reviews, of attention and of a Linear: the least of several."""
    import pandas as pd
    import torch

    from attnmix.arithmetic.kernels import use
    from attnmix.models.checkpoint import load_tokenizer
    from attnmix.models.encoding import batches_by_tokens, padded
    from attnmix.models.loading import load_base
    from attnmix.store.runs import Run
    from attnmix.store.texts import split_file

    use(PORTABLE if arithmetic == PORTABLE else FASTEST)
    run = Run(REPOSITORY)
    tokenizer, base = load_tokenizer(run.finetuned), load_base(run.finetuned)
    base.set_attn_implementation("sdpa")
    texts = real_reviews(TEXTS) or pd.read_parquet(split_file("train", run.reviews))["text"].tolist()[:TEXTS]
    ids = [tokenizer(text, truncation=True, max_length=TOKENS)["input_ids"] for text in texts]
    numbers = batches_by_tokens([len(each) for each in ids], BATCH_TOKENS)
    batches = [padded([ids[i] for i in batch], tokenizer.pad_token_id, base.device) for batch in numbers]
    heads = [torch.randn(ATTENTION) for _ in range(3)]
    rows, linear = torch.randn(LINEAR[:2]), torch.nn.Linear(*LINEAR[1:])

    def least(function: Callable[[], object], times: int) -> float:
        function()
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    with torch.inference_mode():
        return {
            f"forward passes of {sum(map(len, ids))} tokens": least(lambda: [base(**each) for each in batches], 2),
            "attention, 16 x 12 x 512 x 32": least(lambda: torch.nn.functional.scaled_dot_product_attention(*heads), 7),
            "Linear 384 to 1536, 8,192 rows": least(lambda: linear(rows), 9),
        }


if __name__ == "__main__":
    main()
