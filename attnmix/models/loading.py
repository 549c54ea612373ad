"""Functions that load a checkpoint folder as a base model or a classifier, and check whether models can be measured.

Weights are loaded only from safetensors files, and remote code is never executed.
"""

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import Linear
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.errors import InputError, in_one_line
from attnmix.core.store.texts import Text, whole_text
from attnmix.core.terminal import without_library_messages
from attnmix.models.attention import attention_by, implementation_of, observed
from attnmix.models.attention_edits import implementations
from attnmix.models.checkpoint import (
    LOCAL,
    POSITIONS_AFTER_PADDING,
    load_config,
    load_tokenizer,
    longest_text,
    padding_token,
)
from attnmix.models.encoding import check_words, encode, padded
from attnmix.models.families import check_config, family_of, find_layers, stack_layers
from attnmix.models.segments import check_segments, read_segments

POOLER = "pooler"  # part of the classification head; missing weights of the head are initialised and trained
SINGLE_LABEL = "single_label_classification"
"""The `problem_type` of a single-label classifier."""
REGRESSION = "regression"
"""The `problem_type` that transformers assumes for a model with one output and no explicit type."""
VECTOR_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Maximum allowed difference between the vectors of two forward passes, relative to their length, by dtype."""
MAX_SHOWN_NAMES = 3  # maximum number of classes or weights in a message
PROBE_TOKENS = 16  # number of tokens from all parts of the vocabulary in a trial forward pass
UNHOOKED = "unchanged modules (accelerate.hooks.remove_hook_from_module removes hooks of accelerate)"
"""The alternative to a replaced `forward` method in error messages."""
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
"""Arguments of T5 models that define the decoder input."""
CHECKED_TEXTS = 1000  # maximum number of texts in the vocabulary check
CHECKED_TOKENS = 32  # maximum number of tokens per text in trial forward passes
SHAPE_KEYS = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size")
"""Keys of config.json whose values must be equal in two models that are compared by token and layer."""
OLD_BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq|version|((attn|attention)\.(masked_)?bias))$")
"""Buffers that older versions of transformers saved among the weights, and newer versions compute from config.json:
positions, segments, rotary frequencies, causal masks and version numbers."""


class _Problem(NamedTuple):
    """A reason why a model cannot be measured, for an error message."""

    description: str
    allowed: str
    """The supported alternatives."""


def load_base(folder: Path) -> PreTrainedModel:
    """Return the base model of a checkpoint, without a head, with observable attention (`attnmix.models.attention`)."""
    implementation = implementation_of(load_config(folder))
    model, new_weights = load_weights(transformers.AutoModel, folder, implementation)
    base: Any = model
    if new_weights:  # only weights of the pooler can be missing; they were randomly initialised
        base.pooler = None
    return model


def load_classifier(
    folder: Path,
    names: Mapping[Any, str] | None = None,
    trained: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Return the checkpoint as a sequence classifier; a missing classification head is randomly initialised.

    If `names` (class names by index) are given, a head with a different number of classes is replaced. Otherwise, the
    classifier has the classes of the checkpoint. Raise `InputError` if the model's family has no sequence classifier,
    or if the head is missing although `trained` is True.
    """
    config = load_config(folder)
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        problem = f"is of the family {config.model_type!r}, which has no sequence classifier in transformers"
        raise InputError(f"model.name: {folder} {problem}; choose another model")
    model, new_head_weights = load_weights(
        transformers.AutoModelForSequenceClassification, folder, attn_implementation, names
    )
    if trained and new_head_weights:
        problem = f"has no trained classification head (its weights lack {_shorten(new_head_weights)})"
        raise InputError(
            f"model.name: {folder} {problem}; choose a trained classifier, or set finetune.epochs to 1 or more"
        )
    if names is not None and new_head_weights:
        logging.info("a new classification head is trained: %s", ", ".join(new_head_weights))
    padding = load_tokenizer(folder).pad_token_id
    embedding: Any = model.get_input_embeddings()
    _check_padding(str(folder), padding, embedding.num_embeddings)
    # In the families of `POSITIONS_AFTER_PADDING`, position indices depend on this ID, so it must not be changed.
    if config.model_type not in POSITIONS_AFTER_PADDING:
        model.config.pad_token_id = padding
    return model


def load_trained(folder: Path, names: Mapping[Any, str]) -> PreTrainedModel:
    """Return the checkpoint's classifier with its classes in the order of the data (`names` by index).

    Classes are matched by name, ignoring case. If the names differ, the classes are matched by order, with a warning.
    Raise `InputError` if the checkpoint lacks a trained head, has a different number of classes, or is not a
    single-label classifier.
    """
    model = load_classifier(folder, trained=True)
    classes = {str(name): int(number) for number, name in (model.config.id2label or {}).items()}
    _check_classes(folder, model.config.problem_type, classes, names)
    # Reorder the rows of the head's weight and bias; each row belongs to one class.
    order = _match_classes(classes, names)
    _, linear = last_linear(model)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(parameter[order])
    model.config.update(class_labels(names))
    return model


def _check_classes(
    folder: Path, problem_type: str | None, classes: Mapping[str, int], names: Mapping[Any, str]
) -> None:
    """Raise `InputError` unless the checkpoint is a single-label classifier with as many classes as the data.

    `classes` maps each class name of the checkpoint to its index; the indices must be consecutive, from 0. `names`
    contains the data's class names by index.
    """
    if len(classes) != len(names) or problem_type not in (None, SINGLE_LABEL):
        assumed_type = SINGLE_LABEL if len(classes) > 1 else REGRESSION  # as in transformers
        kind = f"{problem_type or assumed_type} with {len(classes)} classes ({_shorten(list(classes))})"
        allowed = f"{len(names)} classes ({_shorten(list(names.values()))})"
        raise InputError(f"model.name: {folder} is trained for {kind}; allowed without fine-tuning: {allowed}")
    if sorted(classes.values()) != list(range(len(classes))):
        numbers = ", ".join(map(str, classes.values()))
        problem = f"has the class indices {numbers} (id2label in config.json)"
        raise InputError(f"model.name: {folder} {problem}; allowed: 0 to {len(classes) - 1}")


def _match_classes(classes: Mapping[str, int], names: Mapping[Any, str]) -> list[int]:
    """Return the model's class index for each class of the data, in the order of the data's class indices.

    `classes` are the model's class indices by name, and `names` the data's class names by index. Classes are matched by
    name, ignoring case. If a name has no match, all classes are matched by order, with a warning.
    """
    numbers = {name.casefold(): number for name, number in classes.items()}
    names_in_order = [names[number].casefold() for number in sorted(names)]
    if all(name in numbers for name in names_in_order):
        return [numbers[name] for name in names_in_order]
    pairs = ", ".join(f"{name} for {names[number]}" for name, number in classes.items())
    logging.warning(
        "the model's classes are matched by order, because their names differ from those of the data: %s", pairs
    )
    return list(classes.values())


def class_labels(names: Mapping[Any, str]) -> dict[str, Any]:
    """Return the entries `id2label` and `label2id` of `config.json` for class names by index."""
    numbers = {name: number for number, name in names.items()}
    return {"id2label": dict(names), "label2id": numbers}


def last_linear(model: PreTrainedModel) -> tuple[str, Linear]:
    """Return the name and the module of the last Linear in the classification head, which outputs the logits."""
    modules_of_base = set(model.base_model.modules())
    linears = []
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module not in modules_of_base:
            linears.append((name, module))
    return linears[-1]


def load_weights(
    kind: Any, folder: Path, attn_implementation: str | None = None, names: Mapping[Any, str] | None = None
) -> tuple[PreTrainedModel, list[str]]:
    """Return the checkpoint as a model of the auto class `kind`, and the names of newly initialised head weights.

    The model is in float32 and eval mode. `names` are the class names of a new head by index. Raise `InputError` if the
    weights do not match `config.json`; transformers would randomly initialise missing and mismatched weights, and
    ignore unexpected ones.
    """
    config = load_config(folder)
    check_config(config, str(folder))
    if names is not None:
        config.update(class_labels(names) | {"problem_type": SINGLE_LABEL})
    options = {
        "config": config,
        "attn_implementation": attn_implementation,
        "use_safetensors": True,
        "dtype": torch.float32,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # otherwise, the error of transformers does not contain the weight's name
    }
    try:
        with without_library_messages():  # such as the table of missing weights, which are reported below
            model, info = kind.from_pretrained(folder, **options, **LOCAL)
    except Exception as error:  # transformers raises many exception types for invalid values and weights
        raise InputError(f"{folder}: the model cannot be loaded ({in_one_line(error)})") from error
    _check_loaded(folder, model, info, has_new_classes=names is not None)
    for_reading(model)
    mismatched = {name for name, _, _ in info["mismatched_keys"]}
    new = mismatched.union(info["missing_keys"])
    return model, sorted(new)


def _check_loaded(folder: Path, model: PreTrainedModel, info: Mapping[str, Any], has_new_classes: bool) -> None:
    """Raise `InputError` for mismatched, missing and unused weights of a loaded model.

    `info` is the loading info of transformers. Weights of the classification head may be missing. If `has_new_classes`
    is True, they may also have different shapes, because a new head is then trained.
    """
    # Names of weights in the base model begin with this prefix, unlike those in the head. The prefix of a model without
    # a head is empty, so all its weights belong to the base model.
    base_prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    for name, stored_shape, required_shape in sorted(info["mismatched_keys"]):
        is_in_head = not name.startswith(base_prefix)
        is_allowed = is_in_head and has_new_classes
        if not is_allowed:
            shapes = f"{name} has the shape {list(stored_shape)}, but config.json requires {list(required_shape)}"
            raise InputError(f"{folder}: the model cannot be loaded ({shapes})")
    missing = []
    for name in sorted(info["missing_keys"]):
        may_be_missing = POOLER in name or not name.startswith(base_prefix)  # the pooler is used only by some heads
        if not may_be_missing:
            missing.append(name)
    unexpected = sorted(info["unexpected_keys"])
    if missing:
        lacking = f"{len(missing)} tensors of the model that config.json describes ({_shorten(missing)})"
        raise InputError(f"{folder}: its weights lack {lacking}{_explain_names(missing, unexpected)}")
    unused = _find_unused(model.base_model, unexpected)
    if unused:
        problem = f"{len(unused)} tensors that the model described by config.json does not use ({_shorten(unused)})"
        raise InputError(
            f"{folder}: its weights contain {problem}; use the weights and the config.json of the same model"
        )


def _explain_names(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return an addition to the error message if the file's weight names have an extra prefix, else an empty string.

    `missing` are the names of weights that the file lacks, and `unexpected` the names of its unused weights.
    """
    for wanted in missing:
        for name in unexpected:
            if name.endswith(f".{wanted}"):
                prefix = name.removesuffix(wanted)
                return f"; their names begin with {prefix!r}, as in a module around the model; save only the model"
    return ""


def _find_unused(base: Any, unexpected: Sequence[str]) -> list[str]:
    """Return the names of weights that the base model should use but does not.

    These are the `unexpected` names of a file that belong to submodules of the base model, except the pooler and
    buffers. Other unexpected weights belong to a head.
    """
    submodules = {name for name, _ in base.named_children()} - {POOLER}
    buffers = {name for name, _ in base.named_buffers()}
    unused = []
    for name in unexpected:
        inner = name.removeprefix(f"{base.base_model_prefix}.")
        submodule, _, _ = inner.partition(".")
        is_buffer = inner in buffers or OLD_BUFFERS.search(inner)
        if submodule in submodules and not is_buffer:
            unused.append(name)
    return unused


def for_reading(model: PreTrainedModel) -> None:
    """Set a model to eval mode, and register `with_decoder_inputs` on a base model that requires decoder inputs."""
    if hasattr(model.base_model, "_shift_right"):
        model.base_model.register_forward_pre_hook(with_decoder_inputs, with_kwargs=True)
    model.eval()


def with_decoder_inputs(base: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """Add missing decoder inputs for T5: the input IDs, shifted right (forward pre-hook of the base model).

    BART adds them itself.
    """
    ids = arguments[0] if arguments else options.get("input_ids")
    has_positional_inputs = len(arguments) > 2  # the third positional argument contains decoder inputs
    if has_positional_inputs or any(options.get(name) is not None for name in DECODER_INPUTS):
        return arguments, options
    if ids is not None and hasattr(base, "_shift_right"):
        decoder_ids = base._shift_right(ids)
        options = options | {"decoder_input_ids": decoder_ids}
    return arguments, options


def _shorten(names: Sequence[str]) -> str:
    """Return the first `MAX_SHOWN_NAMES` names for a message."""
    shown = ", ".join(names[:MAX_SHOWN_NAMES])
    if len(names) > MAX_SHOWN_NAMES:
        return f"{shown}, ..."
    return shown


def check_model(folder: Path, texts: Sequence[Text]) -> None:
    """Raise `InputError` for an unknown family, unsupported attention, or a model that cannot process `texts`.

    The vocabulary and the segments are checked for the first `CHECKED_TEXTS` texts. The model processes only the first
    text, truncated to `CHECKED_TOKENS` tokens.
    """
    base: Any = load_base(folder)
    tokenizer = load_tokenizer(folder)
    check_network(str(folder), base, tokenizer)
    sample = texts[:CHECKED_TEXTS]
    pairs = [text for text in sample if isinstance(text, tuple)]
    whole_texts = [whole_text(text) for text in sample]
    check_words("model.name", str(folder), tokenizer, whole_texts)
    check_segments(base.config, tokenizer, pairs)
    read_segments(base, tokenizer, bool(pairs))  # the following forward pass then includes segments
    first_ids = encode(tokenizer, texts[:1], CHECKED_TOKENS)
    check_vectors(str(folder), base, torch.tensor(first_ids))


def check_classifier(folder: Path, names: Mapping[Any, str], texts: Sequence[Text], trained: bool) -> None:
    """Raise `InputError` if a checkpoint is not loaded as a classifier for the classes `names`, or if this fails.

    The classifier is tried on the first two `texts`, truncated to `CHECKED_TOKENS` tokens. If `trained` is True, the
    checkpoint must already have a trained head; otherwise, a missing or unsuitable head is replaced by a new one.
    """
    model = load_trained(folder, names) if trained else load_classifier(folder, names)
    tokenizer = load_tokenizer(folder)
    ids = encode(tokenizer, texts[:2], CHECKED_TOKENS)
    inputs = padded(ids, tokenizer.pad_token_id)
    with torch.inference_mode():
        try:
            model(**inputs)
        # Exception types differ by family, for example if a text lacks the token that is classified.
        except Exception as error:
            problem = f"its classifier fails on a text ({in_one_line(error)})"
            raise InputError(f"model.name: {folder}: {problem}") from error


def check_network(name: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise `InputError` if the base model `name` cannot be measured with this tokenizer.

    All models are validated by this function, whether they are loaded by name or already in memory.
    """
    check_attention_function(name, base)
    check_modules(name, base)
    _check_finite(name, base)
    padding_token(name, tokenizer)
    embeddings: Any = base.get_input_embeddings()
    check_tokenizer(name, tokenizer, embeddings.num_embeddings)
    check_vectors(name, base, probe_ids(base, tokenizer))


def _check_finite(name: str, base: PreTrainedModel) -> None:
    """Raise `InputError` for a weight that is NaN or infinite, even if a trial forward pass would not use it."""
    for parameter_name, parameter in base.named_parameters():
        if not parameter.numel():
            continue
        extremes = torch.stack(torch.aminmax(parameter.detach()))
        if not extremes.isfinite().all():
            raise InputError(f"model.name: {name} has NaN or infinite weights ({parameter_name}), so it is damaged")


def probe_ids(base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return token IDs `[1, T]` for a trial forward pass: a short text, and tokens from all parts of the vocabulary.

    Different tokens have different attention weights, so a different attention function changes the output.
    """
    embeddings: Any = base.get_input_embeddings()
    padding_ids = {base.config.pad_token_id, tokenizer.pad_token_id}
    last = min(embeddings.num_embeddings, len(tokenizer)) - 1  # rows beyond the vocabulary may be untrained
    spread = torch.linspace(0, last, PROBE_TOKENS).long().tolist()
    (text_ids,) = encode(tokenizer, ["a"], PROBE_TOKENS)
    ids = list(text_ids)
    for number in spread:
        if number not in padding_ids:
            ids.append(number)
    longest = longest_text(base.config) or PROBE_TOKENS
    return torch.tensor([ids[:longest]], device=embeddings.weight.device)


def last_vectors(output: Any) -> Tensor:
    """Return the first output of a model: the vectors `[B, T, D]`, or the logits of a T5 head."""
    vectors: Tensor = output[0]
    return vectors


def check_attention_function(name: str, base: PreTrainedModel) -> None:
    """Raise `InputError` for an attention function from outside of transformers and attnmix.

    The computation of other functions is unknown. The function of attnmix is set by `load_base`.
    """
    implementation = str(base.config._attn_implementation)
    function = AttentionInterface().get(implementation, None)
    module = str(getattr(function, "__module__", "transformers"))
    package, _, _ = module.partition(".")
    if package not in ("transformers", "attnmix"):
        function_name = getattr(function, "__qualname__", "")
        problem = f"its attention function {implementation!r} is {module}.{function_name}"
        allowed = "implementations of transformers, for example network.set_attn_implementation('sdpa')"
        raise InputError(f"model.name: {name}: {problem}; allowed: {allowed}")


def check_modules(name: str, base: PreTrainedModel) -> None:
    """Raise `InputError` if the modules or weights of the base model `name` cannot be measured."""
    problems = [*_find_module_problems(base), *_find_weight_problems(base)]
    if problems:
        first = problems[0]
        raise InputError(f"model.name: {name}: {first.description}; allowed: {first.allowed}")


def _find_module_problems(base: PreTrainedModel) -> Iterator[_Problem]:
    """Yield a problem for missing and replaced modules, for a replaced `forward`, and for layers that share a module.

    The modules in the table of model families are compared with those of a new model with the same configuration. The
    measures use the weights of these modules directly, and would ignore an adapter or a replaced module.
    """
    config: Any = base.config
    modules = dict(base.named_modules(remove_duplicate=False))
    # A hook of accelerate on the whole model is allowed, because it only moves inputs and outputs between devices.
    has_accelerate_hook = hasattr(base, "_hf_hook")
    if _has_replaced_forward(base) and not has_accelerate_hook:
        yield _Problem(f"the method forward of {type(base).__name__} was replaced", allowed=UNHOOKED)
    with torch.device("meta"), without_library_messages():  # needs no memory for weights
        reference = transformers.AutoModel.from_config(copy.deepcopy(config))
    expected_modules = dict(reference.named_modules(remove_duplicate=False))
    for path in _list_table_paths(base):
        if path not in modules:
            problem = f"{type(base).__name__} has no module {path}, which models of the family {config.model_type} have"
            yield _Problem(problem, allowed=f"{type(reference).__name__}, with or without a head of transformers")
            return
        if path not in expected_modules:
            problem = f"it has a module {path}, which its configuration does not describe"
            yield _Problem(problem, allowed="a configuration with the actual number of layers (num_hidden_layers)")
            return
        yield from _compare_modules(path, modules[path], expected_modules[path])
    for layers in stack_layers(base):
        if len(set(layers.modules)) < len(layers.modules):
            yield _Problem("several of its layers share a module", allowed="a separate module for each layer")


def _compare_modules(path: str, module: torch.nn.Module, expected_module: torch.nn.Module) -> Iterator[_Problem]:
    """Yield a problem if the method `forward` of `module` was replaced, and one if its type is not the expected one."""
    if _has_replaced_forward(module):
        yield _Problem(f"the method forward of {path} was replaced", allowed=UNHOOKED)
    given = type(module)
    expected = type(expected_module)
    is_expected_type = issubclass(given, expected) and given.forward is expected.forward
    if not is_expected_type:
        problem = f"{path} is a {given.__module__}.{given.__name__} instead of {expected.__name__}"
        allowed = "the modules of transformers; an adapter can be merged into them (peft: merge_and_unload)"
        yield _Problem(problem, allowed)


def _has_replaced_forward(module: torch.nn.Module) -> bool:
    """Return True if `forward` was assigned to this object; a method of its class is not among the object's `vars`."""
    return "forward" in vars(module)


def _find_weight_problems(base: PreTrainedModel) -> Iterator[_Problem]:
    """Yield a problem for each weight that is not an ordinary float tensor, and one if there are several devices."""
    dtypes = ", ".join(_name_dtype(dtype) for dtype in VECTOR_TOLERANCES)
    for path, weight in base.named_parameters():
        tensor = weight.data
        if tensor.is_meta:
            yield _Problem(f"{path} is not in memory (device meta)", allowed="a model with all weights loaded")
        elif type(tensor) is not Tensor:
            problem = f"{path} is stored as {type(tensor).__name__}"
            yield _Problem(problem, allowed="ordinary tensors, neither quantized nor sharded")
        elif tensor.dtype not in VECTOR_TOLERANCES:
            yield _Problem(f"{path} is stored as {_name_dtype(tensor.dtype)}", allowed=f"weights in {dtypes}")
    devices = sorted({str(weight.device) for weight in base.parameters()})
    if len(devices) > 1:
        problem = f"its weights are on several devices ({', '.join(devices)})"
        yield _Problem(problem, allowed="one device, as after model.to(device)")


def _name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


def _list_table_paths(base: PreTrainedModel) -> list[str]:
    """Return the paths of all modules of a base model that the table of model families requires.

    If the model has no layers, the paths that a first layer would have are included.
    """
    family = family_of(base.config)
    modules = dict(base.named_modules(remove_duplicate=False))
    paths = [family.word_embedding]
    for stack in family.stacks:
        for table_path in (*stack.embedding, stack.final_norm):
            if not table_path:
                continue
            path = table_path.removesuffix("?")
            is_optional = table_path.endswith("?")  # marks modules that some models of the family lack
            if path in modules or not is_optional:
                paths.append(path)
        layers = [path for path in modules if stack.is_layer(path)]
        if not layers:
            layers = [stack.layers.replace("*", "0")]
        for layer in layers:
            for inner_path in stack.inner_paths():
                paths.append(f"{layer}.{inner_path}")
    return paths


def check_vectors(name: str, base: PreTrainedModel, ids: Tensor) -> None:
    """Raise `InputError` if a base model fails on `ids` `[1, T]`, or has non-finite outputs or unsupported attention.

    The outputs of two forward passes are compared: one pass uses the original attention function, and the other uses
    the observed attention function.
    """
    with torch.no_grad():
        try:
            expected = last_vectors(base(ids))
        except Exception as error:  # exception types differ by family
            raise InputError(f"model.name: {name} fails on a text ({in_one_line(error)})") from error
        implementation = implementation_of(base.config)
        # This function computes attention from query, key, value and mask; its callback is not needed here.
        observed_attention = observed(lambda *_: None)
        with implementations(base, implementation), attention_by(observed_attention, base):
            vectors = last_vectors(base(ids))
    if not expected.isfinite().all():
        raise InputError(f"model.name: {name} returns NaN or infinite values for a text; its weights are damaged")
    distance = (vectors - expected).float().norm()
    difference = float(distance / expected.float().norm())
    if not difference <= VECTOR_TOLERANCES[expected.dtype]:  # also rejects NaN
        reason = f"the vectors recomputed from query, key, value and mask have a relative error of {difference:.2g}"
        raise InputError(f"model.name: {name} computes attention in a way that is not supported ({reason})")


def check_comparable(base: Path, named: Path, texts: Sequence[Text]) -> None:
    """Raise `InputError` if two checkpoints cannot be compared token by token and layer by layer."""
    base_config = load_config(base)
    named_config = load_config(named)
    for key in SHAPE_KEYS:
        first = getattr(base_config, key)
        second = getattr(named_config, key)
        if first != second:
            raise InputError(
                f"model.base: its {key} is {first}, but that of model.name is {second}; choose models with equal values"
            )
    base_tokenizer = load_tokenizer(base)
    named_tokenizer = load_tokenizer(named)
    for text in texts[:CHECKED_TEXTS]:
        single_texts = (text,) if isinstance(text, str) else text  # a pair consists of two texts
        base_ids = base_tokenizer(*single_texts)["input_ids"]
        named_ids = named_tokenizer(*single_texts)["input_ids"]
        if base_ids != named_ids:
            problem = f"its tokenizer encodes {single_texts[0][:60]!r} differently from that of model.name"
            raise InputError(f"model.base: {problem}; choose models with the same tokenizer")


def check_tokenizer(name: str, tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
    """Raise `InputError` if the tokenizer can produce a token ID outside the embedding of `rows` rows."""
    if tokenizer.pad_token_id is not None:
        _check_padding(name, tokenizer.pad_token_id, rows)
    reachable = _list_reachable_tokens(tokenizer)
    outside = sorted(number for number in reachable if number >= rows)
    if outside:
        first = outside[0]
        raise InputError(
            f"model.name: the tokenizer of {name} has {len(outside)} tokens outside the embedding of {rows} rows, "
            f"the first {reachable[first]!r} with the id {first}; use the tokenizer of these weights"
        )


def _list_reachable_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, str]:
    """Return, by ID, the tokens that the encoding of a text can contain.

    If the tokenizer's option `split_special_tokens` is True, the name of a special token within a text is not encoded
    as this token. The only special tokens are then those that the tokenizer adds to every text.
    """
    unreachable = set()
    if tokenizer.split_special_tokens:
        unreachable = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    reachable = {}
    for token, number in tokenizer.get_vocab().items():
        if token not in unreachable:
            reachable[number] = token
    added_to_every_text = tokenizer("")["input_ids"]
    for number in added_to_every_text:
        reachable[number] = str(tokenizer.convert_ids_to_tokens(number))
    return reachable


def freeze_layers(base: PreTrainedModel, count: int) -> None:
    """Freeze the embeddings and the first `count` layers; if `count` is 0, freeze nothing.

    Raise `InputError` if the model has fewer than `count` layers with separate weights.
    """
    if not count:
        return
    stack = family_of(base.config).stacks[0]
    layers = list(dict.fromkeys(find_layers(base, stack)))
    if count > len(layers):
        problem = f"the model has {len(layers)} layers with separate weights"
        raise InputError(f"finetune.frozen_layers: {count}, but {problem}; allowed: 0 to {len(layers)}")
    # Parameters are in forward order: those of the embeddings, then those of the layers.
    last_frozen = list(layers[count - 1].parameters())[-1]
    for parameter in base.parameters():
        parameter.requires_grad_(False)
        if parameter is last_frozen:
            return


def _check_padding(name: str, padding: int, rows: int) -> None:
    """Raise `InputError` if the padding token's ID `padding` is outside the embedding of `rows` rows."""
    if padding >= rows:
        raise InputError(f"{name}: its tokenizer pads with token {padding}, but its embedding has only {rows} rows")
