"""Compare time and memory of the stages with bare forward passes and with simple alternatives for the same results.

    python -m benchmarks.stages                                   # all cases; needs more than an hour
    python -m benchmarks.stages --cases capture --repeats 3       # only some cases
    python -m benchmarks.stages --cases measure --arithmetic portable   # in the pipeline's default arithmetic
    python -m benchmarks.stages --small --repeats 1               # a short check of all cases, which writes nothing

Each case replaces its section in benchmarks/RESULTS.md, with its command and machine. Every run is a new process with
the same number of threads; the ways of a case alternate. Before timing, each way of a case runs once, and the results
are compared (with `--small`, after timing). Texts are IMDb reviews if IMDB_FOLDER is set to a copy, otherwise reviews
of the sample; the models are the fine-tuned default model and models with random weights. The outputs of `make repro`
are required. The case `peers` requires nnsight and TransformerLens in the Python environment, which are not in the
lock files.

All cases are in one file, to keep the ways comparable.
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
    """The time and peak memory of one run of a way. The peak is None if several ways shared the process."""

    seconds: float
    peak_mb: float | None


Seconds = dict[str, float]


class Case(NamedTuple):
    """A comparison of several ways to compute the same result."""

    title: str
    folder: str
    """The name of a folder that `lay_out` creates."""
    ways: Mapping[str, Callable[[], Seconds | None]]
    """Functions by name, which run in separate processes. They may return times of one or several ways."""
    check: Callable[[], str]
    """A function that returns text on the comparison of the results, or raises an error if they differ."""
    references: Sequence[str] = ()
    """The reference ways of the table; by default the first."""
    growing: bool = False
    """True if the ways are increasing amounts of the same work. Only the first warms up, and the last is checked."""


def synchronize() -> None:
    """Wait for pending computations of the device."""
    import torch

    from attnmix.core.device import chosen_device

    if chosen_device().type != "cpu":
        torch.accelerator.synchronize()


def fresh_process(arguments: Sequence[str], folder: Path, threads: int) -> tuple[float, str]:
    """Return the wall time of `python <arguments>` in `folder`, including imports, and its output."""
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"PYTHONPATH": str(REPOSITORY)}
    if (folder / "params.yaml").is_file() and read_parameters(folder / "params.yaml").arithmetic == PORTABLE:
        environment |= SETTINGS
    command = [sys.executable, "-W", "ignore", *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return seconds, done.stdout.strip()


def run_way(case: str, way: str, folder: Path, threads: int) -> dict[str, Timing]:
    """Return the timing of one run of a way, or the timings of several ways in the same process."""
    seconds, _ = fresh_process(["-m", "benchmarks.stages", "--way", case, way], folder, threads)
    measured = json.loads((folder / MEASURED).read_text(encoding="ascii"))
    if not measured["seconds"]:
        return {way: Timing(seconds, measured["peak_mb"])}
    shared = len(measured["seconds"]) > 1
    peak = None if shared else measured["peak_mb"]
    return {name: Timing(each, peak) for name, each in measured["seconds"].items()}


def in_this_process(case: str, way: str) -> None:
    """Run one way, or `check`, in the current folder, and write its seconds and peak memory to a file."""
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
    statuses = [Path(f"/proc/{each.pid}/status").read_text(encoding="ascii") for each in processes]
    return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in statuses if "VmHWM:" in text) / 1024


def table(timings: Mapping[str, Sequence[Timing]], references: Sequence[str]) -> str:
    """Return a Markdown table with a row for each way: its median, and ratios to the `references`."""
    medians = {way: statistics.median(run.seconds for run in runs) for way, runs in timings.items()}
    references = references or list(timings)[:1]
    ratios = [f"ratio to *{name}*" for name in references] if len(timings) > 1 else []
    lines = [["way", "s", *ratios, "MB"]]
    lines.append(["---"] + ["---:"] * (2 + len(ratios)))
    for way, runs in timings.items():
        seconds = [run.seconds for run in runs]
        median = f"{medians[way]:.2f}"
        if len(runs) > 1:
            median += f" [{min(seconds):.2f}, {max(seconds):.2f}]"
        compared = [f"{medians[way] / medians[name]:.2f}" for name in references] if ratios else []
        peaks = [run.peak_mb for run in runs if run.peak_mb is not None]
        lines.append([way, median, *compared, f"{statistics.median(peaks):,.0f}" if peaks else ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(threads: int) -> str:
    """Return processor, cores, threads, GPU, load and versions, as lines above a table."""
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


# Working folders of the ways.


class Size(NamedTuple):
    """The size of a benchmark. `bert_texts` and `layers` are for the shape of BERT-base, `documents` for corpora."""

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
    """Create the folder `name` (see `Case.folder`) with the inputs of the stages."""
    reviews = pd.read_parquet(split_file("train", Run(REPOSITORY).reviews))["text"].tolist()
    run = Run(folder)
    if name == "clone":
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, folder], check=True)
        text = (folder / "params.yaml").read_text(encoding="utf-8")
        text = re.sub(r"(?m)^arithmetic: \w+", f"arithmetic: {arithmetic}", text)
        (folder / "params.yaml").write_text(text, encoding="utf-8")
        return
    if name == "measured corpus":
        for checkpoint in run.checkpoints.values():
            random_bert(checkpoint, **TINY)
        write_test_split(run, [f"{reviews[i % len(reviews)]} {i}" for i in range(max(size.documents))])
        write_parameters(
            folder, arithmetic, capture={"documents": [0], "max_length": LENGTH, "batch_tokens": BATCH_TOKENS}
        )
        return
    if name == "captured corpus":
        random_bert(run.finetuned, **WIDE)
        texts = 2 * (real_reviews(max(size.documents)) or reviews)
        starts = [i % (len(texts) // 2) for i in range(max(size.documents))]
        write_test_split(run, [" ".join(texts[start : start + 8])[: 9 * LONG] for start in starts])
        write_parameters(folder, arithmetic, capture={"max_length": LONG})
        return
    run.finetuned.parent.mkdir(parents=True)
    run.reviews.parent.symlink_to(Run(REPOSITORY).reviews.parent)
    predictions = run.test_predictions_file.parent  # an input of `tokenize`
    predictions.parent.mkdir()
    predictions.symlink_to(Run(REPOSITORY).test_predictions_file.parent)
    number = size.bert_texts if name == "bert" else size.texts
    if name == "bert":
        random_bert(run.finetuned, num_hidden_layers=size.layers)
    else:
        run.finetuned.symlink_to(Run(REPOSITORY).finetuned)
    if name == "full":  # all texts have the maximum length
        texts, longest = [joined(reviews, i, size.tokens // 10) for i in range(number)], size.tokens
    else:  # lengths differ
        texts = real_reviews(number) or [joined(reviews, i, 1 + i % 4) for i in range(number)]
        longest = 2 * size.tokens
    write_parameters(folder, arithmetic, capture={"documents": [], "texts": texts, "max_length": longest})


def joined(reviews: list[str], first: int, count: int) -> str:
    """Return a text that joins `count` reviews, starting with the review `first`."""
    return " ".join((reviews[first:] + reviews)[:count])


def real_reviews(number: int) -> list[str]:
    """Return `number` IMDb test reviews if IMDB_FOLDER is set to a copy in the hub's layout, else an empty list."""
    if not (named := os.environ.get("IMDB_FOLDER")):
        return []
    (file,) = Path(named).rglob("test-*.parquet")
    return list(pd.read_parquet(file)["text"].sample(number, random_state=0))


def write_test_split(run: Run, texts: list[str]) -> None:
    """Write the test split of `download`, and the predictions of `finetune` for it."""
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
    """Write `params.yaml` with default values, except for the arithmetic and the `changed` sections."""
    values = Parameters().model_dump() | {"arithmetic": arithmetic}
    for section_name, section_values in changed.items():
        values[section_name] |= section_values
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(values, file)


# Capture: the stage, bare forward passes, and alternatives that write the same vectors, all with the same batches.

FINETUNED = Run(Path()).finetuned
PLAIN = Path("plain")
PADDED = 512
ROUNDING = {"rtol": 1e-3, "atol": 1e-4}  # tolerance for float16; results depend slightly on the batch


class Inputs(NamedTuple):
    """The model, token IDs and padded batches of the pipeline, in its order."""

    base: Any
    encoded: list[list[int]]
    pad: int
    batch_tokens: int
    folder: Path

    def batches(self, length: int | None = None) -> Iterator[tuple[list[int], Any]]:
        """Yield the text indices and model inputs of each batch, optionally padded to `length`."""
        import torch

        from attnmix.models.encoding import batches_by_tokens, padded

        lengths = [length or len(text) for text in self.encoded]
        for batch in batches_by_tokens(lengths, self.batch_tokens):
            inputs = padded([self.encoded[i] for i in batch], self.pad, self.base.device)
            if length:
                pads = {"input_ids": self.pad, "attention_mask": 0}
                missing = length - inputs["input_ids"].shape[1]
                inputs = {k: torch.nn.functional.pad(v, (0, missing), value=pads[k]) for k, v in inputs.items()}
            yield batch, inputs


def timed_capture(way: Callable[[Inputs], None], name: str) -> Seconds:
    """Return the seconds of loading, tokenization and `way`, without imports."""
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
    """Return the seconds of the stages `tokenize` and `capture`, without imports."""
    from stages import capture, tokenize

    shutil.rmtree(ACTIVATIONS, ignore_errors=True)  # DVC also removes the outputs of a stage
    start = time.perf_counter()
    tokenize.main(read_parameters())
    capture.main(read_parameters())
    return {name: time.perf_counter() - start}


def forward_passes(inputs: Inputs, length: int | None = None) -> None:
    import torch

    with torch.inference_mode():
        for _, batch in inputs.batches(length):
            inputs.base(**batch).last_hidden_state.cpu()


def point_modules(base: Any) -> dict[str, tuple[str, str]]:
    """Return the module path of each captured point, and `input` or `output` of the module."""
    from attnmix.models.families import family_of

    family, points = family_of(base.config), read_parameters().capture.points
    (stack,) = family.stacks
    layers = [path for path, _ in base.named_modules() if stack.is_layer(path)]
    modules = {
        "layer_00/word_embedding": (family.word_embedding, "output"),
        "layer_00/embedding_output": (layers[0], "input"),
    }
    for number, layer in enumerate(layers, start=1):
        for point, (path, side) in stack.places().items():
            modules[f"layer_{number:02d}/{point}"] = (f"{layer}.{path}".rstrip("."), side)
    return {name: module for name, module in modules.items() if name.partition("/")[2] in points}


class Writer:
    """A float16 array for each point, written by `numpy.save` at the end."""

    def __init__(self, inputs: Inputs) -> None:
        self.encoded, self.folder = inputs.encoded, inputs.folder
        self.starts = np.cumsum([0, *map(len, inputs.encoded)])
        self.rows: dict[str, Any] = {}

    def keep(self, batch: list[int], features: Mapping[str, Any]) -> None:
        for name, value in features.items():
            block = value.half().cpu().numpy()
            if name not in self.rows:
                self.rows[name] = np.empty((self.starts[-1], block.shape[-1]), np.float16)
            for index, i in enumerate(batch):
                self.rows[name][self.starts[i] : self.starts[i + 1]] = block[index, : len(self.encoded[i])]

    def save(self) -> None:
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
    """Write the hidden states of transformers: the residual stream, one vector per layer."""
    import torch

    writer = Writer(inputs)
    with torch.inference_mode():
        for batch, given in inputs.batches():
            levels = inputs.base(**given, output_hidden_states=True).hidden_states
            points = ["embedding_output", *["layer_output"] * (len(levels) - 1)]
            writer.keep(batch, {f"layer_{i:02d}/{point}": levels[i] for i, point in enumerate(points)})
    writer.save()


def nnsight(inputs: Inputs) -> None:
    """Write all points, saved in one trace per batch."""
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
    """Write all points from the cache of each batch; the bridge requires a masked language model, which costs more."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import BertForMaskedLM

    from attnmix.models.checkpoint import load_tokenizer

    model = BertForMaskedLM(inputs.base.config)
    model.bert.load_state_dict(inputs.base.state_dict(), strict=False)
    bridge = TransformerBridge.boot_transformers(
        str(FINETUNED), hf_model=model.eval(), tokenizer=load_tokenizer(FINETUNED)
    )
    names = {}
    for name in point_modules(inputs.base):
        layer, point = name.removeprefix("layer_").split("/")
        names[name] = LENS_HOOKS[point] if int(layer) == 0 else f"blocks.{int(layer) - 1}.{LENS_HOOKS[point]}"
    writer = Writer(inputs)
    with torch.inference_mode():
        for batch, given in inputs.batches():
            _, cache = bridge.run_with_cache(
                given["input_ids"], attention_mask=given["attention_mask"], names_filter=list(names.values())
            )
            writer.keep(batch, {name: cache[hook].flatten(2) for name, hook in names.items()})
    writer.save()


def same_vectors() -> str:
    """Return text on the compared vectors; raise an error if a way and the stage differ."""
    sites, texts = stored_sites(ACTIVATIONS), len(read_parameters().capture.texts)
    tokens, hidden = read_features(ACTIVATIONS, sites[0]).shape
    compared = []
    for folder in sorted(PLAIN.iterdir()):
        names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.npy")]
        for site in (site for site in sites if str(site) in names):
            stored, plain = read_features(ACTIVATIONS, site), np.load(folder / f"{site}.npy")
            if not np.allclose(stored.astype(np.float64), plain, **ROUNDING):
                raise AssertionError(f"{folder.name}, {site}: {np.abs(stored.astype(float) - plain).max()} apart")
        compared.append(f"{folder.name.removesuffix(', numpy.save')} {len(names)}")
    padded = f" ({texts * PADDED} with padding to {PADDED})" if tokens < texts * PADDED else ""
    return (
        f"{texts} texts have {tokens} tokens{padded}, and {len(sites)} points of {hidden} numbers occupy "
        f"{sum(path.stat().st_size for path in ACTIVATIONS.rglob('*') if path.is_file()) / 1e6:,.0f} MB. Times exclude "
        "imports and include loading. Points equal to those of the stage up to the last digit of float16: "
        f"{', '.join(compared)}."
    )


def capture_case(title: str, folder: str, ways: Mapping[str, Callable[[Inputs], None]]) -> Case:
    """Return a case with bare forward passes, the stage, and other ways."""
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


# Ratios: all ways alternate in one process, batch by batch, to distribute the load of a busy machine equally.

SDPA, EAGER = "forward, sdpa", "forward, eager"
SIX = ("attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n")
RATIO_ROUNDING = 1e-6  # tolerance of float32 ratios that are computed in different blocks of tokens
Batch = list[Any]  # a list of attnmix.measures.documents.Document


class Measuring(NamedTuple):
    """The measurers of a model, and batches of texts."""

    measurer: Any
    six: Any
    batches: list[Batch]

    def forward(self, batch: Batch, attention: str) -> Any:
        """Return the last hidden states."""
        import torch

        from attnmix.models.encoding import padded

        base = self.measurer.base
        base.set_attn_implementation(attention)
        ids = [document.ids.tolist() for document in batch]
        with torch.inference_mode():
            return base(**padded(ids, self.measurer.pad_token_id, base.device)).last_hidden_state

    def ratios(self, batch: Batch, measurer: Any) -> Any:
        self._observe()
        return measurer.ratios(batch)

    def measures(self, batch: Batch, sampled: Collection[int] = (0,)) -> list[Any]:
        """Return the measures. All identities are checked in the `sampled` texts, with the sampling rate of a run."""
        self._observe()
        return list(self.measurer.measures(batch, [index in sampled for index in range(len(batch))]))

    def identities(self, batch: Batch) -> list[Any]:
        """Return the ratios, with the identity checks of a run."""
        self._observe()
        return list(self.measurer.measures(batch, [index == 0 for index in range(len(batch))], ()))

    def _observe(self) -> None:
        from attnmix.models.attention import OBSERVED

        self.measurer.base.set_attn_implementation(OBSERVED)


def prepare_measuring() -> Measuring:
    """Return the captured texts in batches, with their measurers."""
    from attnmix.core.device import chosen_device
    from attnmix.measures.batches import BatchMeasurer
    from attnmix.measures.documents import documents_of
    from attnmix.models.checkpoint import load_tokenizer
    from attnmix.models.encoding import batches_by_tokens, tokenize_texts
    from attnmix.models.loading import load_base

    parameters = read_parameters()
    tokenizer, base = load_tokenizer(FINETUNED), load_base(FINETUNED).to(chosen_device())
    texts = {f"text/{number}": text for number, text in enumerate(parameters.capture.texts)}
    tokenized = tokenize_texts(tokenizer, texts, texts.values(), parameters.capture.max_length)
    tokens = pd.concat([each.table for each in tokenized])
    counts = pd.DataFrame([each.counts for each in tokenized])
    rows = counts.assign(document=list(texts), label=0, predicted_label=0)
    documents = documents_of(rows, tokens)
    numbers = batches_by_tokens([len(document) for document in documents], parameters.capture.batch_tokens)
    every, six = (BatchMeasurer(base, methods, tokenizer.pad_token_id) for methods in (list(RATIOS), SIX))
    batches = [[documents[i] for i in batch] for batch in numbers]
    every.read_corpus(batches)
    return Measuring(every, six, batches)


def ratios_in_turn() -> Seconds:
    """Return the seconds of each way over all batches."""
    ready = prepare_measuring()
    ways: dict[str, tuple[Callable[[Batch], Any], list[Batch]]] = {
        SDPA: (partial(ready.forward, attention="sdpa"), ready.batches),
        EAGER: (partial(ready.forward, attention="eager"), ready.batches),
        "mixing ratios": (partial(ready.ratios, measurer=ready.six), ready.batches),
        "seven ratios": (partial(ready.ratios, measurer=ready.measurer), ready.batches),
        "seven ratios, identities as in a run": (ready.identities, ready.batches),
        "all that `measure` reads from a batch": (ready.measures, ready.batches),
    }
    for way, batches in ways.values():
        way(batches[0])
    seconds = dict.fromkeys(ways, 0.0)
    for number in range(len(ready.batches)):
        for name, (way, batches) in ways.items():
            seconds[name] += seconds_of(partial(way, batches[number]))
    return seconds


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds of a call, including pending computations of the device."""
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def same_ratios() -> str:
    """Return text on the largest identity error and the effect of eager attention; raise an error if ratios differ."""
    ready = prepare_measuring()
    batch = ready.batches[0]
    sdpa, eager = (ready.forward(batch, name) for name in ("sdpa", "eager"))
    ratios, measures = ready.ratios(batch, ready.measurer).cpu().numpy(), ready.measures(batch)
    for index, (document, each) in enumerate(zip(batch, measures, strict=True)):
        alone = ratios[:, :, index, : len(document)].swapaxes(0, 1)
        np.testing.assert_allclose(alone, each.ratios, rtol=0, atol=RATIO_ROUNDING)
    wrong = max(float(np.nanmax(each.identities)) for each in measures)
    lengths = [len(document) for every in ready.batches for document in every]
    real = [np.s_[index, : len(document)] for index, document in enumerate(batch)]
    apart = max(float((sdpa[where] - eager[where]).abs().max()) for where in real)
    return (
        f"{len(lengths)} texts with {sum(lengths)} tokens are measured in {len(ready.batches)} batches. In the first "
        f"batch, the parts sum to the model's vectors with a relative error of at most {wrong:.1e}, and hidden states "
        f"of `sdpa` and eager attention differ by at most {apart:.1e}."
    )


# Corpora: `measure` and `capture` for increasing numbers of texts, including imports.


def measure_documents(documents: int) -> None:
    from stages import measure, tokenize

    parameters = read_parameters()
    chosen = parameters.measure.model_copy(update={"documents": documents})
    parameters = parameters.model_copy(update={"measure": chosen})
    tokenize.main(parameters)
    measure.main(parameters)


def capture_documents(documents: int) -> None:
    from stages import capture, tokenize

    parameters = read_parameters()
    chosen = parameters.capture.model_copy(update={"documents": list(range(documents))})
    parameters = parameters.model_copy(update={"capture": chosen})
    shutil.rmtree(ACTIVATIONS, ignore_errors=True)
    tokenize.main(parameters)
    capture.main(parameters)


def measured_corpus() -> str:
    return (
        f"Texts have {LENGTH} tokens, and batches {BATCH_TOKENS} tokens. The model is BERT with random weights "
        f"({in_words(TINY)})."
    )


def captured_corpus() -> str:
    return (
        f"Texts have {LONG} tokens ({len(Run(Path()).tokens):,} tokens in the last row). The model is BERT with random "
        f"weights ({in_words(WIDE)}). All points are captured."
    )


def in_words(shape: dict[str, int]) -> str:
    return json.dumps(shape).strip("{}").replace('"', "").replace("_", " ")


def corpus_case(stage: str, folder: str, run: Callable[[int], None], check: Callable[[], str]) -> Case:
    ways = {f"{documents:,} documents": partial(run, documents) for documents in Size().documents}
    return Case(f"Stage {stage}, by number of documents", folder, ways, check, growing=True)


# The default run from scratch, with a process for each stage.


def default_run() -> Seconds:
    """Return the seconds of each stage of the last commit, their sum, and the seconds after changing `umap.metric`."""
    subprocess.run(["git", "clean", "-qfdx"], check=True)
    parameters = Path("params.yaml").read_bytes()
    seconds = {stage: process_seconds("-m", "stages", stage) for stage in STAGES}
    seconds["all stages"] = sum(seconds.values())
    process_seconds("-m", "dvc", "commit", "--quiet", "--force")
    command = ("-m", "dvc", "exp", "run", "--set-param", "umap.metric=cosine")
    seconds["`dvc exp run -S umap.metric=cosine`"] = process_seconds(*command)
    Path("params.yaml").write_bytes(parameters)  # undoes the change by the experiment
    return seconds


def process_seconds(*arguments: str) -> float:
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
    """Return the section of a case: heading, command and machine, comparison, and table."""
    case, threads = CASES[name], arguments.threads
    size = SMALL if arguments.small else Size()
    ways = list(case.ways)[: len(size.documents)] if case.growing else list(case.ways)
    timings: dict[str, list[Timing]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        if case.folder != "clone":
            folder.mkdir()
        lay_out(case.folder, folder, size, arguments.arithmetic)
        warm_up = ways[:1] if case.growing else ways
        if arguments.small:
            warm_up = []
        for way in warm_up:
            run_way(name, way, folder, threads)
        checks_first = not (case.growing or arguments.small)
        compared = check(name, folder, threads) if checks_first else ""
        for _ in range(arguments.repeats):
            for way in ways:
                for timed_way, timing in run_way(name, way, folder, threads).items():
                    timings[timed_way].append(timing)
        compared = compared or check(name, folder, threads)
    ending = IN_PORTABLE if arguments.arithmetic == PORTABLE else ""
    return f"{TITLE}{case.title}{ending}\n\n{made_by}\n\n{compared}\n\n{table(timings, case.references)}\n"


def check(name: str, folder: Path, threads: int) -> str:
    """Return the text of `Case.check` on the results in `folder`."""
    return fresh_process(["-m", "benchmarks.stages", "--way", name, "check"], folder, threads)[1]


def replace_section(section: str) -> None:
    """Replace the section with the same title in RESULTS, or append a new section."""
    head, *sections = RESULTS.read_text(encoding="utf-8").split(f"\n{TITLE}")
    by_title = {each.partition("\n")[0]: each.strip() for each in (*sections, section.removeprefix(TITLE))}
    RESULTS.write_text("\n".join([head, *(f"{TITLE}{each}\n" for each in by_title.values())]), encoding="utf-8")


if __name__ == "__main__":
    main()
