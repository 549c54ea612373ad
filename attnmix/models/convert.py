"""Turn a classifier's state dict, `torch.save(model.state_dict(), ...)`, into a model folder without running any code.

    python -m attnmix.models.convert trained.pth --like bert-base-uncased --to trained --classes negative positive

The classifier is the library's own, or a module that holds the library's model and one Linear layer on what the
library's classifier reads: for BERT the pooled vector of [CLS]. `--like` is a hub identifier or a folder.
"""

import argparse
import pickle
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from attnmix.core.disk import check_new_folder
from attnmix.core.errors import InputError, first_line
from attnmix.core.terminal import printable
from attnmix.models.loading import class_labels, last_linear

BUFFERS = ("position_ids", "token_type_ids")  # saved by older versions of the library; they are no weights


def convert(file: Path, like: str, folder: Path, classes: list[str]) -> None:
    """Write the checkpoint `folder`; raise `InputError` where `file` holds no classifier of `like`'s architecture."""
    check_new_folder("--to", folder)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        state = {name: tensor for name, tensor in loaded.items() if not name.endswith(BUFFERS)}
    except (AttributeError, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise InputError(f"{file}: {type(error).__name__}; allowed: a state dict, which holds tensors alone") from error
    config = AutoConfig.from_pretrained(like, **class_labels(dict(enumerate(classes))), trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    body = f"{model.base_model_prefix}."
    first = next(name for name in model.state_dict() if name.startswith(body)).removeprefix(body)
    encoder = next((name.removesuffix(first) for name in state if name.endswith(first)), body)
    prefixes = {"": "", encoder.removesuffix(body): "", encoder: body}  # the prefix that DataParallel adds goes
    head = {name.rpartition(".")[0] for name in state if not name.startswith(encoder)}
    if len(head) == 1:
        prefixes[f"{head.pop()}."] = f"{last_linear(model)[0]}."
    longest = {name: max(filter(name.startswith, prefixes), key=len) for name in state}
    try:
        model.load_state_dict({prefixes[old] + name.removeprefix(old): state[name] for name, old in longest.items()})
    except RuntimeError as error:
        raise InputError(f"{file} does not fit --like: {' '.join(str(error).split())[:300]}") from error
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(like, trust_remote_code=False).save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, help="the file that torch.save wrote")
    parser.add_argument("--like", required=True, help="a model of the same architecture")
    parser.add_argument("--to", type=Path, required=True, help="the new folder")
    parser.add_argument("--classes", nargs="+", required=True, help="the classes' names by their numbers")
    options = parser.parse_args()
    try:
        convert(options.state, options.like, options.to, options.classes)
    except (InputError, OSError) as error:
        parser.exit(1, f"error: {printable(first_line(error))}\n")
