"""Load a checkpoint folder, as an encoder or as a classifier, and prove that it can be measured.

Weights are read as safetensors only, and no remote code is run.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch.nn import Linear
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.errors import InputError, first_line
from attnmix.core.terminal import without_library_messages
from attnmix.models.attention import attention_by, implementation_of, observed
from attnmix.models.checkpoint import LOCAL, POSITIONS_AFTER_PADDING, load_config, load_tokenizer
from attnmix.models.encoding import encode
from attnmix.models.families import family_of
from attnmix.models.segments import check_segments, read_segments
from attnmix.store.texts import Text, whole_text

POOLER = "pooler"  # belongs to the head: a checkpoint without one gets a new one, to be trained
SINGLE_LABEL = "single_label_classification"
"""The `problem_type` of a model that chooses one class."""
REGRESSION = "regression"
"""That of a model without one and with one output, to the library."""
RELATIVE_TOLERANCE = 1e-4  # rounding is 1e-6
SAMPLE_REVIEWS = 1000  # in which words are looked up
MAX_UNKNOWN_SHARE = 0.5  # of the words; beyond it most vectors are one token's
SHAPE_KEYS = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size")


def load_base(folder: Path) -> PreTrainedModel:
    """Return the checkpoint without any head, its attention observable (`attnmix.models.attention`)."""
    return _load(transformers.AutoModel, folder, attn_implementation=implementation_of(load_config(folder)))[0]


def load_classifier(
    folder: Path, names: Mapping[Any, str] | None = None, trained: bool = False, **options: Any
) -> PreTrainedModel:
    """Return the checkpoint as a sequence classifier; a missing head is initialised from torch's seed.

    `names` are the classes by number, and a head for another number of them is replaced; without them the
    checkpoint's own classes stay. `options` go to `from_pretrained` (`attn_implementation`). Raises `InputError` for a
    model that cannot classify, and with `trained` for a missing head.
    """
    config = load_config(folder)
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        problem = f"is of the family {config.model_type!r}, which has no sequence classifier in transformers"
        raise InputError(f"model.name: {folder} {problem}")
    if names is not None:
        options |= class_labels(names) | {"problem_type": SINGLE_LABEL}
    model, new = _load(transformers.AutoModelForSequenceClassification, folder, **options)
    if trained and new:
        problem = f"has no trained classification head ({_shortened(new)} are not in its weights)"
        raise InputError(f"model.name: {folder} {problem}; allowed: one that has, or finetune.epochs of 1 or more")
    if names is not None and new:
        logging.info("a new classification head is trained: %s", ", ".join(new))
    padding, rows = load_tokenizer(folder).pad_token_id, model.get_input_embeddings().num_embeddings
    if padding >= rows:
        raise InputError(f"{folder}: its tokenizer pads with token {padding}, but its embedding has only {rows} rows")
    if config.model_type not in POSITIONS_AFTER_PADDING:
        model.config.pad_token_id = padding
    return model


def load_trained(folder: Path, names: Mapping[Any, str]) -> PreTrainedModel:
    """Return the checkpoint's own classifier, its classes in the order of the data's: `names` by number.

    Classes are matched by name, whatever the case, else by their order, with a warning. Raises `InputError` where the
    checkpoint has no trained head, another number of classes, or does not choose one class.
    """
    model = load_classifier(folder, trained=True)
    classes = {str(name): int(number) for number, name in (model.config.id2label or {}).items()}
    if len(classes) != len(names) or model.config.problem_type not in (None, SINGLE_LABEL):
        problem_type = model.config.problem_type or (SINGLE_LABEL if len(classes) > 1 else REGRESSION)
        kind = f"{problem_type} with {len(classes)} classes ({_shortened(list(classes))})"
        allowed = f"one of {len(names)} classes ({_shortened(list(names.values()))})"
        raise InputError(f"model.name: {folder} is made for {kind}; allowed without fine-tuning: {allowed}")
    numbers = {name.casefold(): number for name, number in classes.items()}
    try:
        order = [numbers[names[number].casefold()] for number in sorted(names)]
    except KeyError:
        order = list(classes.values())
        pairs = ", ".join(f"{name} for {names[number]}" for name, number in classes.items())
        logging.warning("the model's classes are taken in their order, as their names are not the data's: %s", pairs)
    with torch.no_grad():
        for parameter in last_linear(model)[1].parameters():
            parameter.copy_(parameter[order])
    model.config.update(class_labels(names))
    return model


def class_labels(names: Mapping[Any, str]) -> dict[str, Any]:
    """Return the keys of `config.json` that name the classes; `names` by number."""
    return {"id2label": dict(names), "label2id": {name: number for number, name in names.items()}}


def last_linear(model: PreTrainedModel) -> tuple[str, Linear]:
    """Return the name of the head's last Linear, which has a row for each class, and the module."""
    encoder = set(model.base_model.modules())
    linears = [(name, each) for name, each in model.named_modules() if isinstance(each, Linear) and each not in encoder]
    return linears[-1]


def _load(kind: Any, folder: Path, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """Return the model in float32 and eval mode, and the names of the head's weights that are new.

    Raises `InputError` where the encoder's weights are missing or of another shape: they would be random ones.
    """
    settings = {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True} | LOCAL | options
    settings["ignore_mismatched_sizes"] = True  # else the library's error names no weight
    try:
        with without_library_messages():  # such as a table of weights that are missing: they are named below
            model, info = kind.from_pretrained(folder, **settings)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{folder}: the model cannot be loaded: {first_line(error)}") from error
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        if name.startswith(prefix) or "id2label" not in options:
            shapes = f"{name} has the shape {list(stored)}, config.json asks for {list(wanted)}"
            raise InputError(f"{folder}: the model cannot be loaded: {shapes}")
    missing = sorted(name for name in info["missing_keys"] if name.startswith(prefix) and POOLER not in name)
    if missing:
        lacking = f"{len(missing)} tensors of the model that config.json describes ({_shortened(missing)})"
        raise InputError(f"{folder}: its weights lack {lacking}")
    for_reading(model)
    return model, sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})


def for_reading(model: PreTrainedModel) -> None:
    """Put a model in eval mode, without a cache of keys and values, its base model called with a text alone."""
    for config in configurations(model):
        config.use_cache = False
    if hasattr(model.base_model, "_shift_right"):
        model.base_model.register_forward_pre_hook(with_decoder_inputs, with_kwargs=True)
    model.eval()


def configurations(model: PreTrainedModel) -> list[Any]:
    """Return the configurations of a model and of its parts: T5's stacks have copies."""
    return [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]


def with_decoder_inputs(base: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """Give T5's base model its decoder's tokens, which BART's makes of the encoder's (a hook before a forward pass)."""
    ids = arguments[0] if arguments else options.get("input_ids")
    if ids is not None and options.get("decoder_input_ids") is None and hasattr(base, "_shift_right"):
        options = options | {"decoder_input_ids": base._shift_right(ids)}
    return arguments, options


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def check_model(folder: Path, texts: Sequence[Text]) -> None:
    """Raise `InputError` for a model that cannot read `texts`, is of no known family, or attends in another way.

    The first text runs twice, by the library's own attention and by the one that the measures observe.
    """
    family_of(load_config(folder))
    base: Any = load_base(folder)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(folder, tokenizer, base.get_input_embeddings().num_embeddings)
    sample = texts[:SAMPLE_REVIEWS]
    _check_words(folder, tokenizer, list(map(whole_text, sample)))
    check_segments(base.config, tokenizer, [text for text in sample if isinstance(text, tuple)])
    read_segments(base, tokenizer, any(isinstance(text, tuple) for text in sample))
    tokens = torch.tensor(encode(tokenizer, texts[:1], 32))
    with torch.inference_mode():
        expected = base(tokens).last_hidden_state
        with attention_by(observed(lambda *_: None), base):
            vectors = base(tokens).last_hidden_state
    if not expected.isfinite().all():
        raise InputError(f"model.name: {folder} gives NaN or infinite values for a review; its weights are broken")
    error = float((vectors - expected).abs().max() / expected.abs().max())
    if not error <= RELATIVE_TOLERANCE:  # not a number is no agreement either
        reason = f"vectors by query, key, value and mask alone differ by {error:.2g} of their size"
        raise InputError(f"model.name: {folder} attends to tokens in a way that is not supported: {reason}")


def check_comparable(base: Path, named: Path, texts: Sequence[Text]) -> None:
    """Raise `InputError` where two checkpoints cannot be compared token by token and layer by layer."""
    for key in SHAPE_KEYS:
        first, second = (getattr(load_config(folder), key) for folder in (base, named))
        if first != second:
            raise InputError(f"model.base: its {key} is {first}, that of model.name {second}; allowed: the same")
    tokenizers = [load_tokenizer(folder) for folder in (base, named)]
    for text in texts[:SAMPLE_REVIEWS]:
        sides = (text,) if isinstance(text, str) else text
        if tokenizers[0](*sides)["input_ids"] != tokenizers[1](*sides)["input_ids"]:
            problem = f"its tokenizer reads {sides[0][:60]!r} otherwise than that of model.name"
            raise InputError(f"model.base: {problem}; allowed: the same tokenizer")


def _check_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
    """Raise `InputError` where a text can give a token without a row; special tokens' names in a text are text."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    known = {number: token for token, number in tokenizer.get_vocab().items() if token not in special}
    known |= {number: str(tokenizer.convert_ids_to_tokens(number)) for number in tokenizer("")["input_ids"]}
    if beyond := sorted(number for number in known if number >= rows):
        raise InputError(
            f"model.name: the tokenizer of {folder} knows {len(beyond)} tokens that the embedding of {rows} rows does "
            f"not have, the first {known[beyond[0]]!r} with the number {beyond[0]}; take the tokenizer of these weights"
        )


def _check_words(folder: Path, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
    """Raise `InputError` where the vocabulary lacks most words, each counted as often as it occurs."""
    words = Counter(word for text in texts for word in re.findall(r"\w+", text))
    if tokenizer.unk_token_id is None or not words:
        return
    encoded = tokenizer(list(words), add_special_tokens=False)["input_ids"]
    unknown = [word for word, ids in zip(words, encoded, strict=True) if tokenizer.unk_token_id in ids]
    share = sum(words[word] for word in unknown) / words.total()
    extent = f"{100 * share:.1f} % of the words of {len(texts)} reviews"
    if share > MAX_UNKNOWN_SHARE:
        problem = f"has no token for {extent}, such as {', '.join(map(repr, unknown[:3]))}"
        raise InputError(f"model.name: the vocabulary of {folder} {problem}; allowed: a model of the reviews' language")
    if unknown:
        logging.info("unknown to the model's tokenizer: %s", extent)
