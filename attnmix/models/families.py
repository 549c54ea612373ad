"""The table of model families (`families.yaml`): the modules that contribute to the residual stream, by role."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from torch.nn import Module

from attnmix.core.errors import InputError
from attnmix.core.names import PREACTIVATION, ROLLOUT

PROJECTED = "projected"
"""The name of W_O's output if a norm follows W_O; this output is recorded, although it is not a capture point."""
HEADS = "heads"
"""The name of the stored arrays of single attention heads, from which attention weights are recomputed."""
FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text("utf-8"))
"""The table's entries by model type."""
REFUSED: dict[str, str] = FAMILIES.pop("refused")
"""The reasons why some other model types are not supported, by model type."""

NOT_HONOURED = {
    "quantization_config": "quantized weights are not supported; use weights in float32, float16 or bfloat16",
    "compression_config": "compressed weights are not supported; use weights in float32, float16 or bfloat16",
    "pruned_heads": "transformers 5 does not support pruned heads; use a model with all its heads",
}
"""Configuration keys that are not supported, with the reasons; a key with an empty value is ignored."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A sequence of Transformer layers, described by module paths; paths within a layer are relative to the layer."""

    layers: str
    attention: str
    output: str
    feed_forward: Sequence[str]
    embedding: Sequence[str] = ()
    input_norm: str | None = None
    attention_output_norm: str | None = None
    attention_norm: str | None = None
    cross_attention: str | None = None
    cross_attention_input_norm: str | None = None
    cross_attention_norm: str | None = None
    feed_forward_norm: str | None = None
    feed_forward_output_norm: str | None = None
    output_norm: str | None = None
    final_norm: str | None = None
    parallel: bool = False
    own_attention: bool = False
    activation: str | None = None
    gated: Sequence[str] = ()

    def places(self) -> dict[str, tuple[str, Literal["input", "output"]]]:
        """Return, for each capture point of a layer, the path of a module and whether the point is its input or output.

        The empty path is the layer itself. Capture points that the layer lacks are omitted.
        """
        norms = (self.attention_norm, self.cross_attention_input_norm, self.feed_forward_norm)
        modules_after_attention = [path for path in (*norms, self.feed_forward[0]) if path]  # in forward order
        # The input of the first of these modules is the vector after the skip connection of attention, the capture
        # point `attention_residual`. With parallel sublayers, there is no such vector.
        residual = None if self.parallel else modules_after_attention[0]
        # Without a norm after W_O (the module `output`), the output of W_O is the attention output itself, and is not
        # recorded again as the projection.
        projected = self.output if self.attention_output_norm else None
        # The first module of the feed-forward network is the Linear that computes the input of the activation function.
        preactivation = self.network[0] if self.network else None
        places: dict[str, tuple[str | None, Literal["input", "output"]]] = {
            "attention_heads": (self.output, "input"),
            PROJECTED: (projected, "output"),
            "attention_output": (self.attention_output_norm or self.output, "output"),
            "attention_residual": (residual, "input"),
            "attention_norm": (self.attention_norm, "output"),
            "cross_attention_output": (self.cross_attention, "output"),
            "cross_attention_norm": (self.cross_attention_norm, "output"),
            PREACTIVATION: (preactivation, "output"),
            "ffn_output": (self.feed_forward_output_norm or self.feed_forward[-1], "output"),
            "layer_output": ("", "output"),
        }
        return {point: (module, side) for point, (module, side) in places.items() if module is not None}

    def inner_paths(self) -> list[str]:
        """Return the paths, relative to a layer, of all modules whose weights the measures use."""
        norms = [path for name, path in vars(self).items() if _is_layer_norm(name)]
        paths = [self.output, *self.feed_forward, *self.gated, *norms]
        return [path for path in paths if path]

    def parts(self) -> list[str]:
        """Return the names of the fields that contain norms of a layer, and `parallel` if its sublayers are parallel.

        Fields such as `attention_norm` are omitted if the layer has no such norm.
        """
        names = []
        for name, value in vars(self).items():
            if value and (_is_layer_norm(name) or name == "parallel"):
                names.append(name)
        return names

    @property
    def network(self) -> Sequence[str]:
        """The `feed_forward_network` if its input includes attention's output; empty if it is parallel to attention."""
        if self.parallel:
            return ()
        return self.feed_forward_network

    @property
    def feed_forward_network(self) -> Sequence[str]:
        """The paths of the Linears and the activation of a gated or ungated feed-forward network; else empty."""
        if self.gated:
            return self.gated
        if len(self.feed_forward) == 3:  # Linear, activation, Linear
            return self.feed_forward
        return ()

    def is_layer(self, path: str) -> bool:
        """Return True if `path` is the module path of a layer; in the path `layers`, * stands for the layer's index."""
        pattern = re.escape(self.layers).replace(r"\*", r"\d+")
        return re.fullmatch(pattern, path) is not None


def _is_layer_norm(field: str) -> bool:
    """Return True if a field of `Stack` contains the path of a norm inside a layer."""
    return field.endswith("_norm") and field != "final_norm"


@dataclass(frozen=True)
class Family:
    """The entry for one model's configuration in the table of model families."""

    model_type: str
    word_embedding: str
    stacks: tuple[Stack, ...]
    """A single stack, or the encoder and the decoder."""
    half_precision: bool = True
    """True if the model code supports bf16 and fp16."""

    def check_precision(self, key: str, precision: str) -> None:
        """Raise `InputError`, prefixed with `key`, if this family does not support `precision`."""
        if precision != "fp32" and not self.half_precision:
            problem = (
                f"{precision} does not work with the model family {self.model_type}, because its code in transformers"
            )
            raise InputError(
                f"{key}: {problem} masks attention with a number outside the range of half precision; allowed: fp32"
            )

    def absent(self) -> dict[str, str]:
        """Return the capture points, ratios and matrices that this family lacks, with the reason for each.

        `HEADS` is included if queries and keys cannot be recorded.
        """
        stack = self.stacks[0]
        reasons: dict[str, str] = {}
        if stack.own_attention:
            reasons[HEADS] = "its attention module exposes scores, but not queries and keys"
        if stack.parallel:
            why = "attention and feed-forward network are parallel, without a vector between them"
            reasons |= dict.fromkeys(("attention_residual", "attnres_w", "attnres_n", "alti", "layer_n"), why)
        elif not stack.network:
            reasons["layer_n"] = "its feed-forward network is neither an activation between two Linears nor gated"
        if stack.attention_norm is None:
            why = "no norm follows the skip connection of attention"
            reasons |= dict.fromkeys(("attention_norm", "attnresln_n", "enc_n", "globenc"), why)
        if not stack.embedding:
            reasons["embedding_sum"] = "no norm follows the sum of the embeddings"
        if self.stacks[-1].cross_attention_norm is None:
            reasons["cross_attention_norm"] = "no norm follows cross-attention"
        if len(self.stacks) == 1:
            names = ("decoder_embedding_output", "cross_attention_output", "cross_attention_norm")
            reasons |= dict.fromkeys(names, "the model is not an encoder-decoder model")
        return reasons

    def present(self, names: Iterable[str]) -> list[str]:
        """Return the `names` that this family has; a rollout is available if its matrix is available."""
        absent = self.absent()
        return [name for name in names if name.removesuffix(ROLLOUT) not in absent]


def family_of(config: Any) -> Family:
    """Return the family of a model's configuration; raise `InputError` if the configuration is not supported."""
    model_type = config.model_type
    if model_type not in FAMILIES:
        reason = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        allowed = f"allowed: {', '.join(FAMILIES)} (attnmix/models/families.yaml)"
        raise InputError(f"model.name: the model family {model_type!r} is not supported{reason}; {allowed}")
    entry = dict(FAMILIES[model_type])
    _check_required_values(model_type, entry.pop("requires", {}), config)
    word_embedding = entry.pop("word_embedding")
    half_precision = entry.pop("half_precision", True)
    return Family(model_type, word_embedding, _create_stacks(entry, config), half_precision)


def _check_required_values(model_type: str, required: Mapping[str, Any], config: Any) -> None:
    """Raise `InputError` if the configuration has a different value for one of the `required` keys."""
    for key, needed in required.items():
        value = getattr(config, key, None)
        if value not in (needed, None):
            allowed = f"only models with {key}: {needed} are supported (attnmix/models/families.yaml)"
            raise InputError(f"model.name: in the model family {model_type}, {allowed}, but this one has {value}")


def _create_stacks(entry: dict[str, Any], config: Any) -> tuple[Stack, ...]:
    """Return the stacks of a table entry: a single stack, or the encoder and the decoder.

    The configuration determines whether feed-forward networks are gated, and whether sublayers are parallel.
    """
    decoder_changes = entry.pop("decoder", None)
    # `gated_where` and `parallel` contain names of configuration keys. Without `gated_where`, `gated` applies to all
    # models of the family; without `parallel`, sublayers are not parallel.
    gated_key = entry.pop("gated_where", None)
    may_be_gated = gated_key is None or getattr(config, gated_key, True)
    parallel_key = entry.pop("parallel", None)
    is_parallel = parallel_key is not None and bool(getattr(config, parallel_key, False))
    entries = [entry]
    if decoder_changes:
        entries.append(entry | decoder_changes)
    for stack_entry in entries:
        if not may_be_gated:
            stack_entry.pop("gated", None)
        if "gated" in stack_entry:
            # The paths in `gated`, such as `mlp.gate_proj`, belong to one module: `mlp`, the whole network.
            network_path, _, _ = stack_entry["gated"][0].rpartition(".")
            stack_entry["feed_forward"] = [network_path]
    return tuple(Stack(**stack_entry, parallel=is_parallel) for stack_entry in entries)


def check_config(config: Any, name: str) -> None:
    """Raise `InputError` for an unsupported configuration of the model `name`.

    A configuration is not supported if `family_of` rejects it, if it has a value for a key of `NOT_HONOURED`, or if it
    describes an encoder-decoder model without `decoder_start_token_id`.
    """
    family = family_of(config)
    for key, reason in NOT_HONOURED.items():
        if getattr(config, key, None):
            raise InputError(f"model.name: {name}: config.json has {key}, but {reason}")
    if len(family.stacks) > 1 and getattr(config, "decoder_start_token_id", None) is None:
        problem = "config.json lacks decoder_start_token_id, the first token of the decoder"
        raise InputError(f"model.name: {name}: {problem}; add its token id (for T5, that of the padding token)")


@dataclass(frozen=True)
class StackLayers:
    """The layers of one stack of a network, in order of execution."""

    stack: Stack
    container: Module
    """The module that calls the layers."""
    modules: Sequence[Module]
    """One entry per layer path; a shared module can occur once or several times."""
    count: int

    @property
    def are_shared(self) -> bool:
        """True if several layers share a module and are identified only by the order of calls."""
        return self.count != len(set(self.modules))


def stack_layers(base: Module) -> list[StackLayers]:
    """Return the layers of each stack of a base model."""
    config: Any = base.config
    stacks = []
    for stack in family_of(config).stacks:
        layers = find_layers(base, stack)
        count = len(layers)
        if hasattr(config, "num_hidden_groups"):  # ALBERT calls the layers of each group repeatedly
            count = config.num_hidden_layers * config.inner_group_num
        # The layers `encoder.layer.*` are called by the module `encoder`.
        list_path, _, _ = stack.layers.partition(".*")
        container, _, _ = list_path.rpartition(".")
        stacks.append(StackLayers(stack, base.get_submodule(container), layers, count))
    return stacks


def find_layers(base: Module, stack: Stack) -> list[Module]:
    """Return the layer modules of a stack; a shared module can occur several times.

    Only the containers of layers are searched, because a search of all modules would take as long as a layer in the
    forward pass of a short text.
    """
    # Follow the path of the layers, such as `encoder.layer.*`, from one level of modules to the next.
    modules = [base]
    for name in stack.layers.split("."):
        children = []
        for module in modules:
            children.extend(_select_children(module, name))
        modules = children
    return modules


def _select_children(module: Module, name: str) -> list[Module]:
    """Return the child with this name, or all children with numeric names if the name is `*`."""
    # Unlike `named_children`, `_modules` repeats shared modules.
    children = module._modules.items()
    if name == "*":
        return [child for child_name, child in children if child is not None and child_name.isdecimal()]
    return [child for child_name, child in children if child is not None and child_name == name]


def attention_modules(base: Module) -> set[Module]:
    """Return the self-attention modules of all layers."""
    modules: set[Module] = set()
    for layers in stack_layers(base):
        modules.update(layer.get_submodule(layers.stack.attention) for layer in layers.modules)
    return modules


def layer_counts(base: Module) -> list[int]:
    """Return the number of layers per stack; each call of a shared module counts as a layer."""
    return [layers.count for layers in stack_layers(base)]


def optional_modules(base: Module, paths: Iterable[str]) -> list[Module]:
    """Return the modules at `paths`; a path that ends in ? is skipped if the model has no such module."""
    modules = dict(base.named_modules(remove_duplicate=False))
    selected = []
    for path in paths:
        name = path.removesuffix("?")
        is_optional = path.endswith("?")
        if name in modules or not is_optional:
            selected.append(modules[name])
    return selected


def present_names(key: str, names: Sequence[str], family: Family, alternatives: Iterable[str] = ()) -> list[str]:
    """Return the `names` that the model's family has, and log why the other names are missing.

    The result may be empty only if there are no `alternatives`. Otherwise, raise `InputError` if the family has none of
    the `names`; the message begins with `key` and suggests the alternatives that the family has.
    """
    absent = family.absent()
    present = family.present(names)
    for name in names:
        if name not in present:
            # A rollout is missing if its matrix is missing, for the same reason.
            reason = absent[name.removesuffix(ROLLOUT)]
            logging.info("%s: not available in the model family %s (%s)", name, family.model_type, reason)
    if alternatives and not present:
        problem = f"the model family {family.model_type} has none of {', '.join(names)}"
        raise InputError(f"{key}: {problem}; allowed: {', '.join(family.present(alternatives))}")
    return present
