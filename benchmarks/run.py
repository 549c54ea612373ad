"""Time and memory of what a user runs, in both arithmetics: the default run, a forward pass, capture and ratios.

    python -m benchmarks.run                # three runs of each, half an hour
    IMDB_FOLDER=../imdb python -m benchmarks.run --repeats 1 --sections capture

The stages of the last commit run in a clone, one after another, each time from nothing, and then DVC runs what a new
metric of the maps changes. Forward passes are of 110 reviews, capture and ratios of 200: of IMDb where IMDB_FOLDER
names a copy, else of the sample. Replaces sections of benchmarks/RESULTS.md.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnmix.arithmetic import settings
from attnmix.arithmetic.settings import FASTEST, PORTABLE
from benchmarks.capturing import FORWARD, HOOKS, STAGE
from benchmarks.cases import CASES
from benchmarks.mixing import IN_TURN, SDPA
from benchmarks.stages import RUN_TITLES, TITLE, Size, keep, lay_out, real_reviews
from benchmarks.timing import REPOSITORY, Timing, machine, timed
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
BESIDE_PLAIN = (
    (PORTABLE, PORTABLE),
    (FASTEST, FASTEST),
    (PORTABLE, FASTEST),
)  # arithmetics of a way and of the bare passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--forward", metavar="ARITHMETIC", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.forward:
        print(json.dumps(forward(arguments.forward)))
        return
    command = " ".join(["python -m benchmarks.run", *sys.argv[1:]])
    for title, name in zip(RUN_TITLES, SECTIONS, strict=True):
        if name in arguments.sections:
            made_by = f"`{command}`. The first run counts too; memory without workers.\n{machine(os.cpu_count() or 1)}"
            section = f"{TITLE}{title}\n\n{made_by}\n\n{SECTIONS[name](arguments.repeats)}\n"
            print(section, flush=True)
            keep(section)


def default_run(repeats: int) -> str:
    """Return the table of the stages, and of a run with another metric by DVC, in which no other stage runs."""
    runs: Runs = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "clone"
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
        for arithmetic in (PORTABLE, FASTEST) * repeats:
            subprocess.run(["git", "restore", "."], cwd=clone, check=True)
            subprocess.run(["git", "clean", "-qfdx"], cwd=clone, check=True)
            file = clone / "params.yaml"
            text = file.read_text(encoding="utf-8")
            file.write_text(re.sub(r"(?m)^arithmetic: \w+", f"arithmetic: {arithmetic}", text), encoding="utf-8")
            for stage in STAGES:
                runs[stage][arithmetic].append(timed_process(["-m", "stages", stage], clone))
            seconds = sum(runs[stage][arithmetic][-1].seconds for stage in STAGES)
            runs["all stages"][arithmetic].append(Timing(seconds, None))
            timed_process(["-m", "dvc", "commit", "--quiet", "--force"], clone)
            metric = timed_process(["-m", "dvc", "exp", "run", "--set-param", "umap.metric=cosine"], clone)
            runs["`dvc exp run -S umap.metric=cosine`"][arithmetic].append(Timing(metric.seconds, None))
    return markdown_table(runs)


def forward_pass(repeats: int) -> str:
    """Return the table of a forward pass and of its parts."""
    runs: Runs = defaultdict(lambda: defaultdict(list))
    for arithmetic in tuple(ENVIRONMENTS) * repeats:
        command = [sys.executable, "-m", "benchmarks.run", "--forward", arithmetic]
        environment = os.environ | ENVIRONMENTS[arithmetic]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for part, seconds in json.loads(printed.splitlines()[-1]).items():
            runs[part][arithmetic].append(Timing(seconds, None))
    return markdown_table(runs)


def capture_and_ratios(repeats: int) -> str:
    """Return the table of the stage `capture` and of the measures, beside bare forward passes of the same texts."""
    runs: Runs = defaultdict(lambda: defaultdict(list))
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        roots = {arithmetic: Path(name, arithmetic) for arithmetic in (PORTABLE, FASTEST)}
        for arithmetic, root in roots.items():
            lay_out(root, {"default", "full"}, Size(), threads, arithmetic)
        for arithmetic in tuple(roots) * repeats:
            root, compiled = roots[arithmetic], Path(name, "compiled")
            ways = {"capture": [way for way, _ in (FORWARD, STAGE, HOOKS)], "measure": [IN_TURN]}
            for case, way in ((case, way) for case, each in ways.items() for way in each):
                folder = root / CASES[case].folder
                for row, run in timed(
                    case, way, folder, threads, compiled, environment=ENVIRONMENTS[arithmetic]
                ).items():
                    runs[f"{case}: {row}"][arithmetic].append(run)
    bare = {"capture": f"capture: {FORWARD[0]}", "measure": f"measure: {SDPA}"}
    return markdown_table(runs, {row: bare[row.partition(":")[0]] for row in runs})


def markdown_table(runs: Runs, plain: Mapping[str, str] | None = None) -> str:
    """Return minimum, median and maximum in each arithmetic, the ratios of medians, and peak memory.

    `plain` names for each row that of bare forward passes, which it is compared with in the same arithmetic and in
    torch's own.
    """
    names = list(next(iter(runs.values())))
    medians = {
        part: {name: statistics.median(run.seconds for run in each) for name, each in timings.items()}
        for part, timings in runs.items()
    }
    head = ["", *(f"{name}, s" for name in names), *(f"{PORTABLE} / {other}" for other in names[1:])]
    head += [f"{name} / bare passes, {of}" for name, of in BESIDE_PLAIN] if plain else []
    lines = [[*head, "peak memory"], ["---"] + ["---:"] * len(head)]
    for part, timings in runs.items():
        seconds = {name: [run.seconds for run in each] for name, each in timings.items()}
        line = [f"{min(each):.3g} / {medians[part][name]:.3g} / {max(each):.3g}" for name, each in seconds.items()]
        line += [f"{medians[part][PORTABLE] / medians[part][other]:.2f}" for other in names[1:]]
        line += [f"{medians[part][name] / medians[plain[part]][of]:.2f}" for name, of in BESIDE_PLAIN] if plain else []
        peaks = [run.peak_mb for run in timings[PORTABLE] if run.peak_mb]
        lines.append([part, *line, f"{statistics.median(peaks):,.0f} MB" if peaks else ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def timed_process(arguments: Sequence[str], folder: Path) -> Timing:
    """Return the wall time of `python <arguments>`, imports included, and the most memory without its workers'."""
    start = time.perf_counter()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    output: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=os.environ | {"PATH": path}, **output)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"{' '.join(arguments)} failed")
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


SECTIONS: dict[str, Callable[[int], str]] = {
    "stages": default_run,
    "forward": forward_pass,
    "capture": capture_and_ratios,
}
"""Functions that return the tables of `RUN_TITLES`, each from the number of runs."""

if __name__ == "__main__":
    main()
