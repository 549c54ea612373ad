"""Capture compared with bare forward passes, a plain writer, and two interpretability libraries with the same writer.

Every way is a process of its own; its time begins once everything is imported and ends when all is written: each loads
the model and tokenizes the texts, the stage makes sure of its inputs too. All read the same texts and take the same
batches; only the stage starts a batch with each shard. The libraries are in no lock: `peers` needs a Python with them,

    some/other/python -m benchmarks.stages --cases peers
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnmix.core.names import ACTIVATIONS
from attnmix.store.features import read_features, stored_sites
from attnmix.store.runs import Run
from benchmarks.timing import Case
from stages.common.parameters import read_parameters

FINETUNED = Run(Path()).finetuned
PLAIN = Path("plain")
PADDED = 512
PEERS = ("nnsight", "transformer-lens")
ROUNDING = {"rtol": 1e-3, "atol": 1e-4}  # of float16; other batches give other last digits


class Work(NamedTuple):
    """The pipeline's own model, token ids, and padded batches in its order."""

    base: Any
    encoded: list[list[int]]
    pad: int
    batch_tokens: int
    folder: Path
    """Of the plain writer."""

    def batches(self, length: int | None = None) -> Iterator[tuple[list[int], Any]]:
        """Numbers of the texts and what the model reads; all texts padded to `length`, if it is given."""
        from attnmix.models.encoding import batches_by_tokens, padded

        lengths = [length or len(text) for text in self.encoded]
        for batch in batches_by_tokens(lengths, self.batch_tokens):
            inputs = padded([self.encoded[i] for i in batch], self.pad, self.base.device)
            if length:
                missing = length - inputs["input_ids"].shape[1]
                import torch

                pads = {"input_ids": self.pad, "attention_mask": 0}
                inputs = {k: torch.nn.functional.pad(v, (0, missing), value=pads[k]) for k, v in inputs.items()}
            yield batch, inputs


def work(folder: Path) -> Work:
    """Loaded and tokenized."""
    from attnmix.models.checkpoint import load_tokenizer
    from attnmix.models.encoding import encode
    from attnmix.models.loading import load_classifier
    from benchmarks.timing import device

    capture = read_parameters().capture
    tokenizer = load_tokenizer(FINETUNED)
    base = load_classifier(FINETUNED).base_model.to(device())
    encoded = encode(tokenizer, capture.texts, capture.max_length)
    return Work(base, encoded, tokenizer.pad_token_id, capture.batch_tokens, folder)


def timed(way: Callable[..., None], name: str) -> dict[str, float]:
    """Seconds of `way` once everything is imported."""
    for module in ("stages.capture", *IMPORTS.get(way, ())):
        importlib.import_module(module)
    folder = PLAIN / name
    # Left by an earlier run; DVC removes a stage's outputs before it runs.
    shutil.rmtree(ACTIVATIONS if way is pipeline else folder, ignore_errors=True)
    start = time.perf_counter()
    if way is pipeline:
        way()
    else:
        way(work(folder))
    return {name: time.perf_counter() - start}


def forward(ready: Work, length: int | None = None) -> None:
    """Nothing but the forward passes."""
    import torch

    with torch.inference_mode():
        for _, inputs in ready.batches(length):
            ready.base(**inputs).last_hidden_state.cpu()


def pipeline() -> None:
    """The stage, with the digest of its inputs."""
    from stages import capture, tokenize

    tokenize.main(read_parameters())
    capture.main(read_parameters())


def places(base: Any) -> dict[str, tuple[str, str]]:
    """Of every captured point its module's path, and whether its input or output is it."""
    from attnmix.models.families import family_of

    family, points = family_of(base.config), read_parameters().capture.points
    (stack,) = family.stacks
    layers = [path for path, _ in base.named_modules() if stack.is_layer(path)]
    found = {
        "layer_00/word_embedding": (family.word_embedding, "output"),
        "layer_00/embedding_output": (layers[0], "input"),
    }
    for number, layer in enumerate(layers, start=1):
        for point, (path, side) in stack.places().items():
            found[f"layer_{number:02d}/{point}"] = (f"{layer}.{path}".rstrip("."), side)
    return {name: place for name, place in found.items() if name.partition("/")[2] in points}


class Writer:
    """Rows of each point in one array of float16, `numpy.save` of each at the end."""

    def __init__(self, ready: Work) -> None:
        self.encoded, self.folder = ready.encoded, ready.folder
        self.starts = np.cumsum([0, *map(len, ready.encoded)])
        self.rows: dict[str, Any] = {}

    def keep(self, batch: list[int], features: Mapping[str, Any]) -> None:
        for name, value in features.items():
            block = value.half().cpu().numpy()
            if name not in self.rows:
                self.rows[name] = np.empty((self.starts[-1], block.shape[-1]), np.float16)
            for place, i in enumerate(batch):
                self.rows[name][self.starts[i] : self.starts[i + 1]] = block[place, : len(self.encoded[i])]

    def save(self) -> None:
        for name, array in self.rows.items():
            path = self.folder / f"{name}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, array)


def hooks(ready: Work) -> None:
    """A hook at every point."""
    import torch

    seen: dict[str, Any] = {}

    def keep(name: str, side: str) -> Callable[..., None]:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            seen[name] = inputs[0] if side == "input" else output

        return hook

    for name, (path, side) in places(ready.base).items():
        ready.base.get_submodule(path).register_forward_hook(keep(name, side))
    writer = Writer(ready)
    with torch.inference_mode():
        for batch, inputs in ready.batches():
            ready.base(**inputs)
            writer.keep(batch, seen)
    writer.save()


def hidden_states(ready: Work) -> None:
    """What the library itself gives: the residual stream, one vector a layer."""
    import torch

    writer = Writer(ready)
    with torch.inference_mode():
        for batch, inputs in ready.batches():
            levels = ready.base(**inputs, output_hidden_states=True).hidden_states
            points = ["embedding_output", *["layer_output"] * (len(levels) - 1)]
            writer.keep(batch, {f"layer_{i:02d}/{point}": levels[i] for i, point in enumerate(points)})
    writer.save()


def nnsight(ready: Work) -> None:
    """All points saved in one trace of each batch."""
    import torch
    from nnsight import NNsight

    model = NNsight(ready.base)
    # BERT's modules of the name `output` are hidden behind the library's own `output`, so by their paths.
    modules = dict(model.modules(names=True))
    envoys = [(name, modules[f"model.{path}"], side) for name, (path, side) in places(ready.base).items()]
    # A value is asked for in the order in which the model computes it; a layer's input before what it makes of it.
    writer = Writer(ready)
    with torch.inference_mode():
        for batch, inputs in ready.batches():
            with model.trace(**inputs):
                features = {}
                for name, envoy, side in envoys:
                    features[name] = envoy.input if side == "input" else envoy.output
                features.save()
            writer.keep(batch, features)
    writer.save()


LENS = {
    "word_embedding": "embed.hook_out",
    "embedding_output": "blocks.0.hook_in",
    "attention_heads": "attn.o.hook_in",
    "attention_output": "attn.o.hook_out",
    "attention_norm": "ln1.hook_out",
    "ffn_output": "mlp.out.hook_out",
    "layer_output": "hook_out",
}


def transformer_lens(ready: Work) -> None:
    """All points in the cache of each batch. Its bridge to BERT wants a head for masked words, which costs it more."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import BertForMaskedLM

    from attnmix.models.checkpoint import load_tokenizer

    model = BertForMaskedLM(ready.base.config)
    model.bert.load_state_dict(ready.base.state_dict(), strict=False)
    bridge = TransformerBridge.boot_transformers(
        str(FINETUNED), hf_model=model.eval(), tokenizer=load_tokenizer(FINETUNED)
    )
    names = {}
    for name in places(ready.base):
        layer, point = name.removeprefix("layer_").split("/")
        names[name] = LENS[point] if int(layer) == 0 else f"blocks.{int(layer) - 1}.{LENS[point]}"
    writer = Writer(ready)
    with torch.inference_mode():
        for batch, inputs in ready.batches():
            _, cache = bridge.run_with_cache(
                inputs["input_ids"], attention_mask=inputs["attention_mask"], names_filter=list(names.values())
            )
            writer.keep(batch, {name: cache[hook].flatten(2) for name, hook in names.items()})
    writer.save()


IMPORTS: dict[Callable[..., None], list[str]] = {
    nnsight: ["nnsight"],
    transformer_lens: ["transformer_lens.model_bridge"],
}
"""Of ways that need more than the stage."""


def same() -> str:
    """Every way that ran wrote the same rows as the stage."""
    sites, texts = stored_sites(ACTIVATIONS), len(read_parameters().capture.texts)
    compared = []
    for folder in sorted(PLAIN.iterdir()):
        names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.npy")]
        for site in (site for site in sites if str(site) in names):
            stored, plain = read_features(ACTIVATIONS, site), np.load(folder / f"{site}.npy")
            if not np.allclose(stored.astype(np.float64), plain, **ROUNDING):
                raise AssertionError(f"{folder.name}, {site}: {np.abs(stored.astype(float) - plain).max()} apart")
        compared.append(f"{folder.name.removesuffix(', numpy.save')} {len(names)}")
    tokens, hidden = stored.shape
    padded = f", {texts * PADDED} with padding to {PADDED}" if tokens < texts * PADDED else ""
    return (
        f"{texts} texts, {tokens} tokens{padded}, {len(sites)} points of {hidden} numbers, "
        f"{sum(path.stat().st_size for path in ACTIVATIONS.rglob('*') if path.is_file()) / 1e6:,.0f} MB. Times without "
        "imports, with loading; the same batches, with `sdpa`. Points whose rows are the stage's within the last digit "
        f"of float16: {', '.join(compared)}."
    )


def _ways(*chosen: tuple[str, Callable[..., None]]) -> dict[str, Callable[[], dict[str, float]]]:
    return {name: partial(timed, way, name) for name, way in chosen}


FORWARD, STAGE = ("bare forward passes", forward), ("stage capture", pipeline)
HOOKS = ("hooks, numpy.save", hooks)
HIDDEN = ("output_hidden_states, numpy.save", hidden_states)


def case(model: str, folder: str) -> Case:
    """Compare the stage with what one would write by hand."""
    whole = (f"forward passes padded to {PADDED}", partial(forward, length=PADDED))
    return Case(f"Capture, {model}", folder, same, _ways(FORWARD, STAGE, HIDDEN, HOOKS, whole))


def peers(model: str, folder: str) -> Case:
    """Compare the stage with interpretability libraries."""
    ways = []
    for name, way in zip(PEERS, (nnsight, transformer_lens), strict=True):
        try:
            ways.append((f"{name} {version(name)}, numpy.save", way))
        except PackageNotFoundError:
            continue
    title = f"Capture, {model}, compared with nnsight and TransformerLens"
    return Case(title, folder, same, _ways(FORWARD, STAGE, HOOKS, *ways))
