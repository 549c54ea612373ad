"""The fine-tuned classifier, and the attribution of its class scores to input tokens: DecompX and AttnLRP.

Attention weights, standard deviations of norms and slopes of activations can be fixed at their values in one forward
pass (`attnmix.measures.input_parts`). A class score is then an affine function of the first layer's input, in which
each vector belongs to one token. `decompx` (Modarressi et al., ACL 2023) is the term of each token in this function,
computed by one backward pass. Modarressi et al. consider post-LN encoders; this module treats the norms of pre-LN
families (before sublayers and after the last layer) in the same way. The biases form a separate part, as with the later
option `include_bias_token` of Modarressi et al.; their published configuration distributes each bias over the tokens.
In models without gated networks, `decompx` equals CP-LRP (Ali et al., ICML 2022). `attnlrp` also propagates through the
attention weights (`attnmix.faithfulness.relevance`).

In this module, the head is the classification head. A vector is split into two parts that are propagated separately:
the part from all tokens, and the part from the biases. Shapes: J parts (2), T tokens, D hidden, C classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.errors import InputError
from attnmix.core.names import LAYER_POINTS, PREACTIVATION
from attnmix.core.selections import check_range
from attnmix.faithfulness.relevance import relevance_rules
from attnmix.interventions import Edit, edited_attention
from attnmix.measures.input_parts import through_layer
from attnmix.measures.layers import LayerPass, map_layers, run_layers, slopes, value_map
from attnmix.measures.weights import Linear as Affine
from attnmix.measures.weights import linear_weights, norm_of
from attnmix.models.attention import implementation_of
from attnmix.models.capture_points import first_of
from attnmix.models.checkpoint import load_config, load_tokenizer
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.families import PROJECTED, Family, family_of, find_layers, optional_modules
from attnmix.models.loading import load_classifier
from attnmix.models.segments import read_segments

Result = TypeVar("Result")

SUM_TOLERANCE = 1e-4  # relative to the largest logit; float32 rounding causes about 1e-6


class Gradients(NamedTuple):
    """The derivatives of a class's logit for one text."""

    words_TD: Tensor  # word embeddings
    logit_by_words_TD: Tensor  # derivative of the logit with respect to the word embeddings
    read_T: Tensor  # True if the logit depends on the token's vector after the last layer

    @property
    def read_position(self) -> int:
        """The position of the token that the head reads, or -1 if it reads several tokens."""
        return _find_only_position(self.read_T)


class Prediction(NamedTuple):
    """The logits of one text, and the token that the head reads."""

    logits_C: Tensor  # float64, on the CPU
    read_position: int  # position of the token that the head reads, or -1 if it reads several tokens


class _DifferentiablePass(NamedTuple):
    """Tensors of a forward pass for one text, connected by the autograd graph."""

    logits_C: Tensor
    words_1TD: Tensor  # word embeddings
    last_1TD: Tensor  # vectors after the last layer


class HeadCall(NamedTuple):
    """A call of a Linear in the classification head; `input` and `output` `[rows, width]` are for one or all tokens."""

    module: Linear
    input: Tensor
    output: Tensor

    def rows_at(self, token: int) -> tuple[Tensor, Tensor]:
        """Return the input and output vectors `[width]` of the token at position `token`."""
        row = token
        if len(self.input) == 1:  # the call contained only the token that the head reads
            row = 0
        return self.input[row], self.output[row]


class _RelevancePass(NamedTuple):
    """Tensors of a forward pass for one text; the backward pass from `last_1TD` to `input_1TD` propagates relevance."""

    input_1TD: Tensor  # input of the first layer, a leaf of the autograd graph
    last_1TD: Tensor  # vectors after the last layer
    logits_C: Tensor
    head_calls: list[HeadCall]  # calls of the Linears in the classification head


class Classifier:
    """The sequence classifier of a checkpoint, in eval mode and float32."""

    def __init__(self, folder: Path, device: torch.device, batch_tokens: int, pairs: bool = False) -> None:
        """Load the checkpoint in `folder`; `batch_tokens` is the maximum number of padded tokens per batch.

        If `pairs` is True, texts are pairs, and the model derives the segment of each token from the token IDs.
        """
        self.folder = folder
        self.batch_tokens = batch_tokens
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
        implementation = implementation_of(load_config(folder))
        model: Any = load_classifier(folder, attn_implementation=implementation)
        self.model: PreTrainedModel = model.to(device)
        self.base: Any = self.model.base_model
        read_segments(self.base, self.tokenizer, pairs)
        self.classes: dict[int, str] = self.base.config.id2label
        self.family = family_of(self.base.config)
        stack = self.family.stacks[-1]
        self.layers = list(dict.fromkeys(find_layers(self.base, stack)))  # shared layers only once
        mask_id = self.tokenizer.mask_token_id
        rows = self.model.get_input_embeddings().num_embeddings
        has_mask = mask_id is not None and mask_id < rows  # The tokenizer's mask token can lack an embedding.
        self.mask_id = mask_id if has_mask else None

    def logits(
        self, texts: Sequence[Sequence[int]], edits: Callable[[list[int], Tensor], Edit] | None = None
    ) -> Tensor:
        """Return the logits `[texts, C]` of texts (token IDs), in float64 on the CPU; NaN for an empty text.

        `edits` maps the text indices and the attention mask `[B, T]` of a batch to an edit of attention.
        """
        classes = int(self.model.config.num_labels or 0)
        logits = torch.full((len(texts), classes), torch.nan, dtype=torch.float64)
        nonempty = [number for number, ids in enumerate(texts) if ids]  # indices in `texts`
        lengths = [len(texts[number]) for number in nonempty]
        with torch.inference_mode():
            for batch in batches_by_tokens(lengths, self.batch_tokens):  # a batch is a list of indices in `lengths`
                numbers = [nonempty[place] for place in batch]
                batch_texts = [texts[number] for number in numbers]
                inputs = padded(batch_texts, self.tokenizer.pad_token_id, self.model.device)
                context: AbstractContextManager[Any] = nullcontext()
                if edits is not None:
                    edit = edits(numbers, inputs["attention_mask"])
                    context = edited_attention(self.base, edit)
                with context:
                    output = self.model(**inputs)
                logits[numbers] = output.logits.cpu().double()
        return logits

    def gradients(self, ids: Sequence[int], label: int) -> Gradients:
        """Return the derivatives of the logit of class `label` (an index) for one text, given as token IDs.

        They are the derivatives with respect to the word embeddings, and the mask of the tokens whose vectors after the
        last layer affect the logit.
        """
        classes = int(self.model.config.num_labels or 0)
        check_range("label: class", [label], range(classes))
        logits_C, words_1TD, last_1TD = self._run_with_derivatives(ids)
        by_words_1TD, by_last_1TD = torch.autograd.grad(logits_C[label], [words_1TD, last_1TD])
        return Gradients(words_1TD.detach()[0], by_words_1TD[0], _moves_logit(by_last_1TD))

    def prediction(self, ids: Sequence[int]) -> Prediction:
        """Return the logits of one text, and the position of the only token that the head reads (-1 for several)."""
        logits_C, _, last_1TD = self._run_with_derivatives(ids)
        # The head reads a token if the largest logit depends on that token's vector after the last layer.
        (by_last_1TD,) = torch.autograd.grad(logits_C.max(), [last_1TD])
        read_position = _find_only_position(_moves_logit(by_last_1TD))
        exact_logits_C = logits_C.detach().cpu().double()
        return Prediction(exact_logits_C, read_position)

    def _run_with_derivatives(self, ids: Sequence[int]) -> _DifferentiablePass:
        """Run a forward pass for one text, and return the tensors for computing derivatives of its logits."""
        vectors: list[Tensor] = []  # the word embeddings, then the output of each layer

        def keep_output(_module: Any, _inputs: Any, output: Any) -> None:
            vectors.append(first_of(output))

        words = self.base.get_submodule(self.family.word_embedding)
        with ExitStack() as hooks:
            for module in (words, *self.layers):
                hook = module.register_forward_hook(keep_output)
                hooks.enter_context(hook)
            output = self.model(**self._create_batch(ids))
        return _DifferentiablePass(output.logits[0], vectors[0], vectors[-1])

    def map_layers(
        self, function: Callable[[LayerPass], Result], ids: Sequence[int]
    ) -> tuple[list[Result], Tensor, list[HeadCall]]:
        """Return the result of `function` for each layer, the logits `[C]`, and the calls of the head's Linears.

        All results come from one forward pass for a single text.
        """
        results: list[Result] = []
        points = (*LAYER_POINTS, PROJECTED, PREACTIVATION)  # capture points that `function` may use
        with self._record_head_calls() as calls, torch.no_grad():

            def append_result(layer_pass: LayerPass, _features: Any) -> None:
                """Apply `function` to a layer, and discard the calls recorded so far, which precede the head."""
                result = function(layer_pass.document(0))
                results.append(result)
                calls.clear()

            output = run_layers(self.base, self._create_batch(ids), append_result, points, self.model)
        return results, output.logits[0], calls

    def attnlrp(self, ids: Sequence[int], label: int, read: int, name: str) -> Tensor | None:
        """Return the AttnLRP relevance `[T]` of each token for the logit of class `label`.

        Return None if the head is not supported by `FixedFactorScores`. `read` is the position of the only token that
        the head reads, and `name` the text's name in messages.
        """
        relevance_pass = self._run_with_relevance_rules(ids)
        read_D = relevance_pass.last_1TD[0, read]
        # `FixedFactorScores` splits the vector that the head reads into the part from tokens and the part from biases.
        # In the layers, the backward pass follows `relevance_rules` without such a split, so the part from tokens is
        # the whole vector, and the part from biases is 0.
        biases_D = torch.zeros_like(read_D)
        parts_JD = torch.stack([read_D, biases_D])
        head = FixedFactorScores(self, read, parts_JD, read_D.detach())
        return head.relevance(relevance_pass.input_1TD, relevance_pass.head_calls, relevance_pass.logits_C, label, name)

    def _run_with_relevance_rules(self, ids: Sequence[int]) -> _RelevancePass:
        """Run a forward pass for one text whose backward pass follows `relevance_rules`."""
        first_inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def make_input_leaf(_module: Any, arguments: Any, options: dict[str, Any]) -> Any:
            """Replace the first layer's input by a copy that is a leaf of the autograd graph."""
            if first_inputs:  # Shared layers run repeatedly; only the first call matters.
                return None
            vectors = arguments[0] if arguments else options["hidden_states"]
            leaf = vectors.detach().requires_grad_()
            first_inputs.append(leaf)
            if arguments:
                return (leaf, *arguments[1:]), options
            return arguments, {**options, "hidden_states": leaf}

        with self._record_head_calls() as calls, relevance_rules(self.base), ExitStack() as hooks:

            def keep_output(_module: Any, _inputs: Any, output: Any) -> None:
                """Store a layer's output, and discard the calls recorded so far, which precede the head."""
                outputs.append(first_of(output))
                calls.clear()

            first_hook = self.layers[0].register_forward_pre_hook(make_input_leaf, with_kwargs=True)
            hooks.enter_context(first_hook)
            for layer in self.layers:
                hook = layer.register_forward_hook(keep_output)
                hooks.enter_context(hook)
            output = self.model(**self._create_batch(ids))
        (input_1TD,) = first_inputs
        return _RelevancePass(input_1TD, outputs[-1], output.logits[0].detach(), calls)

    @contextmanager
    def _record_head_calls(self) -> Iterator[list[HeadCall]]:
        """Yield a list that collects the calls of all Linears of the model.

        Callers clear the list after each layer, so that only the calls of the head remain.
        """
        calls: list[HeadCall] = []

        def record_call(module: Any, inputs: Any, output: Tensor) -> None:
            """Store the input and output vectors of a Linear, one row per vector."""
            input_rows = inputs[0].detach().flatten(0, -2)
            output_rows = output.detach().flatten(0, -2)
            calls.append(HeadCall(module, input_rows, output_rows))

        with ExitStack() as hooks:
            for module in self.model.modules():
                if isinstance(module, Linear):
                    hook = module.register_forward_hook(record_call)
                    hooks.enter_context(hook)
            yield calls

    @cached_property
    def values(self) -> list[Affine]:
        """The affine map x -> x W_V + b_V from the attention input to the values, for each layer."""
        one_token = self._create_batch([self.tokenizer.pad_token_id])  # the maps do not depend on this token
        maps = map_layers(value_map, self.base, one_token)
        return [Affine(values.W.clone(), values.b.clone()) for values in maps]  # Autograd cannot use inference tensors.

    def between(self, first: Linear, second: Linear, number: Tensor) -> Tensor:
        """Return the input `[width]` of the head's Linear `second` if all outputs of `first` equal `number` `[1]`.

        This evaluates the activation between the two Linears at `number`, in a forward pass for an arbitrary text.
        """
        second_inputs: list[Tensor] = []

        def replace_output(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            return number.expand_as(output)

        def record_input(_module: Any, inputs: Any) -> None:
            rows = inputs[0].flatten(0, -2)
            second_inputs.append(rows[0])

        any_text = self._create_batch([self.tokenizer.pad_token_id])
        with (
            first.register_forward_hook(replace_output),
            second.register_forward_pre_hook(record_input),
            torch.inference_mode(),
        ):
            self.model(**any_text)
        return second_inputs[-1]

    def _create_batch(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the model's input for a single text."""
        return padded([list(ids)], self.tokenizer.pad_token_id, self.model.device)


def _moves_logit(derivative_1TD: Tensor) -> Tensor:
    """Return a mask `[T]` of tokens with a non-zero derivative of a logit."""
    size_T = derivative_1TD[0].abs().sum(-1)
    return size_T > 0


def _find_only_position(read_T: Tensor) -> int:
    """Return the position of the only token in the mask, or -1 if the number of tokens is not 1."""
    positions = read_T.nonzero()[:, 0].tolist()
    if len(positions) != 1:
        return -1
    return int(positions[0])


def decomposition_obstacle(family: Family) -> str | None:
    """Return the reason why a model family's logits cannot be decomposed into one term per token; None if they can."""
    if len(family.stacks) > 1:
        return "it has a decoder after its encoder"
    # The decomposition has the same requirements as the ratio `layer_n`: a feed-forward network that follows attention
    # and consists of known Linears and an activation. Families without such a network have an empty `network`, and
    # `absent` contains the reason.
    (stack,) = family.stacks
    has_required_network = len(stack.network) > 0
    if has_required_network:
        return None
    reasons_by_measure = family.absent()
    return reasons_by_measure["layer_n"]


class FixedFactorScores:
    """The class scores of one text as an affine function of the vector that the head reads.

    The standard deviations of norms and the slopes of activations are fixed at the values of one forward pass. `read`
    is the position of the token that the head reads, `whole_D` the vector at this position after the last layer, and
    `parts_JD` the parts of this vector: the term from all tokens, and the term from the biases.
    """

    def __init__(self, classifier: Classifier, read: int, parts_JD: Tensor, whole_D: Tensor) -> None:
        self.classifier = classifier
        self.read = read
        self.parts_JD = parts_JD
        self.whole_D = whole_D

    def relevance(
        self, input_TD: Tensor, calls: list[HeadCall], logits_C: Tensor, label: int, name: str
    ) -> Tensor | None:
        """Return, for each token `[T]`, input times gradient of the score of class `label` at the first layer's input.

        `input_TD` is this input. The gradient is that of the part of the score that comes from the tokens; the part
        from the biases is excluded. `calls`, `logits_C` and `name` are those of `logits`. Return None if the head is
        not supported.
        """
        with torch.enable_grad():
            parts_JC = self.logits(calls, logits_C, name)
        if parts_JC is None:
            return None
        tokens_C = parts_JC[0]  # without the part of the biases
        (gradient,) = torch.autograd.grad(tokens_C[label], input_TD)
        products = (gradient * input_TD).sum(-1).detach()
        return products.flatten()

    def logits(self, calls: list[HeadCall], logits_C: Tensor, name: str) -> Tensor | None:
        """Return both parts `[J, C]` of the logits: that from all tokens, and that from the biases.

        `calls` are the calls of the head's Linears, `logits_C` the model's logits, and `name` is the name of the text
        in messages. Return None unless the head is one Linear, or two joined by an activation. Raise `InputError` if
        the parts do not sum to the logits.
        """
        parts_JD, whole_D = self._map_through_final_norm()
        if not self._is_supported(calls, whole_D, logits_C):
            return None
        parts_JC = self._map_through_head(calls, parts_JD)
        self._check_sum(parts_JC, logits_C, name)
        return parts_JC

    def _map_through_final_norm(self) -> tuple[Tensor, Tensor]:
        """Return the parts `[J, D]` and the whole vector `[D]` after the norm that follows the last layer, if any."""
        parts_JD = self.parts_JD
        whole_D = self.whole_D
        stack = self.classifier.family.stacks[0]
        norm_paths = [stack.final_norm] if stack.final_norm else []
        for module in optional_modules(self.classifier.base, norm_paths):
            norm = norm_of(module, whole_D)
            parts_JD = _add_to_biases(norm.part(parts_JD, whole_D), norm.beta)
            whole_D = module(whole_D)
        return parts_JD, whole_D

    def _is_supported(self, calls: list[HeadCall], whole_D: Tensor, logits_C: Tensor) -> bool:
        """Return True if the head calls one or two Linears, from the vector `whole_D` to the logits."""
        if not 1 <= len(calls) <= 2:
            return False
        first_input, _ = calls[0].rows_at(self.read)
        _, last_output = calls[-1].rows_at(self.read)
        reads_token = first_input.shape == whole_D.shape and torch.allclose(first_input, whole_D)
        return reads_token and torch.equal(last_output, logits_C)

    def _map_through_head(self, calls: list[HeadCall], parts_JD: Tensor) -> Tensor:
        """Return the parts `[J, C]` after the head: one Linear, or two with an activation between them.

        The activation g is replaced by p -> slope * p + g(0), where the slope (g(p) - g(0)) / p is fixed.
        """
        first = calls[0]
        parts_JE = _map_parts(linear_weights(first.module), parts_JD)  # E is the output width of the first Linear
        if len(calls) == 1:
            return parts_JE
        last = calls[1]
        _, first_output_E = first.rows_at(self.read)
        last_input_E, _ = last.rows_at(self.read)
        activation = partial(self.classifier.between, first.module, last.module)
        with torch.no_grad():
            slopes_E = slopes(activation, first_output_E, last_input_E)
            constant_E = activation(slopes_E.new_zeros(1))  # g(0), added to the biases
        parts_JE = _add_to_biases(parts_JE * slopes_E, constant_E)
        return _map_parts(linear_weights(last.module), parts_JE)

    def _check_sum(self, parts_JC: Tensor, logits_C: Tensor, name: str) -> None:
        """Raise `InputError` if the parts `[J, C]` do not sum to the logits `[C]` of the text `name`."""
        largest = logits_C.abs().max().clamp_min(1e-30)
        sums_C = parts_JC.detach().sum(0)
        largest_error = (sums_C - logits_C).abs().max()
        error = float(largest_error / largest)
        if not error <= SUM_TOLERANCE:
            family = self.classifier.family.model_type
            raise InputError(
                f"{self.classifier.folder}: the parts of the class scores of {name} do not sum to the scores (relative "
                f"error {error:.3g}; rounding explains at most {SUM_TOLERANCE:g}); the entry of {family} in "
                "attnmix/models/families.yaml is wrong for this model"
            )


class Decomposition:
    """Parts of a text's vectors, from tokens and from biases, propagated layer by layer from the first layer's input.

    In the last layer, only the vector of the token that the head reads is decomposed.
    """

    def __init__(self, classifier: Classifier, read: int) -> None:
        """Prepare the decomposition of the vector at position `read`, the only one that the head reads."""
        self.classifier = classifier
        self.read = read
        self.values = classifier.values  # This property runs a forward pass, so it is read before the text's pass.
        # `visit` sets these tensors.
        self.input_TD = torch.empty(0)  # input of the first layer
        self.whole_D = torch.empty(0)  # output of the visited layer for the token that the head reads
        self.parts_JTD = torch.empty(0)  # parts of the visited layer's output

    def visit(self, layer_pass: LayerPass) -> None:
        """Propagate the parts of tokens and biases through one layer; call this method for each layer in order.

        The parts `[J, T, D]` of the layer's output, and its vector `[D]` for the token that the head reads, are stored.
        """
        number = layer_pass.call.number  # layers are numbered from 1
        is_last = number == len(self.values)
        rows = slice(None)  # all tokens
        if is_last:  # only the vector that the head reads is needed
            rows = slice(self.read, self.read + 1)
        values = self.values[number - 1]
        with torch.enable_grad():
            if number == 1:
                self.input_TD = layer_pass.x.detach().requires_grad_()
                biases_TD = torch.zeros_like(self.input_TD)
                self.parts_JTD = torch.stack([self.input_TD, biases_TD])
            self.parts_JTD = through_layer(layer_pass, values, self.parts_JTD, rows)
        output_TD = layer_pass.features["layer_output"]
        self.whole_D = output_TD[self.read]

    def relevance(self, calls: list[HeadCall], logits_C: Tensor, label: int, name: str) -> Tensor | None:
        """Return each token's contribution `[T]` to the score of class `label`; call `visit` for all layers first.

        Return None if the head is not supported by `FixedFactorScores`.
        """
        parts_JD = self.parts_JTD[:, 0]  # after the last layer, there are only parts of the token at `read`
        head = FixedFactorScores(self.classifier, self.read, parts_JD, self.whole_D)
        return head.relevance(self.input_TD, calls, logits_C, label, name)


def _add_to_biases(parts_JD: Tensor, bias_D: Tensor) -> Tensor:
    """Return the parts `[J, D]` with `bias_D` added to the last part, the biases."""
    biases_1D = parts_JD[-1:] + bias_D
    return torch.cat([parts_JD[:-1], biases_1D])


def _map_parts(affine: Affine, parts_JD: Tensor) -> Tensor:
    """Return the parts `[J, E]` after an affine map. The map's bias is added to the part of the biases."""
    return _add_to_biases(parts_JD @ affine.W, affine.b)
