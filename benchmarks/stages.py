"""Compare time and memory of the stages with those of bare forward passes and of programs with the same results.

    python -m benchmarks.stages                                   # all cases; needs more than an hour
    python -m benchmarks.stages --cases capture --repeats 3       # only some cases
    python -m benchmarks.stages --cases measure --arithmetic portable   # in the pipeline's default arithmetic
    python -m benchmarks.stages --small --repeats 1               # a short check of all cases, which writes nothing

A case compares several variants of a computation (`ways`): different programs for the same result, such as a stage and
a short program, or a stage with different numbers of documents. The section of the case in benchmarks/RESULTS.md, which
also describes the command and the machine, is replaced. Every run is a new process with the same number of threads, and
the runs of the variants alternate. Each variant runs once before timing, and then the results are compared. In cases
with different numbers of documents, only the first variant runs before timing; with `--small`, none does. In these two
situations, the results are checked after timing. Texts are IMDb reviews if IMDB_FOLDER is set to a copy of IMDb,
otherwise reviews of the sample; the models are the fine-tuned default model and models with random weights. The outputs
of `make repro` are required. The case `peers` requires nnsight and TransformerLens; these packages are not in the lock
files.

All cases are in one file, so that different programs for a result can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import psutil
from ruamel.yaml import YAML

from attnmix.core.arithmetic.environment import FASTEST, PORTABLE, SETTINGS
from attnmix.core.names import ACTIVATIONS
from attnmix.core.store.features import read_features, stored_sites
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import split_file
from attnmix.measures.ratios import RATIOS
from stages.common.cli import STAGES
from stages.common.parameters import Parameters, read_parameters

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "RESULTS.md"
PACKAGES = ("torch", "transformers", "numpy", "numba", "umap-learn", "scikit-learn", "joblib", "matplotlib", "zarr")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "LOKY_MAX_CPU_COUNT",
)
TITLE, IN_PORTABLE = "## ", ", portable arithmetic"
MEASURED = "measured.json"


# Processes and tables.


class Timing(NamedTuple):
    """The time and the peak memory of one run.

    The peak is None if several variants of the computation were timed in the same process.
    """

    seconds: float
    peak_mb: float | None


Seconds = dict[str, float]
"""Durations of one or several variants of a computation, by name."""


class Case(NamedTuple):
    """A comparison of several variants of a computation."""

    title: str
    folder: str
    """The name of a folder that `lay_out` creates."""
    ways: Mapping[str, Callable[[], Seconds | None]]
    """The variants by name: functions that run in separate processes.

    A function may itself measure and return the durations of one or several variants.
    """
    check: Callable[[], str]
    """A function that returns a description of the results, or raises an error if compared results differ."""
    references: Sequence[str] = ()
    """The variants whose times are the divisors of the ratios in the table; by default the first variant."""
    growing: bool = False
    """True if the variants differ only in the amount of work, which increases from each variant to the next.

    In this case, only the first variant runs before timing, and `check` describes the last one.
    """


def synchronize() -> None:
    """Wait for pending computations of the device."""
    import torch

    from attnmix.core.device import chosen_device

    if chosen_device().type != "cpu":
        torch.accelerator.synchronize()


def fresh_process(arguments: Sequence[str], folder: Path, threads: int) -> tuple[float, str]:
    """Run `python <arguments>` in `folder`, and return the wall time in seconds, including imports, and the output.

    If the command fails, raise `SystemExit` with its error messages.
    """
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"PYTHONPATH": str(REPOSITORY)}
    if (folder / "params.yaml").is_file() and read_parameters(folder / "params.yaml").arithmetic == PORTABLE:
        environment |= SETTINGS  # must be set before Python starts
    command = [sys.executable, "-W", "ignore", *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return seconds, done.stdout.strip()


def run_way(case: str, way: str, folder: Path, threads: int) -> dict[str, Timing]:
    """Run the variant `way` of a benchmark case in a new process, and return a dictionary with the timing.

    The keys are names of variants. If the process itself measures several variants, each of them has an entry.
    """
    seconds, _ = fresh_process(["-m", "benchmarks.stages", "--way", case, way], folder, threads)
    measured = json.loads((folder / MEASURED).read_text(encoding="ascii"))
    if not measured["seconds"]:
        return {way: Timing(seconds, measured["peak_mb"])}
    is_shared_process = len(measured["seconds"]) > 1
    peak = None if is_shared_process else measured["peak_mb"]
    return {name: Timing(each, peak) for name, each in measured["seconds"].items()}


def in_this_process(case: str, way: str) -> None:
    """Run the variant `way` of a benchmark case; write the durations that it returns and the peak memory to `MEASURED`.

    The files are read and written in the current folder. If `way` is "check", print the result of the case's check
    instead.
    """
    if read_parameters().arithmetic == PORTABLE:
        from attnmix.core.arithmetic.kernels import set_arithmetic

        set_arithmetic(PORTABLE)
    if way == "check":
        print(CASES[case].check())
        return
    seconds = CASES[case].ways[way]()
    Path(MEASURED).write_text(json.dumps({"seconds": seconds or {}, "peak_mb": peak_memory()}), encoding="ascii")


def peak_memory() -> float:
    """Return the total peak resident memory of this process and its workers, in MB."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total_kb = 0
    for process in processes:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        _, field, values = status.partition("VmHWM:")
        if field:  # absent for ended processes
            total_kb += int(values.split()[0])
    return total_kb / 1024


def table(timings: Mapping[str, Sequence[Timing]], references: Sequence[str]) -> str:
    """Return a Markdown table with the median time, the peak memory and the time ratios of each variant.

    `timings` contains the runs by variant. A time ratio is the time of the variant divided by that of one of the
    `references`, or of the first variant if `references` is empty.
    """
    medians = {way: statistics.median(run.seconds for run in runs) for way, runs in timings.items()}
    if len(timings) == 1:
        references = []
    elif not references:
        references = list(timings)[:1]
    header = ["way", "s", *(f"ratio to *{name}*" for name in references), "MB"]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for way, runs in timings.items():
        seconds = [run.seconds for run in runs]
        median = f"{medians[way]:.2f}"
        if len(runs) > 1:
            median += f" [{min(seconds):.2f}, {max(seconds):.2f}]"
        ratios = [f"{medians[way] / medians[name]:.2f}" for name in references]
        peaks = [run.peak_mb for run in runs if run.peak_mb is not None]
        peak = f"{statistics.median(peaks):,.0f}" if peaks else ""
        lines.append([way, median, *ratios, peak])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(threads: int) -> str:
    """Return a description of the machine: processor, cores, memory, GPU, load, threads and versions."""
    program = (
        "import torch, joblib, numba; from attnmix.core.device import chosen_device, device_name; "
        "device = chosen_device(); "
        "gpu = 'no GPU' if device.type == 'cpu' else device_name(device); "
        "print(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, joblib.cpu_count(), gpu, sep='; ')"
    )
    load = os.getloadavg()[0]
    torch, numba, joblib, gpu = fresh_process(["-c", program], REPOSITORY, threads)[1].split("; ")
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    return (
        f"{processor()}, {os.cpu_count()} cores, {memory}, {gpu}; initial load average: {load:.1f}."
        f"\n{threads} threads ({', '.join(THREAD_VARIABLES)}): torch says {torch}, numba {numba}, joblib "
        f"{joblib}.\nPython {platform.python_version()}, {packages}."
    )


def processor() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Working folders of the cases.


class Size(NamedTuple):
    """The size of a benchmark.

    `bert_texts` and `layers` are for models with the shape of BERT-base, and `documents` are the sizes of corpora.
    """

    texts: int = 200
    bert_texts: int = 60
    tokens: int = 256
    layers: int = 12
    documents: tuple[int, ...] = (10, 100, 1000, 10_000)


SMALL = Size(texts=4, bert_texts=2, tokens=32, layers=2, documents=(10, 100))
LENGTH, BATCH_TOKENS = 32, 1024  # tokens per text and per batch of the measured corpora; 100 texts are several batches
TINY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
LONG = 330  # tokens per text of the captured corpora; 100 texts fill a shard of the default model
WIDE = {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 1536}


def lay_out(name: str, folder: Path, size: Size, arithmetic: str) -> None:
    """Write the inputs of the stages to `folder`; `name` is the `Case.folder` of the case."""
    if name == "clone":
        _clone_repository(folder, arithmetic)
        return
    reviews = pd.read_parquet(split_file("train", Run(REPOSITORY).reviews))["text"].tolist()
    if name == "measured corpus":
        _lay_out_measured_corpus(folder, reviews, size, arithmetic)
    elif name == "captured corpus":
        _lay_out_captured_corpus(folder, reviews, size, arithmetic)
    else:
        _lay_out_texts(name, folder, reviews, size, arithmetic)


def _clone_repository(folder: Path, arithmetic: str) -> None:
    """Clone the last commit of the repository to `folder`, and set the arithmetic in its parameters."""
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, folder], check=True)
    text = (folder / "params.yaml").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^arithmetic: \w+", f"arithmetic: {arithmetic}", text)
    (folder / "params.yaml").write_text(text, encoding="utf-8")


def _lay_out_measured_corpus(folder: Path, reviews: list[str], size: Size, arithmetic: str) -> None:
    """Write many different texts and a tiny model, for the stage `measure`."""
    run = Run(folder)
    for checkpoint in run.checkpoints.values():
        random_bert(checkpoint, **TINY)
    write_test_split(run, [f"{reviews[i % len(reviews)]} {i}" for i in range(max(size.documents))])
    capture = {"documents": [0], "max_length": LENGTH, "batch_tokens": BATCH_TOKENS}
    write_parameters(folder, arithmetic, capture=capture)


def _lay_out_captured_corpus(folder: Path, reviews: list[str], size: Size, arithmetic: str) -> None:
    """Write a wide model and many long texts for the stage `capture`; each text consists of several joined reviews."""
    run = Run(folder)
    random_bert(run.finetuned, **WIDE)
    reviews = real_reviews(max(size.documents)) or reviews
    texts = []
    for i in range(max(size.documents)):
        text = joined(reviews, i % len(reviews), 8)
        texts.append(text[: 9 * LONG])
    write_test_split(run, texts)
    write_parameters(folder, arithmetic, capture={"max_length": LONG})


def _lay_out_texts(name: str, folder: Path, reviews: list[str], size: Size, arithmetic: str) -> None:
    """Write captured texts and a model.

    The model has random weights and BERT-base's shape if `name` is "bert"; otherwise, it is the default model. All
    texts have the maximum length if `name` is "full"; otherwise, their lengths differ.
    """
    run = Run(folder)
    run.finetuned.parent.mkdir(parents=True)
    run.reviews.parent.symlink_to(Run(REPOSITORY).reviews.parent)
    predictions = run.test_predictions_file.parent  # an input of `tokenize`
    predictions.parent.mkdir()
    predictions.symlink_to(Run(REPOSITORY).test_predictions_file.parent)
    if name == "bert":
        number = size.bert_texts
        random_bert(run.finetuned, num_hidden_layers=size.layers)
    else:
        number = size.texts
        run.finetuned.symlink_to(Run(REPOSITORY).finetuned)
    if name == "full":
        texts = [joined(reviews, i, size.tokens // 10) for i in range(number)]
        longest = size.tokens
    else:
        texts = real_reviews(number) or [joined(reviews, i, 1 + i % 4) for i in range(number)]
        longest = 2 * size.tokens
    write_parameters(folder, arithmetic, capture={"documents": [], "texts": texts, "max_length": longest})


def joined(reviews: list[str], first: int, count: int) -> str:
    """Return `count` reviews from the index `first` on as one text; after the last review, the first one follows."""
    return " ".join((reviews[first:] + reviews)[:count])


def real_reviews(number: int) -> list[str]:
    """Return `number` IMDb test reviews if IMDB_FOLDER is set to a copy in the hub's layout, else an empty list."""
    folder = os.environ.get("IMDB_FOLDER")
    if not folder:
        return []
    (file,) = Path(folder).rglob("test-*.parquet")
    return list(pd.read_parquet(file)["text"].sample(number, random_state=0))


def write_test_split(run: Run, texts: list[str]) -> None:
    """Write `texts` as the test split (as the stage `download` does), and their predictions (as `finetune` does)."""
    run.reviews.mkdir(parents=True)
    labels = np.arange(len(texts)) % 2
    rows = pd.DataFrame({"text": texts, "label": labels, "label_name": labels.astype(str)})
    rows.to_parquet(split_file("test", run.reviews), index=False)
    run.test_predictions_file.parent.mkdir(parents=True)
    predictions = pd.DataFrame({"label": labels, "predicted": labels, "probability": 0.9, "tokens": LENGTH})
    predictions.to_parquet(run.test_predictions_file, index=False)


def random_bert(folder: Path, **shape: int) -> None:
    """Write a BERT classifier with random weights and the tokenizer of the default model."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**shape)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Run(REPOSITORY).finetuned / name, folder)


def write_parameters(folder: Path, arithmetic: str = FASTEST, **changed: dict[str, Any]) -> None:
    """Write `params.yaml` with default values, except for the key `arithmetic` and the sections in `changed`."""
    values = Parameters().model_dump() | {"arithmetic": arithmetic}
    for section_name, section_values in changed.items():
        values[section_name] |= section_values
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(values, file)


# Capture: the stage, forward passes without hooks, and alternatives that write the same vectors.

FINETUNED = Run(Path()).finetuned
PLAIN = Path("plain")
PADDED = 512
ROUNDING = {"rtol": 1e-3, "atol": 1e-4}  # tolerance for float16; results depend slightly on the batch


class Inputs(NamedTuple):
    """The model, and the token IDs of the texts in the order of the pipeline."""

    base: Any
    encoded: list[list[int]]
    pad: int
    batch_tokens: int
    folder: Path

    def batches(self, length: int | None = None) -> Iterator[tuple[list[int], Any]]:
        """Yield the text indices and the model inputs of each batch, optionally padded to `length` tokens."""
        import torch

        from attnmix.models.encoding import batches_by_tokens, padded
        from attnmix.runs.capture import pass_cost_tokens

        lengths = [length or len(text) for text in self.encoded]
        for batch in batches_by_tokens(lengths, self.batch_tokens, pass_cost_tokens(self.base.device)):
            inputs = padded([self.encoded[i] for i in batch], self.pad, self.base.device)
            if length:
                padding_values = {"input_ids": self.pad, "attention_mask": 0}
                missing = length - inputs["input_ids"].shape[1]
                for name, value in padding_values.items():
                    inputs[name] = torch.nn.functional.pad(inputs[name], (0, missing), value=value)
            yield batch, inputs


def timed_capture(way: Callable[[Inputs], None], name: str) -> Seconds:
    """Return the total duration in seconds of loading, tokenization and the program `way`, without imports.

    The dictionary has the single key `name`.
    """
    from attnmix.core.device import chosen_device
    from attnmix.models.checkpoint import load_tokenizer
    from attnmix.models.encoding import encode
    from attnmix.models.loading import load_classifier

    shutil.rmtree(PLAIN / name, ignore_errors=True)
    start = time.perf_counter()
    capture = read_parameters().capture
    tokenizer = load_tokenizer(FINETUNED)
    base = load_classifier(FINETUNED).base_model.to(chosen_device())
    encoded = encode(tokenizer, capture.texts, capture.max_length)
    way(Inputs(base, encoded, tokenizer.pad_token_id, capture.batch_tokens, PLAIN / name))
    return {name: time.perf_counter() - start}


def stage_capture(name: str) -> Seconds:
    """Return the total duration of `tokenize` and `capture` in seconds, excluding imports.

    The dictionary has the single key `name`.
    """
    from stages import capture, tokenize

    shutil.rmtree(ACTIVATIONS, ignore_errors=True)  # as DVC does before it runs a stage
    start = time.perf_counter()
    parameters = read_parameters()
    tokenize.main(parameters)
    capture.main(parameters)
    return {name: time.perf_counter() - start}


def forward_passes(inputs: Inputs, length: int | None = None) -> None:
    """Run the model without hooks on all batches, optionally padded to `length` tokens."""
    import torch

    with torch.inference_mode():
        for _, batch in inputs.batches(length):
            inputs.base(**batch).last_hidden_state.cpu()


def point_modules(base: Any) -> dict[str, tuple[str, str]]:
    """Return, for each captured point, the path of a module and whether the point is its `input` or `output`.

    The points have names of the form "layer_01/attention_output".
    """
    from attnmix.models.families import family_of

    family = family_of(base.config)
    points = read_parameters().capture.points
    (stack,) = family.stacks
    layers = [path for path, _ in base.named_modules() if stack.is_layer(path)]
    modules = {
        "layer_00/word_embedding": (family.word_embedding, "output"),
        "layer_00/embedding_output": (layers[0], "input"),
    }
    for number, layer in enumerate(layers, start=1):
        for point, (path, side) in stack.places().items():
            module_path = f"{layer}.{path}" if path else layer
            modules[f"layer_{number:02d}/{point}"] = (module_path, side)
    return {name: module for name, module in modules.items() if name.partition("/")[2] in points}


class Writer:
    """A float16 array `[tokens, width]` for each point, written by `numpy.save` at the end."""

    def __init__(self, inputs: Inputs) -> None:
        self.encoded = inputs.encoded
        self.folder = inputs.folder
        self.starts = np.cumsum([0, *map(len, inputs.encoded)])  # first row of each text, and the number of rows
        self.rows: dict[str, Any] = {}

    def keep(self, batch: list[int], features: Mapping[str, Any]) -> None:
        """Copy the features `[B, T, width]` of a batch to the rows of its texts, without padding.

        `batch` contains the indices of the texts.
        """
        for name, value in features.items():
            block = value.half().cpu().numpy()
            if name not in self.rows:
                self.rows[name] = np.empty((self.starts[-1], block.shape[-1]), np.float16)
            for row, text in enumerate(batch):
                text_rows = slice(self.starts[text], self.starts[text + 1])
                self.rows[name][text_rows] = block[row, : len(self.encoded[text])]

    def save(self) -> None:
        """Write the arrays to files, one for each point."""
        for name, array in self.rows.items():
            path = self.folder / f"{name}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, array)


def hooks(inputs: Inputs) -> None:
    """Write the vectors recorded by a forward hook at every point."""
    import torch

    features: dict[str, Any] = {}

    def keep(name: str, side: str) -> Callable[..., None]:
        def hook(_module: Any, given: Any, output: Any) -> None:
            features[name] = given[0] if side == "input" else output

        return hook

    for name, (path, side) in point_modules(inputs.base).items():
        inputs.base.get_submodule(path).register_forward_hook(keep(name, side))
    writer = Writer(inputs)
    with torch.inference_mode():
        for batch, given in inputs.batches():
            inputs.base(**given)
            writer.keep(batch, features)
    writer.save()


def hidden_states(inputs: Inputs) -> None:
    """Write the hidden states of transformers: the embedding output and the output of each layer."""
    import torch

    writer = Writer(inputs)
    with torch.inference_mode():
        for batch, given in inputs.batches():
            embedding_output, *layer_outputs = inputs.base(**given, output_hidden_states=True).hidden_states
            features = {"layer_00/embedding_output": embedding_output}
            for number, layer_output in enumerate(layer_outputs, start=1):
                features[f"layer_{number:02d}/layer_output"] = layer_output
            writer.keep(batch, features)
    writer.save()


def nnsight(inputs: Inputs) -> None:
    """Write the vectors of all points, recorded with nnsight in one trace per batch."""
    import torch
    from nnsight import NNsight

    model = NNsight(inputs.base)
    # nnsight's attribute `output` hides the modules of BERT with this name, so modules are accessed by path.
    modules = dict(model.modules(names=True))
    envoys = [(name, modules[f"model.{path}"], side) for name, (path, side) in point_modules(inputs.base).items()]
    # nnsight requires that values are requested in the order of computation.
    writer = Writer(inputs)
    with torch.inference_mode():
        for batch, given in inputs.batches():
            with model.trace(**given):
                features = {}
                for name, envoy, side in envoys:
                    features[name] = envoy.input if side == "input" else envoy.output
                features.save()
            writer.keep(batch, features)
    writer.save()


LENS_HOOKS = {
    "word_embedding": "embed.hook_out",
    "embedding_output": "blocks.0.hook_in",
    "attention_heads": "attn.o.hook_in",
    "attention_output": "attn.o.hook_out",
    "attention_norm": "ln1.hook_out",
    "ffn_output": "mlp.out.hook_out",
    "layer_output": "hook_out",
}


def transformer_lens(inputs: Inputs) -> None:
    """Write the vectors of all points, recorded with TransformerLens.

    The bridge of TransformerLens requires a masked language model; the head of this model takes additional time.
    """
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import BertForMaskedLM

    from attnmix.models.checkpoint import load_tokenizer

    model = BertForMaskedLM(inputs.base.config)
    model.bert.load_state_dict(inputs.base.state_dict(), strict=False)
    bridge = TransformerBridge.boot_transformers(
        str(FINETUNED), hf_model=model.eval(), tokenizer=load_tokenizer(FINETUNED)
    )
    hook_names = {name: _name_lens_hook(name) for name in point_modules(inputs.base)}
    writer = Writer(inputs)
    with torch.inference_mode():
        for batch, given in inputs.batches():
            _, cache = bridge.run_with_cache(
                given["input_ids"], attention_mask=given["attention_mask"], names_filter=list(hook_names.values())
            )
            # Features of heads `[B, T, heads, width]` are concatenated.
            writer.keep(batch, {name: cache[hook].flatten(2) for name, hook in hook_names.items()})
    writer.save()


def _name_lens_hook(name: str) -> str:
    """Return the name in TransformerLens of a point such as "layer_01/attention_output"."""
    layer, point = name.removeprefix("layer_").split("/")
    if int(layer) == 0:
        return LENS_HOOKS[point]
    return f"blocks.{int(layer) - 1}.{LENS_HOOKS[point]}"


def same_vectors() -> str:
    """Compare the vectors written by the other programs with those of the stage `capture`, and describe the results.

    The returned sentences contain the numbers of texts, tokens and capture points, the size of the stage's files, and
    the number of points that each program wrote. Raise `AssertionError` if vectors differ by more than `ROUNDING`.
    """
    sites = stored_sites(ACTIVATIONS)
    texts = len(read_parameters().capture.texts)
    tokens, hidden = read_features(ACTIVATIONS, sites[0]).shape
    counts = []
    for folder in sorted(PLAIN.iterdir()):  # one folder for each program that writes vectors
        way = folder.name.removesuffix(", numpy.save")
        counts.append(f"{_count_equal_points(folder)} ({way})")
    padding = ""
    padded_tokens = texts * PADDED
    if tokens < padded_tokens:
        padding = f" ({padded_tokens:,} with padding to {PADDED})"
    stored_bytes = sum(path.stat().st_size for path in ACTIVATIONS.rglob("*") if path.is_file())
    return (
        f"{texts:,} texts have {tokens:,} tokens{padding}, and {len(sites)} points of {hidden} numbers occupy "
        f"{stored_bytes / 1e6:,.0f} MB. Times exclude imports and include loading. No value that another program "
        f"wrote differs from that of the stage by more than {100 * ROUNDING['rtol']:g} % + {ROUNDING['atol']:g}, the "
        f"tolerance for float16. Numbers of points that the programs wrote: {', '.join(counts)}."
    )


def _count_equal_points(folder: Path) -> int:
    """Return the number of points in `folder`, all of which must equal those of the stage `capture`.

    Raise `AssertionError` if they differ by more than `ROUNDING`.
    """
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.npy")]
    for site in stored_sites(ACTIVATIONS):
        if str(site) not in names:
            continue
        stored = read_features(ACTIVATIONS, site).astype(np.float64)
        written = np.load(folder / f"{site}.npy")
        if not np.allclose(stored, written, **ROUNDING):
            raise AssertionError(f"{folder.name}, {site}: {np.abs(stored - written).max()} apart")
    return len(names)


def capture_case(title: str, folder: str, ways: Mapping[str, Callable[[Inputs], None]]) -> Case:
    """Return a case that compares forward passes without hooks, the stage `capture`, and the programs in `ways`."""
    timed = {name: partial(timed_capture, way, name) for name, way in ways.items()}
    bare, stage = "bare forward passes", "stage capture"
    first = {bare: partial(timed_capture, forward_passes, bare), stage: partial(stage_capture, stage)}
    return Case(title, folder, {**first, **timed}, same_vectors)


BY_HAND = {
    "output_hidden_states, numpy.save": hidden_states,
    "hooks, numpy.save": hooks,
    f"forward passes padded to {PADDED}": partial(forward_passes, length=PADDED),
}
PEERS = {"nnsight": nnsight, "transformer-lens": transformer_lens}
INSTALLED_PEERS = {
    f"{name} {version(name)}, numpy.save": way for name, way in PEERS.items() if find_spec(name.replace("-", "_"))
}


# Ratios: all computations alternate in one process, batch by batch, so that other load on the machine affects them
# equally.

SDPA, EAGER = "forward, sdpa", "forward, eager"
SIX = ("attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n")
RATIO_ROUNDING = 1e-6  # tolerance of float32 ratios that are computed in different blocks of tokens
Batch = list[Any]  # a list of attnmix.measures.documents.Document


class Measuring(NamedTuple):
    """Two measurers of a model (`measurer` for all ratios, `six` for the ratios in `SIX`), and batches of texts."""

    measurer: Any
    six: Any
    batches: list[Batch]

    def forward(self, batch: Batch, attention: str) -> Any:
        """Return the last hidden states `[B, T, D]`, computed with the attention implementation `attention`."""
        import torch

        from attnmix.models.encoding import padded

        base = self.measurer.base
        base.set_attn_implementation(attention)
        ids = [document.ids.tolist() for document in batch]
        with torch.inference_mode():
            return base(**padded(ids, self.measurer.pad_token_id, base.device)).last_hidden_state

    def ratios(self, batch: Batch, measurer: Any) -> Any:
        """Return the ratios of `measurer` (`self.measurer` or `self.six`) for a batch."""
        self._observe()
        return measurer.ratios(batch)

    def measures(self, batch: Batch, sampled: Collection[int] = (0,)) -> list[Any]:
        """Return the measures of each text; all identities are checked in the texts with the indices `sampled`."""
        self._observe()
        return list(self.measurer.measures(batch, [index in sampled for index in range(len(batch))]))

    def identities(self, batch: Batch) -> list[Any]:
        """Return the ratios of each text; all identities are checked in the first text, as in a run."""
        self._observe()
        return list(self.measurer.measures(batch, [index == 0 for index in range(len(batch))], ()))

    def _observe(self) -> None:
        """Set the attention implementation that the measures require."""
        from attnmix.models.attention import OBSERVED

        self.measurer.base.set_attn_implementation(OBSERVED)


def prepare_measuring() -> Measuring:
    """Return two measurers of the model in the current folder, and the texts of `params.yaml` in batches."""
    from attnmix.core.device import chosen_device
    from attnmix.measures.batches import BatchMeasurer
    from attnmix.measures.documents import documents_of
    from attnmix.models.checkpoint import load_tokenizer
    from attnmix.models.encoding import batches_by_tokens, tokenize_texts
    from attnmix.models.loading import load_base

    parameters = read_parameters()
    tokenizer = load_tokenizer(FINETUNED)
    base = load_base(FINETUNED).to(chosen_device())
    texts = {f"text/{number}": text for number, text in enumerate(parameters.capture.texts)}
    tokenized = tokenize_texts(tokenizer, texts, texts.values(), parameters.capture.max_length)
    tokens = pd.concat([each.table for each in tokenized])
    counts = pd.DataFrame([each.counts for each in tokenized])
    rows = counts.assign(document=list(texts), label=0, predicted_label=0)
    documents = documents_of(rows, tokens)
    numbers = batches_by_tokens([len(document) for document in documents], parameters.capture.batch_tokens)
    batches = [[documents[i] for i in batch] for batch in numbers]
    measurer = BatchMeasurer(base, list(RATIOS), tokenizer.pad_token_id)
    measurer.read_corpus(batches)
    return Measuring(measurer, BatchMeasurer(base, SIX, tokenizer.pad_token_id), batches)


def ratios_in_turn() -> Seconds:
    """Return the duration of each computation in seconds, summed over all batches.

    The computations alternate batch by batch.
    """
    ready = prepare_measuring()
    ways: dict[str, Callable[[Batch], Any]] = {
        SDPA: partial(ready.forward, attention="sdpa"),
        EAGER: partial(ready.forward, attention="eager"),
        "mixing ratios": partial(ready.ratios, measurer=ready.six),
        "seven ratios": partial(ready.ratios, measurer=ready.measurer),
        "seven ratios, identities as in a run": ready.identities,
        "all that `measure` reads from a batch": ready.measures,
    }
    for way in ways.values():
        way(ready.batches[0])  # excludes one-time costs
    seconds = dict.fromkeys(ways, 0.0)
    for batch in ready.batches:
        for name, way in ways.items():
            seconds[name] += seconds_of(partial(way, batch))
    return seconds


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the duration of a call in seconds, including pending computations of the device."""
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def same_ratios() -> str:
    """Describe the largest error of the identities, and the effect of eager attention on hidden states.

    Raise an error if the ratios of a batch differ from the ratios in the complete measures.
    """
    ready = prepare_measuring()
    batch = ready.batches[0]
    sdpa = ready.forward(batch, "sdpa")
    eager = ready.forward(batch, "eager")
    ratios = ready.ratios(batch, ready.measurer).cpu().numpy()
    measures = ready.measures(batch)
    identity_errors = []
    hidden_differences = []
    for index, (document, measured) in enumerate(zip(batch, measures, strict=True)):
        tokens = len(document)  # excludes padding
        text_ratios = ratios[:, :, index, :tokens].swapaxes(0, 1)
        np.testing.assert_allclose(text_ratios, measured.ratios, rtol=0, atol=RATIO_ROUNDING)
        identity_errors.append(float(np.nanmax(measured.identities)))
        hidden_differences.append(float((sdpa[index, :tokens] - eager[index, :tokens]).abs().max()))
    lengths = [len(document) for documents in ready.batches for document in documents]
    return (
        f"{len(lengths):,} texts with {sum(lengths):,} tokens in total are measured in {len(ready.batches)} batches. "
        "In the first batch, the parts sum to the model's vectors with a relative error of at most "
        f"{max(identity_errors):.1e}, and hidden states of `sdpa` and eager attention differ by at most "
        f"{max(hidden_differences):.1e}."
    )


# Corpora: the stages `measure` and `capture` with increasing numbers of texts. Times include imports.


def measure_documents(documents: int) -> None:
    """Run `tokenize` and `measure` for the first `documents` texts."""
    from stages import measure, tokenize

    parameters = read_parameters()
    chosen = parameters.measure.model_copy(update={"documents": documents})
    parameters = parameters.model_copy(update={"measure": chosen})
    tokenize.main(parameters)
    measure.main(parameters)


def capture_documents(documents: int) -> None:
    """Run `tokenize` and `capture` for the first `documents` texts."""
    from stages import capture, tokenize

    parameters = read_parameters()
    chosen = parameters.capture.model_copy(update={"documents": list(range(documents))})
    parameters = parameters.model_copy(update={"capture": chosen})
    shutil.rmtree(ACTIVATIONS, ignore_errors=True)
    tokenize.main(parameters)
    capture.main(parameters)


def measured_corpus() -> str:
    """Describe the texts and the model of the case `measure-corpora`."""
    return (
        f"Texts have {LENGTH} tokens, and batches {BATCH_TOKENS} tokens. The model is BERT with random weights "
        f"({in_words(TINY)})."
    )


def captured_corpus() -> str:
    """Describe the texts and the model of the case `capture-corpora`."""
    return (
        f"Texts have {LONG} tokens ({len(Run(Path()).tokens):,} tokens in the last row). The model is BERT with random "
        f"weights ({in_words(WIDE)}). All points are captured."
    )


def in_words(shape: dict[str, int]) -> str:
    return json.dumps(shape).strip("{}").replace('"', "").replace("_", " ")


def corpus_case(stage: str, folder: str, run: Callable[[int], None], check: Callable[[], str]) -> Case:
    """Return a case that runs a stage with increasing numbers of texts."""
    ways = {f"{documents:,} documents": partial(run, documents) for documents in Size().documents}
    return Case(f"Stage {stage}, by number of documents", folder, ways, check, growing=True)


# The default run without existing results, with a process for each stage.


def default_run() -> Seconds:
    """Run the stages, and then an experiment, in a clone of the last commit; return the duration of each in seconds.

    The entry `all stages` is the sum of the durations of the stages. The experiment changes `umap.metric`, so that DVC
    repeats only some of the stages.
    """
    subprocess.run(["git", "clean", "-qfdx"], check=True)  # removes the results of a previous run
    parameters = Path("params.yaml").read_bytes()
    seconds = {stage: process_seconds("-m", "stages", stage) for stage in STAGES}
    seconds["all stages"] = sum(seconds.values())
    process_seconds("-m", "dvc", "commit", "--quiet", "--force")
    command = ("-m", "dvc", "exp", "run", "--set-param", "umap.metric=cosine")
    seconds["`dvc exp run -S umap.metric=cosine`"] = process_seconds(*command)
    Path("params.yaml").write_bytes(parameters)  # undoes the change by the experiment
    return seconds


def process_seconds(*arguments: str) -> float:
    """Run Python with these arguments in the current folder, and return the duration in seconds."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=os.environ | {"PATH": path}, capture_output=True, check=True)
    return time.perf_counter() - start


CASES: dict[str, Case] = {
    "run": Case("The default run by stage", "clone", {"run": default_run}, lambda: "Imports included.", ["all stages"]),
    "capture": capture_case("Capture, default model", "default", BY_HAND),
    "capture-bert": capture_case("Capture, BERT-base's shape", "bert", BY_HAND),
    "peers": capture_case(
        "Capture, default model, compared with nnsight and TransformerLens",
        "default",
        {"hooks, numpy.save": hooks, **INSTALLED_PEERS},
    ),
    "measure": Case(
        "Mixing ratios, default model", "full", {"in turn": ratios_in_turn}, same_ratios, references=(SDPA, EAGER)
    ),
    "measure-corpora": corpus_case("measure", "measured corpus", measure_documents, measured_corpus),
    "capture-corpora": corpus_case("capture", "captured corpus", capture_documents, captured_corpus),
}


def main() -> None:
    """Run the selected cases, print their sections, and replace them in benchmarks/RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    usual = [name for name in CASES if name != "peers"]
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=usual, metavar="CASE")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of all libraries, for all ways")
    parser.add_argument("--arithmetic", choices=(FASTEST, PORTABLE), default=FASTEST, help="for all ways")
    parser.add_argument("--small", action="store_true", help="few and short texts, for a short check")
    parser.add_argument("--way", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        in_this_process(*arguments.way)
        return
    command = " ".join(["python -m benchmarks.stages", *sys.argv[1:]])
    made_by = f"`{command}`.\n{machine(arguments.threads)}"
    for name in arguments.cases:
        section = run_case(name, made_by, arguments)
        print(section, flush=True)
        if not arguments.small:
            replace_section(section)


def run_case(name: str, made_by: str, arguments: argparse.Namespace) -> str:
    """Run a case, and return its section of the results: heading, command and machine, comparison, and table.

    `made_by` describes the command and the machine.
    """
    case = CASES[name]
    threads = arguments.threads
    size = SMALL if arguments.small else Size()
    ways = list(case.ways)
    warm_up = ways
    if case.growing:
        ways = ways[: len(size.documents)]
        warm_up = ways[:1]
    if arguments.small:
        warm_up = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        if case.folder != "clone":
            folder.mkdir()
        lay_out(case.folder, folder, size, arguments.arithmetic)
        for way in warm_up:
            run_way(name, way, folder, threads)
        # The check needs the results of all variants. If some variants do not run before timing, the check runs after
        # timing.
        if warm_up == ways:
            compared = check(name, folder, threads)
            timings = _time_ways(name, ways, arguments.repeats, folder, threads)
        else:
            timings = _time_ways(name, ways, arguments.repeats, folder, threads)
            compared = check(name, folder, threads)
    ending = IN_PORTABLE if arguments.arithmetic == PORTABLE else ""
    title = f"{TITLE}{case.title}{ending}"
    return f"{title}\n\n{made_by}\n\n{compared}\n\n{table(timings, case.references)}\n"


def _time_ways(name: str, ways: Sequence[str], repeats: int, folder: Path, threads: int) -> dict[str, list[Timing]]:
    """Run all variants of a case in turn, `repeats` times, and return the timings of the runs by variant."""
    timings: dict[str, list[Timing]] = defaultdict(list)
    for _ in range(repeats):
        for way in ways:
            for timed_way, timing in run_way(name, way, folder, threads).items():
                timings[timed_way].append(timing)
    return timings


def check(name: str, folder: Path, threads: int) -> str:
    """Return the result of a case's `Case.check` for the outputs in `folder`, computed in a new process."""
    return fresh_process(["-m", "benchmarks.stages", "--way", name, "check"], folder, threads)[1]


def replace_section(section: str) -> None:
    """Replace the section with the same title in RESULTS, or append a new section."""
    head, *sections = RESULTS.read_text(encoding="utf-8").split(f"\n{TITLE}")
    sections.append(section.removeprefix(TITLE))
    by_title = {}  # the new section is last, so that it replaces an older section with the same title
    for text in sections:
        title, _, _ = text.partition("\n")
        by_title[title] = text.strip()
    parts = [head]
    for text in by_title.values():
        parts.append(f"{TITLE}{text}\n")
    RESULTS.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
