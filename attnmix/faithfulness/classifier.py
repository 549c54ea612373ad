"""The fine-tuned classifier and what of its passes the token scores are made of.

Shapes: T tokens, D hidden, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    of_words_TD: Tensor
    """By them."""
    read_T: Tensor
    """Whether the logit depends on the token's vector after the last layer."""


class HeadCall(NamedTuple):
    """A Linear after the last layer, and what enters and leaves it `[width]`."""

    linear: Linear
    taken: Tensor
    given: Tensor


class Classifier:
    """A checkpoint's sequence classifier, in eval mode and float32."""

    def __init__(self, folder: Path, device: torch.device, batch_tokens: int) -> None:
        self.folder, self.batch_tokens = folder, batch_tokens
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
        model: Any = load_classifier(folder, attn_implementation=OBSERVED)
        self.model: PreTrainedModel = model.to(device)
        self.base: Any = self.model.base_model
        self.family = family_of(self.base.config)
        stack = self.family.stacks[-1]
        self.layers = [module for path, module in self.base.named_modules() if stack.is_layer(path)]
        mask = self.tokenizer.mask_token_id
        self.mask_id = mask if mask is not None and mask < self.model.get_input_embeddings().num_embeddings else None

    def logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """`[texts, C]` of token ids, float64 on the CPU; NaN for a text without any token."""
        nothing = torch.full((int(self.model.config.num_labels or 0),), torch.nan, dtype=torch.float64)
        found: list[Tensor] = [nothing] * len(texts)
        some = [place for place, ids in enumerate(texts) if ids]
        with torch.inference_mode():
            for batch in batches_by_tokens([len(texts[place]) for place in some], self.batch_tokens):
                places = [some[number] for number in batch]
                given = padded([texts[place] for place in places], self.tokenizer.pad_token_id, self.model.device)
                for place, row in zip(places, self.model(**given).logits.double().cpu(), strict=True):
                    found[place] = row
        return torch.stack(found) if found else nothing.new_empty(0, len(nothing))

    def gradients(self, ids: Sequence[int], label: int) -> Gradients:
        """Of the logit of the class `label` in one text."""
        kept: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            def hook(_module: Module, _given: Any, output: Any) -> None:
                kept[name] = first_of(output)

            return hook

        words = self.base.get_submodule(self.family.word_embedding)
        handles = [words.register_forward_hook(keep("words"))]
        handles += [layer.register_forward_hook(keep("last")) for layer in self.layers]
        try:
            logit = self.model(**self._alone(ids)).logits[0, label]
        finally:
            for handle in handles:
                handle.remove()
        of_words, of_last = torch.autograd.grad(logit, [kept["words"], kept["last"]])
        return Gradients(kept["words"].detach()[0], of_words[0], of_last[0].abs().sum(-1) > 0)

    def pass_of(
        self, ids: Sequence[int], visit: Callable[[LayerPass], None], points: Sequence[str]
    ) -> tuple[Tensor, list[HeadCall]]:
        """Logits `[C]` of one text and the calls of the head's Linears; `visit` sees each layer."""
        calls: list[HeadCall] = []

        def note(module: Module, given: Any, output: Tensor) -> None:
            assert isinstance(module, Linear)
            calls.append(HeadCall(module, given[0].flatten(0, -2)[0], output.flatten(0, -2)[0]))

        def of_document(seen: LayerPass, _features: Any) -> None:
            calls.clear()  # a Linear of the embedding is none of the head
            visit(seen.document(0))

        inside = {part for layer in self.layers for part in layer.modules()}
        linears = [part for part in self.model.modules() if isinstance(part, Linear) and part not in inside]
        handles = [linear.register_forward_hook(note) for linear in linears]
        try:
            with torch.inference_mode():
                batch = self._alone(ids)
                output = run_layers(self.base, self.folder, batch, of_document, points, self.model)
        finally:
            for handle in handles:
                handle.remove()
        return output.logits[0], calls

    def values(self) -> list[Affine]:
        """x -> x W_V + b_V of each layer."""
        found: list[Affine] = []
        with torch.inference_mode():
            batch = self._alone([self.tokenizer.pad_token_id])
            run_layers(self.base, self.folder, batch, lambda seen, _features: found.append(value_map(seen)))
        return found

    def between(self, first: Linear, second: Linear, number: Tensor) -> Tensor:
        """What enters the head's second Linear `[width]` where every number that leaves the first is `number` `[1]`."""
        taken: list[Tensor] = []
        handles = [
            first.register_forward_hook(lambda _module, _given, output: number.expand_as(output)),
            second.register_forward_pre_hook(lambda _module, given: taken.append(given[0].flatten(0, -2)[0])),
        ]
        try:
            with torch.inference_mode():
                self.model(**self._alone([self.tokenizer.pad_token_id]))
        finally:
            for handle in handles:
                handle.remove()
        return taken[-1]

    def _alone(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return padded([list(ids)], self.tokenizer.pad_token_id, self.model.device)
