"""Time and memory of the stages compared with the strongest plain way to the same result.

    python -m benchmarks.stages                                   # everything, which takes an hour
    python -m benchmarks.stages --cases joint pages --repeats 3   # some cases
    python -m benchmarks.stages --cases mixing --arithmetic portable   # both sides in the pipeline's default arithmetic
    python -m benchmarks.stages --small --repeats 1               # does it all run? Writes nothing

Each case's section in benchmarks/RESULTS.md is replaced and says which command and machine made it.

Every run is a fresh process, imports included, all with the same number of threads, the ways of a case in turn. Before
a case is timed, each of its ways runs once and what they made is compared. Inputs are texts of the sample, captured
with the fine-tuned default model, and with a randomly initialised model of BERT-base's shape; maps are of one text of
256 tokens in the latter. Needs what `make repro` makes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from ruamel.yaml import YAML

from attnmix.arithmetic.settings import FASTEST, PORTABLE, SETTINGS
from attnmix.core.names import Site
from attnmix.store.features import stored_sites
from attnmix.store.runs import Run, open_run
from attnmix.store.texts import split_file
from benchmarks import corpora
from benchmarks.cases import CASES, MAP
from benchmarks.timing import COLD, REPOSITORY, Timing, fresh_process, machine, table, timed
from stages.common.parameters import Parameters

PAGE_TITLE = "The page in a browser"  # by benchmarks.page
RUN_TITLES = (  # by benchmarks.run
    "The default run by stage",
    "A forward pass in both arithmetics",
    "Capture and ratios in both arithmetics",
)
RESULTS = REPOSITORY / "benchmarks" / "RESULTS.md"


class Size(NamedTuple):
    """Texts of the default model, texts of BERT-base's shape, tokens of a text at most, layers of that shape."""

    texts: int = 200
    bert_texts: int = 60
    tokens: int = 256
    layers: int = 12


SMALL = Size(texts=8, bert_texts=2, tokens=64, layers=2)
HEAD = """# Stages compared with the plain way

Where a section does not say otherwise, every run is a fresh process, imports included, after one that is not timed; the
ways of a case in turn. Ratios are of medians; peak memory is the median over the runs, workers included. With *nothing
compiled* numba finds an empty folder, as after an installation. Each section names the command and the machine that
made it.
"""
TITLE = "## "
IN_PORTABLE = ", portable arithmetic"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    usual = [name for name in CASES if name != "peers"]  # whose libraries are in no lock
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=usual, metavar="CASE")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every library, on both sides")
    parser.add_argument("--arithmetic", choices=(FASTEST, PORTABLE), default=FASTEST, help="on both sides")
    parser.add_argument("--small", action="store_true", help="few and short texts: does it all run?")
    arguments = parser.parse_args()
    command = " ".join(["python -m benchmarks.stages", *sys.argv[1:]])
    if arguments.arithmetic == PORTABLE:
        os.environ.update(SETTINGS)  # of the processes that are timed
    with tempfile.TemporaryDirectory() as name:
        folders = {CASES[case].folder for case in arguments.cases}
        size = SMALL if arguments.small else Size()
        lay_out(Path(name), folders, size, arguments.threads, arguments.arithmetic)
        for case in arguments.cases:
            made_by = f"`{command}`: {arguments.repeats} runs of each.\n{machine(arguments.threads)}"
            made = section(case, made_by, Path(name), arguments.repeats, arguments.threads)
            if arguments.arithmetic == PORTABLE:
                made = made.replace("\n", f"{IN_PORTABLE}\n", 1)
            print(made, flush=True)
            if not arguments.small:
                keep(made)


def keep(made: str) -> None:
    """In RESULTS: in the place of the section with its title, or where the order of the cases puts it."""
    _, *before = RESULTS.read_text(encoding="utf-8").split(f"\n{TITLE}")
    sections = {each.partition("\n")[0]: each.strip() for each in (*before, made.removeprefix(TITLE))}
    titles = [case.title + ending for case in CASES.values() for ending in ("", IN_PORTABLE)]
    ordered = [sections[title] for title in (*RUN_TITLES, *titles, PAGE_TITLE) if title in sections]
    RESULTS.write_text("\n".join([HEAD, *(f"{TITLE}{each}\n" for each in ordered)]), encoding="utf-8")


def section(name: str, made_by: str, root: Path, repeats: int, threads: int) -> str:
    """A case's heading, what made it, what was compared, and its table."""
    case = CASES[name]
    folder, compiled = root / case.folder, root / "compiled"
    for way in list(case.ways)[: 1 if case.growing else None]:
        timed(name, way, folder, threads, compiled)
    checked = "" if case.growing else check(name, folder, threads, compiled)
    found: dict[str, dict[str, list[Timing]]] = {}
    for state in case.states:
        runs = found[state] = defaultdict(list)
        for _ in range(repeats):
            for way in case.ways:
                for each, run in timed(name, way, folder, threads, compiled, cold=state == COLD).items():
                    runs[each].append(run)
    checked = checked or check(name, folder, threads, compiled)
    return f"{TITLE}{case.title}\n\n{made_by}\n\n{checked}\n\n{table(found, case.references)}\n"


def check(name: str, folder: Path, threads: int, compiled: Path) -> str:
    """Return what a case reports of the files that its ways left."""
    _, said = fresh_process(["-m", "benchmarks.cases", name, "check"], folder, threads, compiled)
    return said


def lay_out(root: Path, folders: set[str], size: Size, threads: int, arithmetic: str) -> None:
    """Those of the folders where the cases run: `default`, `full`, `bert`, `corpora`, `maps` with captured vectors."""
    finetuned, model = Run(REPOSITORY).finetuned, root / "bert-shaped"
    reviews = pd.read_parquet(split_file("train", Run(REPOSITORY).reviews))["text"].tolist()

    def joined(first: int, count: int) -> str:
        return " ".join((reviews[first:] + reviews)[:count])

    # Of one to four reviews, so that lengths differ; or all of them as long as allowed.
    texts = [joined(i, 1 + i % 4) for i in range(max(size.texts, size.bert_texts))]
    full = [joined(i, size.tokens // 10) for i in range(size.texts)]
    inputs = {
        "default": (finetuned, real_reviews(size.texts) or texts[: size.texts]),
        "full": (finetuned, full),
        "bert": (model, real_reviews(size.bert_texts) or texts[: size.bert_texts]),
        "maps": (model, [joined(0, 30)]),
    }
    if folders & {"bert", "maps"}:
        _bert_shaped(model, num_hidden_layers=size.layers)
    for name in folders - {"corpora", "reviews"}:
        longest = 2 * size.tokens if name in ("default", "bert") else size.tokens
        _folder(root / name, *inputs[name], longest, arithmetic)
    if "corpora" in folders:
        _corpora(root / "corpora", reviews, arithmetic)
    if "reviews" in folders:
        most = max(corpora.DOCUMENTS)
        _bert_shaped(Run(root / "reviews").finetuned, **corpora.WIDE)
        texts = 2 * (real_reviews(most) or reviews)
        starts = (i % (len(texts) // 2) for i in range(most))
        _write_reviews(root / "reviews", [" ".join(texts[i : i + 8])[: 9 * corpora.LONG] for i in starts])
        write_parameters(root / "reviews", arithmetic, **corpora.CAPTURED)
    if "maps" in folders:
        maps = root / "maps"
        for stage in ("tokenize", "capture"):
            fresh_process(["-m", "stages", stage], maps, threads, root / "compiled")
        tokens = open_run(maps).tokens
        _write_map(maps, stored_sites(Run(maps).activations), tokens)


def real_reviews(number: int) -> list[str]:
    """Return reviews of IMDb's test split if IMDB_FOLDER names a copy in the hub's layout, else none."""
    if not (named := os.environ.get("IMDB_FOLDER")):
        return []
    (file,) = Path(named).rglob("test-*.parquet")
    return list(pd.read_parquet(file)["text"].sample(number, random_state=0))


def _folder(folder: Path, model: Path, texts: list[str], tokens: int, arithmetic: str) -> Path:
    """A folder as the stages expect it."""
    Run(folder).finetuned.parent.mkdir(parents=True)
    Run(folder).finetuned.symlink_to(model)
    Run(folder).reviews.parent.symlink_to(Run(REPOSITORY).reviews.parent)
    predictions = Run(folder).test_predictions_file.parent  # which tokenize reads
    predictions.parent.mkdir()
    predictions.symlink_to(Run(REPOSITORY).test_predictions_file.parent)
    write_parameters(folder, arithmetic, capture={"documents": [], "texts": texts, "max_length": tokens})
    return folder


def _corpora(folder: Path, reviews: list[str], arithmetic: str) -> None:
    """A tiny model as both checkpoints, and as many test reviews as the largest corpus has."""
    for checkpoint in Run(folder).checkpoints.values():
        _bert_shaped(checkpoint, **corpora.MODEL)
    _write_reviews(folder, [f"{reviews[i % len(reviews)]} {i}" for i in range(max(corpora.DOCUMENTS))])
    write_parameters(folder, arithmetic, **corpora.PARAMETERS)


def _write_reviews(folder: Path, texts: list[str]) -> None:
    Run(folder).reviews.mkdir(parents=True)
    table = pd.DataFrame({"text": texts, "label": np.arange(len(texts)) % 2})
    table.to_parquet(split_file("test", Run(folder).reviews), index=False)


def _bert_shaped(folder: Path, **shape: int) -> Path:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**shape)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Run(REPOSITORY).finetuned / name, folder)
    return folder


def write_parameters(folder: Path, arithmetic: str = FASTEST, **changed: dict[str, Any]) -> None:
    """`params.yaml` with the pipeline's defaults, but for the arithmetic and what is `changed` in its sections."""
    values = Parameters().model_dump() | {"arithmetic": arithmetic}
    for section_name, section_values in changed.items():
        values[section_name] |= section_values
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(values, file)


def _write_map(folder: Path, sites: list[Site], tokens: pd.DataFrame) -> None:
    """A map to draw: random places, as pages cost the same for any."""
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(len(sites) * len(tokens), 2)), columns=["x", "y"])
    table["layer"] = np.repeat([site.layer for site in sites], len(tokens))
    table["point"] = np.repeat([site.point for site in sites], len(tokens))
    table.to_parquet(folder / MAP)


if __name__ == "__main__":
    main()
