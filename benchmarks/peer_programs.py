"""Programs that use attnmix and other packages, for the comparison in `benchmarks.peers`.

    python peer_programs.py PACKAGE FOLDER

Each program runs in a Python environment in which its package is installed. `FOLDER` contains the models `encoder`
(BERT) and `decoder` (GPT-2), which have the same tokenizer, and `texts.json`. The program prints `ready` after loading.
It then reads commands from standard input: `run` computes the numbers and prints the wall and processor seconds of the
run, and the processor seconds of the process; `save` writes the numbers of the last run to `PACKAGE.npy` and prints
`saved`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Program = Callable[[], Array]
"""A function without arguments that computes and returns the compared numbers."""
VALUE_ZEROING_TEXTS = 2  # number of texts in the slowest comparison
VALUE_ZEROING_WORDS = 20


def main() -> None:
    """Load the program of a package, and execute the commands from standard input."""
    package = sys.argv[1]
    folder = Path(sys.argv[2])
    texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    run = PROGRAMS[package](folder, texts)
    print("ready", flush=True)
    numbers: Array = np.empty(0)
    for command in sys.stdin:
        if command.strip() == "save":
            np.save(folder / f"{package}.npy", numbers)
            print("saved", flush=True)
            continue
        wall_start = time.perf_counter()
        processor_start = time.process_time()
        numbers = run()
        processor_end = time.process_time()
        wall_seconds = time.perf_counter() - wall_start
        print(f"seconds {wall_seconds} {processor_end - processor_start} {processor_end}", flush=True)


def cut_texts(texts: list[str]) -> list[str]:
    """Return the first `VALUE_ZEROING_TEXTS` texts, truncated to `VALUE_ZEROING_WORDS` words."""
    return [" ".join(text.split()[:VALUE_ZEROING_WORDS]) for text in texts[:VALUE_ZEROING_TEXTS]]


def run_nnsight(folder: Path, texts: list[str]) -> Program:
    """Load the encoder, and return a function that computes the outputs of all layers `[layers, tokens, hidden]`."""
    import torch
    from nnsight import NNsight
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "encoder")
    base = AutoModel.from_pretrained(folder / "encoder").eval()
    model = NNsight(base)
    modules = dict(model.modules(names=True))  # by path, because `output` is an attribute of nnsight
    layers = [modules[f"model.encoder.layer.{number}"] for number in range(base.config.num_hidden_layers)]

    def run() -> Array:
        with torch.inference_mode(), model.trace(**tokenizer(texts, return_tensors="pt")):
            outputs = [layer.output for layer in layers].save()
        tensors = [output[0] if isinstance(output, tuple) else output for output in outputs]
        return np.asarray(torch.stack(tensors).flatten(1, 2).numpy())

    return run


def run_transformer_lens(folder: Path, texts: list[str]) -> Program:
    """Load the decoder, and return a function that computes the outputs of all layers `[layers, tokens, hidden]`.

    The function also runs the language modelling head, which the package requires.
    """
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "decoder")
    model = AutoModelForCausalLM.from_pretrained(folder / "decoder").eval()
    bridge = TransformerBridge.boot_transformers(str(folder / "decoder"), hf_model=model, tokenizer=tokenizer)
    names = [f"blocks.{number}.hook_out" for number in range(model.config.n_layer)]

    def run() -> Array:
        with torch.inference_mode():
            _, cache = bridge.run_with_cache(tokenizer(texts, return_tensors="pt")["input_ids"], names_filter=names)
        return np.asarray(torch.stack([cache[name] for name in names]).flatten(1, 2).numpy())

    return run


def run_inseq(folder: Path, texts: list[str]) -> Program:
    """Load the decoder, and return a function that computes Value Zeroing `[texts, layers - 1, tokens, sources]`.

    The last layer is omitted, because inseq measures it after the final norm. The tokens are those that inseq measures:
    the last token of the prompt and all later tokens, except the last token of the text.
    """
    import inseq

    model: Any = inseq.load_model(str(folder / "decoder"), "value_zeroing", device="cpu")
    prompt = texts[0].split()[0]

    def run() -> Array:
        matrices = []
        for text in cut_texts(texts):
            whole = f"{prompt} {text}"
            attribution = model.attribute(prompt, whole, attribute_target=False, show_progress=False)
            scores_STL = attribution.sequence_attributions[0].target_attributions.numpy()
            matrices.append(np.nan_to_num(scores_STL).transpose(2, 1, 0)[:-1])
        return np.stack(matrices)

    return run


def run_bertviz(folder: Path, texts: list[str]) -> Program:
    """Return a function that loads the encoder, writes the page of one text, and returns its attention weights.

    The weights `[layers, tokens, tokens]` are read from the page, and averaged over heads.
    """
    from bertviz import head_view
    from transformers import AutoModel, AutoTokenizer

    def run() -> Array:
        tokenizer = AutoTokenizer.from_pretrained(folder / "encoder")
        model = AutoModel.from_pretrained(folder / "encoder", attn_implementation="eager").eval()
        inputs = tokenizer(cut_texts(texts)[0], return_tensors="pt")
        attentions = model(**inputs, output_attentions=True).attentions
        tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
        page = head_view(attentions, tokens, html_action="return").data
        (folder / "bertviz.html").write_text(page, encoding="utf-8")
        weights = re.search(r'"attn": (\[.*?\]), "left_text"', page)
        assert weights is not None
        return np.array(json.loads(weights[1])).mean(1)

    return run


def run_attnmix(folder: Path, texts: list[str]) -> Program:
    """Return a function that loads the encoder, writes the page of one text, and returns its attention weights.

    The weights `[layers, tokens, tokens]` are averaged over heads.
    """
    import attnmix

    def run() -> Array:
        model = attnmix.load(folder / "encoder")
        result = attnmix.measure(model, cut_texts(texts)[0])
        (folder / "attnmix.html").unlink(missing_ok=True)
        result.to_html(folder / "attnmix.html")
        return np.asarray(result.matrix("attention").to_numpy())

    return run


PROGRAMS: dict[str, Callable[[Path, list[str]], Program]] = {
    "nnsight": run_nnsight,
    "transformer-lens": run_transformer_lens,
    "inseq": run_inseq,
    "bertviz": run_bertviz,
    "attnmix": run_attnmix,
}
"""The program of each package. It is called with the folder and the texts."""

if __name__ == "__main__":
    main()
