"""The fine-tuned classifier and what of its passes the token scores are made of.

Shapes: T tokens, D hidden, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Linear, Module
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.measures.layers import LayerPass, run_layers, value_map
from attnmix.measures.layers import Linear as Affine
from attnmix.models.attention import OBSERVED
from attnmix.models.capture_points import first_of
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.families import family_of
from attnmix.models.loading import load_classifier, load_tokenizer

Tensor = torch.Tensor


class Gradients(NamedTuple):
    """The derivative of the predicted class's logit, in the pass of one text."""

    words_TD: Tensor
    """Word embeddings."""
    logit_by_words_TD: Tensor
    """Its derivative by them."""
    read_T: Tensor
    """Whether the logit depends on the token's vector after the last layer."""


class HeadCall(NamedTuple):
    """A Linear after the last layer, and what enters and leaves it `[width]`."""

    linear: Linear
    input: Tensor
    output: Tensor


class Classifier:
    """A checkpoint's sequence classifier, in eval mode and float32."""

    def __init__(self, folder: Path, device: torch.device, batch_tokens: int) -> None:
        self.folder, self.batch_tokens = folder, batch_tokens
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
        model: Any = load_classifier(folder, attn_implementation=OBSERVED)
        self.model: PreTrainedModel = model.to(device)
        self.base: Any = self.model.base_model
        self.classes: dict[int, str] = self.base.config.id2label
        self.family = family_of(self.base.config)
        stack = self.family.stacks[-1]
        self.layers = [module for path, module in self.base.named_modules() if stack.is_layer(path)]
        mask = self.tokenizer.mask_token_id
        self.mask_id = mask if mask is not None and mask < self.model.get_input_embeddings().num_embeddings else None

    def logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return logits `[texts, C]` of token ids, float64 on the CPU; NaN for a text without any token."""
        logits = torch.full((len(texts), int(self.model.config.num_labels or 0)), torch.nan, dtype=torch.float64)
        places = [place for place, ids in enumerate(texts) if ids]
        with torch.inference_mode():
            for batch in batches_by_tokens([len(texts[place]) for place in places], self.batch_tokens):
                chosen = [places[number] for number in batch]
                inputs = padded([texts[place] for place in chosen], self.tokenizer.pad_token_id, self.model.device)
                logits[chosen] = self.model(**inputs).logits.double().cpu()
        return logits

    def gradients(self, ids: Sequence[int], label: int) -> Gradients:
        """Return the derivatives of the logit of the class `label` in one text."""
        vectors: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            return lambda _module, _inputs, output: vectors.update({name: first_of(output)})

        with ExitStack() as hooks:
            words = self.base.get_submodule(self.family.word_embedding)
            hooks.enter_context(words.register_forward_hook(keep("words")))
            for layer in self.layers:
                hooks.enter_context(layer.register_forward_hook(keep("last")))
            logit = self.model(**self._batch_of(ids)).logits[0, label]
        by_words, by_last = torch.autograd.grad(logit, [vectors["words"], vectors["last"]])
        return Gradients(vectors["words"].detach()[0], by_words[0], by_last[0].abs().sum(-1) > 0)

    def layer_passes(
        self, ids: Sequence[int], visit: Callable[[LayerPass], None], points: Sequence[str]
    ) -> tuple[Tensor, list[HeadCall]]:
        """Return the logits `[C]` of one text and the calls of the head's Linears; show each layer to `visit`."""
        calls: list[HeadCall] = []

        def note(module: Module, inputs: Any, output: Tensor) -> None:
            assert isinstance(module, Linear)
            calls.append(HeadCall(module, inputs[0].flatten(0, -2)[0], output.flatten(0, -2)[0]))

        def visit_document(layer_pass: LayerPass, _features: Any) -> None:
            calls.clear()  # a Linear of the embedding is none of the head
            visit(layer_pass.document(0))

        inside = {part for layer in self.layers for part in layer.modules()}
        with ExitStack() as hooks, torch.inference_mode():
            for module in self.model.modules():
                if isinstance(module, Linear) and module not in inside:
                    hooks.enter_context(module.register_forward_hook(note))
            output = run_layers(self.base, self.folder, self._batch_of(ids), visit_document, points, self.model)
        return output.logits[0], calls

    @cached_property
    def values(self) -> list[Affine]:
        """x -> x W_V + b_V of each layer."""
        maps: list[Affine] = []
        with torch.inference_mode():
            batch = self._batch_of([self.tokenizer.pad_token_id])
            run_layers(self.base, self.folder, batch, lambda layer_pass, _features: maps.append(value_map(layer_pass)))
        return maps

    def between(self, first: Linear, second: Linear, number: Tensor) -> Tensor:
        """Return what enters the head's second Linear `[width]` if all that leaves the first is `number` `[1]`."""
        entering: list[Tensor] = []
        with (
            first.register_forward_hook(lambda _module, _inputs, output: number.expand_as(output)),
            second.register_forward_pre_hook(lambda _module, inputs: entering.append(inputs[0].flatten(0, -2)[0])),
            torch.inference_mode(),
        ):
            self.model(**self._batch_of([self.tokenizer.pad_token_id]))
        return entering[-1]

    def _batch_of(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return padded([list(ids)], self.tokenizer.pad_token_id, self.model.device)
