"""Check and time one GPU: agreement with the CPU, reproducibility of training, and the speed of each stage.

    python -m benchmarks.card                                # five to six minutes on an H200; writes card.csv
    python -m benchmarks.card --small                        # a short check of all rows, also on a CPU
    python -m benchmarks.card --checkpoint models/mine       # also compares a real model between device and CPU
    python -m benchmarks.card --pack models/mine mine.int8   # compresses a real model for the transfer

No network is needed, because the model is a random BERT-base, and the texts are random words, including words that
determine the class. Each row of the table is computed by one function in this file, and is written as soon as it is
computed. benchmarks/RESULTS.md explains the rows. If a row fails, the table contains the reason, the remaining rows
still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import csv
import gc
import hashlib
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import attnmix
from attnmix.core.device import chosen_device, device_name, prepare_device
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import split_file
from attnmix.measures.documents import read_documents, read_reviews
from attnmix.models.encoding import PASS_COST_TOKENS, batches_by_tokens, padded
from attnmix.models.loading import load_base
from attnmix.runs.capture import pass_cost_tokens
from benchmarks.stages import REPOSITORY, synchronize, write_parameters
from benchmarks.writer import ROWS as SHARD_ROWS
from benchmarks.writer import WIDTH as SHARD_WIDTH
from benchmarks.writer import measure_disk_rate
from stages.common.cli import as_command
from stages.common.parameters import read_parameters

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"word{number}" for number in range(2000)]
CLASS_WORDS = (["awful", "dull", "poor"], ["great", "lovely", "fine"])
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 192},
    "gpt2": {"n_embd": 96, "n_head": 4, "n_layer": 3},
    "modernbert": {"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 192},
    "llama": {"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 192},
}
"""The shapes of random models that are compared on device and CPU: post-LN, pre-LN, gated, with rotary positions."""
SCALE = ".scale"  # suffix of the names of scales in a packed model
MEMORY_LIMIT = 0.002  # fraction of the GPU's memory, which is too small for the model
KILL_SECONDS = 300  # timeout until the first checkpoint of a training run


@dataclass(frozen=True)
class Size:
    """The shape of the model, and the numbers of texts for training, capture and measures."""

    model: dict[str, int] = field(default_factory=dict)  # changes to the configuration of BERT-base
    train: int = 1024
    test: int = 512
    words: int = 250  # number of words in the longest text
    measured: int = 512
    batch_texts: int = 32
    batch_tokens: tuple[int, ...] = (4096, 16384, 65536)


SMALL_MODEL = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
SMALL = Size(SMALL_MODEL, train=48, test=16, words=30, measured=4, batch_texts=8, batch_tokens=(256, 1024))


@dataclass(frozen=True)
class Card:
    """The working folder of the stages, the size of the benchmark, the device, and the user's model."""

    run: Run
    size: Size
    device: torch.device
    checkpoint: Path | None
    """A model folder, a file written by `pack`, or None."""

    def write_parameters(self, **sections: dict[str, Any]) -> None:
        """Write `params.yaml` with the benchmark's settings, those in `sections`, and defaults for all other keys."""
        longest = self.size.words + 2
        values: dict[str, dict[str, Any]] = {
            "finetune": {"batch_size": self.size.batch_texts, "max_length": longest, "epochs": 2},
            "capture": {"max_length": longest, "drawn": self.size.test},
            "measure": {"documents": self.size.measured, "gradient_documents": 0, "matrices": []},
            "faithfulness": {"documents": 8, "max_length": min(longest, 96)},
        }
        for name, keys in sections.items():
            values[name] |= keys
        write_parameters(self.run.root, **values)

    def stage(self, name: str) -> float:
        """Run a stage in this process, and return its duration in seconds."""
        with chdir(self.run.root):
            parameters = read_parameters()
            synchronize()
            start = time.perf_counter()
            import_module(f"stages.{name}").main(parameters)
            synchronize()
            return time.perf_counter() - start

    def start_finetune(self, root: Path) -> subprocess.Popen[bytes]:
        """Start the stage `finetune` in the folder `root`, in a separate process."""
        folders = [str(REPOSITORY)]
        if os.environ.get("PYTHONPATH"):
            folders.append(os.environ["PYTHONPATH"])
        return subprocess.Popen(
            [sys.executable, "-m", "stages", "finetune"],
            cwd=root,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )


class NotHereError(Exception):
    """Raised if a row cannot be measured on this machine; the message is the reason."""


def machine(card: Card) -> str:
    """Return the device and the versions of CUDA, torch and transformers."""
    name = device_name(card.device)
    if card.device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(card.device).total_memory
        name += f", {memory_bytes / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"{name}; torch {torch.__version__}, transformers {version('transformers')}"


def same_numbers(name: str) -> Callable[[Card], str]:
    """Return a function that compares the results of a random model of the family `name` on the device and the CPU."""

    def row(card: Card) -> str:
        folder = card.run.root / "families" / name
        write_model(folder, name, FAMILIES[name])
        return compared(folder, card.device)

    return row


def same_numbers_of_a_checkpoint(card: Card) -> str:
    """Return the largest difference between the results on this device and on the CPU for a real model."""
    if card.checkpoint is None:
        raise NotHereError("no --checkpoint")
    if not card.checkpoint.is_file():
        return compared(card.checkpoint, card.device)
    folder = card.run.root / "unpacked"
    unpack(card.checkpoint, folder)
    return compared(folder, card.device)


def compared(folder: Path, device: torch.device) -> str:
    """Return, as text, the largest absolute difference between results (ratios, matrices) on the device and the CPU.

    Raise `AssertionError` if this difference is larger than 1e-4. `folder` contains the model.
    """
    texts = random_texts(4, 20, seed=3)["text"].tolist()
    on_device = attnmix.measure(attnmix.load(folder, device=device), texts)
    on_cpu = attnmix.measure(attnmix.load(folder, device="cpu"), texts)
    differences = []
    for ratios, expected in zip(on_device.ratios_by_text, on_cpu.ratios_by_text, strict=True):
        differences.append(np.abs(ratios - expected).max())
    for name in ("norm", "value_zeroing"):
        matrix_difference = on_device.matrix(name).to_numpy() - on_cpu.matrix(name).to_numpy()
        differences.append(np.nanmax(np.abs(matrix_difference), initial=0))
    largest = max(differences)
    if not largest <= 1e-4:
        raise AssertionError(f"ratios or matrices differ by {largest:.2g}")
    return f"differ by {largest:.1g} at most"


def tensor_float(card: Card) -> str:
    """Check that ratios do not change if the user enables TensorFloat-32, and that this setting is kept."""
    folder = card.run.root / "families" / "bert"
    texts = random_texts(4, 20, seed=3)["text"].tolist()
    model = attnmix.load(folder, device=card.device)
    expected = attnmix.measure(model, texts)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        result = attnmix.measure(model, texts)
        setting_afterwards = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    pairs = zip(result.ratios_by_text, expected.ratios_by_text, strict=True)
    are_equal = all(np.array_equal(ratios, expected_ratios) for ratios, expected_ratios in pairs)
    if not are_equal or setting_afterwards != "high":
        raise AssertionError(f"the same bytes: {are_equal}; the setting afterwards: {setting_afterwards}")
    return "the same bytes, and the user's setting is put back"


def training(**changes: Any) -> Callable[[Card], str]:
    """Return a function that trains with `changes` to the section `finetune` and returns speed, accuracy and memory."""

    def row(card: Card) -> str:
        if changes.get("precision") == "fp16" and card.device.type == "cpu":
            raise NotHereError("fp16 needs a GPU")
        card.write_parameters(finetune=changes)
        with watched(card.device) as use, training_speed() as speeds, collect_messages(" s per step ") as steps:
            card.stage("finetune")
        accuracy = card.run.metrics("finetune")["test"]["accuracy"]
        return f"{speeds[0]:,.0f} samples/s ({steps[0]}), accuracy {accuracy:.2f}, {use}"

    return row


def training_twice(card: Card) -> str:
    """Check that two training runs, and a third one that is killed and resumed, result in identical weights."""
    digests = {}
    for name in ("once", "again", "killed"):
        root = card.run.root / name
        lay_out(root, card.size)
        Card(Run(root), card.size, card.device, None).write_parameters()
        process = card.start_finetune(root)
        if name == "killed":
            kill_after_a_checkpoint(process, root)
            process = card.start_finetune(root)  # resumes the training run
        _, error = process.communicate()
        if process.returncode:
            raise AssertionError(error.decode(errors="replace").strip().splitlines()[-1])
        if name == "killed" and b"resumes from" not in error:
            raise AssertionError("the killed training run restarted from the beginning")
        weights = (Run(root).finetuned / "model.safetensors").read_bytes()
        digests[name] = hashlib.sha256(weights).hexdigest()
    if len(set(digests.values())) > 1:
        raise AssertionError(f"the weights differ: {digests}")
    return "the same bytes, resumed after SIGKILL too"


def kill_after_a_checkpoint(process: subprocess.Popen[bytes], root: Path) -> None:
    """Kill a training run in the folder `root` (SIGKILL) after its first checkpoint.

    Raise `AssertionError` if the process ends, or `KILL_SECONDS` pass, before the first checkpoint.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while not list(root.glob(".unfinished/finetune/*/checkpoint-*/trainer_state.json")):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError("the training run ended without a checkpoint")
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def out_of_memory(stage: str) -> Callable[[Card], str]:
    """Return a function that runs a stage with too little GPU memory, and checks and returns its error message.

    The message must be one line that names the parameters to reduce.
    """

    def row(card: Card) -> str:
        """Run the stage with a memory limit, and return the end of its error message."""
        if card.device.type != "cuda":
            raise NotHereError("no NVIDIA GPU")
        card.write_parameters()
        torch.cuda.set_per_process_memory_fraction(MEMORY_LIMIT)
        try:
            with as_command(stage):
                card.stage(stage)
        except SystemExit as error:
            line = str(error.code)
        else:
            raise AssertionError("the memory limit was not reached")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if not line.startswith(f"error: {stage}: out of memory (") or "; reduce " not in line:
            raise AssertionError(line)
        return f"one line: ...{line[line.index('; reduce') :]}"

    return row


def capture_speed(index: int) -> Callable[[Card], str]:
    """Return a function that compares the speed of `capture` with that of bare forward passes, and measures the disk.

    `index` selects one of the batch sizes.
    """

    def row(card: Card) -> str:
        """Return the speed of `capture`, of forward passes and of the disk."""
        if index >= len(card.size.batch_tokens):
            raise NotHereError("--small has fewer sizes")
        batch_tokens = card.size.batch_tokens[index]
        card.write_parameters(capture={"batch_tokens": batch_tokens})
        if index == 0:  # later rows use the same tokens
            card.stage("tokenize")
        vectors = np.random.default_rng(0).normal(size=(SHARD_ROWS, SHARD_WIDTH)).astype(np.float16)
        rate = measure_disk_rate(card.run.root, vectors)
        return f"{compare_with_bare(card, 'capture', 'captured', batch_tokens)}; disk: {rate:.2f} GB/s in one thread"

    return row


def measure_speed(index: int) -> Callable[[Card], str]:
    """Return a function that compares the speed of `measure` (including its controls) to that of bare forward passes.

    `index` selects one of the batch sizes.
    """

    def row(card: Card) -> str:
        """Return the speed of `measure` and of forward passes."""
        batch_tokens = card.size.batch_tokens[index]
        capture = {"batch_tokens": batch_tokens, "drawn": 0, "documents": [0]}
        card.write_parameters(finetune={"epochs": 0}, capture=capture)
        if index == 0:  # later rows use the same tokens
            card.stage("tokenize")
        return compare_with_bare(card, "measure", "measured", batch_tokens)

    return row


def faithfulness(card: Card) -> str:
    """Return the time and the memory of the stage `faithfulness` on the texts that `measure` uses."""
    with watched(card.device) as use:
        seconds = card.stage("faithfulness")
    rows = len(card.run.table("faithfulness/faithfulness"))
    return f"{seconds:.0f} s, {rows} rows, {use}"


def compare_with_bare(card: Card, stage: str, kind: str, batch_tokens: int) -> str:
    """Return the speed of a stage and of bare forward passes of the same texts, and the stage's limiting factor.

    `kind` is `captured` for the texts of the stage `capture`, and `measured` for the texts of the stage `measure`.
    """
    tokens, bare_seconds = bare_passes(card, kind, batch_tokens)
    with watched(card.device) as use, collect_messages("limited by: ") as limits:
        seconds = card.stage(stage)
    speeds = f"{tokens / seconds:,.0f} tokens/s (bare {tokens / bare_seconds:,.0f})"
    return f"{batch_tokens} a batch: {speeds}, {use}; log: {limits[0]}"


def bare_passes(card: Card, kind: str, batch_tokens: int) -> tuple[int, float]:
    """Return the number of tokens in the `captured` or `measured` texts, and the duration of their passes in seconds.

    The forward passes use the model of transformers, without hooks.
    """
    base: Any = load_base(card.run.finetuned).to(card.device)
    base.set_attn_implementation("sdpa")
    run = Run(card.run.root)  # a new instance without cached tables
    is_captured = kind == "captured"
    documents = read_documents(run.captured) if is_captured else read_reviews("measured", run.drawn_reviews)
    texts = [document.ids.tolist() for document in documents]
    pass_cost = pass_cost_tokens(card.device) if is_captured else PASS_COST_TOKENS
    numbers = batches_by_tokens([len(text) for text in texts], batch_tokens, pass_cost)
    batches = [padded([texts[number] for number in batch], 0, card.device) for batch in numbers]
    with torch.inference_mode():
        base(**batches[0])  # excludes one-time costs
        synchronize()
        start = time.perf_counter()
        for batch in batches:
            base(**batch)
        synchronize()
        seconds = time.perf_counter() - start
    return sum(map(len, texts)), seconds


@dataclass
class Use:
    """GPU utilization and peak memory of a stage."""

    peak_bytes: int = 0
    busy: list[float] = field(default_factory=list)
    """GPU utilization in per cent, sampled five times per second."""

    def __str__(self) -> str:
        memory = f"peak {self.peak_bytes / 2**30:.1f} GiB" if self.peak_bytes else "no GPU memory"
        if not self.busy:
            return memory
        return f"{memory}, GPU busy {statistics.mean(self.busy):.0f} %"


@contextmanager
def watched(device: torch.device) -> Iterator[Use]:
    """Measure the use of the GPU within the context; the fields of the yielded object are set when the context ends."""
    use = Use()
    if device.type != "cuda":
        yield use
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    query = ["nvidia-smi", f"--id={device.index}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        sampler = subprocess.Popen([*query, "-lms=200"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        sampler = None  # the utilization remains unknown
    try:
        yield use
    finally:
        use.peak_bytes = torch.cuda.max_memory_allocated(device)
        if sampler is not None:
            sampler.terminate()
            lines = sampler.communicate()[0].split()
            use.busy = [float(line) for line in lines if line.isdigit()]


@contextmanager
def collect_messages(phrase: str) -> Iterator[list[str]]:
    """Yield a list to which all log messages that contain `phrase` are appended within the context."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if phrase in record.getMessage():
                messages.append(record.getMessage())

    logger = logging.getLogger()
    handler = Collector()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def training_speed() -> Iterator[list[float]]:
    """Yield a list to which the samples per second of each training run, as reported by `Trainer`, are appended."""
    speeds: list[float] = []
    train = transformers.Trainer.train

    def train_and_report(trainer: transformers.Trainer, **options: Any) -> Any:
        output = train(trainer, **options)
        speeds.append(output.metrics["train_samples_per_second"])
        return output

    transformers.Trainer.train = train_and_report
    try:
        yield speeds
    finally:
        transformers.Trainer.train = train


def random_texts(number: int, longest: int, seed: int) -> pd.DataFrame:
    """Return a table of `number` random texts with alternating classes, each with three words that reveal the class.

    Texts have fewer than `longest` words; the columns are `text`, `label` and `label_name`.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(number):
        label = index % 2
        words = generator.choice(WORDS, generator.integers(longest // 3, longest - 3)).tolist()
        words[1:1] = generator.choice(CLASS_WORDS[label], 3).tolist()  # inserted after the first word
        rows.append((" ".join(words), label, ("negative", "positive")[label]))
    return pd.DataFrame(rows, columns=["text", "label", "label_name"])


def write_model(folder: Path, family: str, shape: dict[str, Any]) -> None:
    """Write a random classifier of a model family with the configuration `shape`, and a word-level tokenizer."""
    vocabulary = [*SPECIAL, *WORDS, *CLASS_WORDS[0], *CLASS_WORDS[1]]
    _create_tokenizer(vocabulary).save_pretrained(folder)
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    # BERT-base keeps its default vocabulary size, and therefore its usual size.
    rows = {} if family == "bert" and not shape else {"vocab_size": len(vocabulary)}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **rows, **ids, **shape)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def _create_tokenizer(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer that encodes texts as `[CLS] ... [SEP]`."""
    model = models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(token, vocabulary.index(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def lay_out(root: Path, size: Size) -> None:
    """Write the inputs of the stage `finetune` to the folder `root`: a dataset and a BERT model."""
    run = Run(root)
    run.reviews.mkdir(parents=True)
    texts_per_split = {"train": size.train, "validation": size.test, "test": size.test}
    for seed, (split, number) in enumerate(texts_per_split.items()):
        random_texts(number, size.words, seed).to_parquet(split_file(split, run.reviews), index=False)
    write_model(run.pretrained, "bert", size.model)


def pack(folder: Path, file: Path) -> None:
    """Compress the checkpoint in `folder` to a `file` of about a quarter of its size.

    Matrices are rounded to int8, with a scale for each row; other tensors are unchanged.
    """
    packed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim != 2 or not tensor.is_floating_point():
            packed[name] = tensor
            continue
        scales = tensor.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        packed[name] = (tensor.float() / scales).round().to(torch.int8)
        packed[name + SCALE] = scales
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    save_file(packed, file, metadata=texts)


def unpack(file: Path, folder: Path) -> None:
    """Unpack `file`, which was written by `pack`, into the new folder `folder`.

    The matrices of the checkpoint have the values to which `pack` rounded them.
    """
    from safetensors import safe_open

    folder.mkdir(parents=True)
    with safe_open(file, "pt") as opened:
        for name, text in opened.metadata().items():
            (folder / name).write_text(text, encoding="utf-8")
    packed = load_file(file)
    tensors = {}
    for name, tensor in packed.items():
        if not name.endswith(SCALE):
            scales = packed.get(name + SCALE)
            tensors[name] = tensor if scales is None else tensor.float() * scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


ROWS: dict[str, Callable[[Card], str]] = {
    "machine": machine,
    **{f"numbers of {name}": same_numbers(name) for name in FAMILIES},
    "numbers of --checkpoint": same_numbers_of_a_checkpoint,
    "TensorFloat-32 on": tensor_float,
    "fine-tuning, bf16": training(precision="bf16"),
    "fine-tuning, fp16": training(precision="fp16"),
    "fine-tuning, LoRA": training(lora={"rank": 8, "alpha": 16, "targets": "all-linear"}),
    "fine-tuning, fp32": training(),
    "capture, first size": capture_speed(0),
    "capture, second size": capture_speed(1),
    "capture, third size": capture_speed(2),
    "measure, first size": measure_speed(0),
    "measure, second size": measure_speed(1),
    "faithfulness": faithfulness,
    "out of memory in finetune": out_of_memory("finetune"),
    "out of memory in capture": out_of_memory("capture"),
    "training, repeated and resumed": training_twice,
}
"""The rows of the table, in order. `capture`, `measure` and `faithfulness` use the model of "fine-tuning, fp32"."""


def main() -> None:
    """Write and print the table, or only compress a model (`--pack`)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model and few texts, also for a CPU")
    parser.add_argument("--checkpoint", type=Path, help="folder of a real model, or a file written by --pack")
    parser.add_argument("--pack", nargs=2, type=Path, metavar=("FOLDER", "FILE"), help="only compress a model")
    parser.add_argument("--to", type=Path, default=Path("card.csv"), help="file of the table")
    arguments = parser.parse_args()
    if arguments.pack:
        pack(*arguments.pack)
        return
    with tempfile.TemporaryDirectory() as folder:
        size = SMALL if arguments.small else Size()
        checkpoint = arguments.checkpoint and arguments.checkpoint.absolute()
        card = Card(Run(Path(folder)), size, chosen_device(), checkpoint)
        prepare_device(card.device)
        lay_out(card.run.root, size)
        all_succeeded = write_rows(card, arguments.to)
    sys.exit(0 if all_succeeded else 1)


def write_rows(card: Card, file: Path) -> bool:
    """Compute all rows, print them, and write them to a csv file; return False if a row failed."""
    all_succeeded = True
    with file.open("w", encoding="utf-8", newline="") as opened:
        table = csv.writer(opened, lineterminator="\n")
        table.writerow(["row", "result", "seconds"])
        print("| row | result | seconds |\n| --- | --- | ---: |", flush=True)
        for title, compute_row in ROWS.items():
            start = time.perf_counter()
            try:
                result = compute_row(card)
            except NotHereError as reason:
                result = f"not here: {reason}"
            except Exception as error:  # the remaining rows must still run
                all_succeeded = False
                result = f"FAILED: {type(error).__name__}: {error}".splitlines()[0]
            seconds = f"{time.perf_counter() - start:.1f}"
            table.writerow([title, result, seconds])
            opened.flush()
            print(f"| {title} | {result} | {seconds} |", flush=True)
            gc.collect()
    return all_succeeded


if __name__ == "__main__":
    main()
