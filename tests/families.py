"""A tiny classifier and tokenizer of every model family, generated offline."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import WORDS, run_stages, toy_reviews
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from attnmix.core.names import MATRIX_NAMES, POINTS
from attnmix.models.families import FAMILIES as TABLE
from attnmix.models.families import Family, family_of

TINY: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("tiny_families.yaml").read_text("utf-8"))
REFUSED = TINY.pop("refused")
FAMILIES = tuple(TINY)
# Default families of slow tests; `pytest -m families`, part of .ci/run, runs these tests for the other families.
KINDS = ("gpt_neox", "qwen3", "bart")
# Properties of a stack, in addition to its norms, that determine how a layer adds vectors.
ALGEBRA_PROPERTIES = ("parallel", "own_attention", "cross_attention", "gated")


def each_family(*by_default: str, names: Sequence[str] = FAMILIES) -> list[Any]:
    """Return the families `names` as test parameters, and mark all except `by_default` for `pytest -m families`."""
    return [name if name in by_default else pytest.param(name, marks=pytest.mark.families) for name in names]


EACH_FAMILY = each_family(*KINDS)


def tiny_family(name: str) -> Family:
    """Return the family of a tiny model."""
    depends_on_config = TABLE[name].keys() & {"parallel", "gated_where"}
    if not depends_on_config:  # importing the configurations of all families costs two seconds
        return family_of(SimpleNamespace(model_type=name))
    return family_of(AutoConfig.for_model(name, **TINY[name]["config"]))


def layer_algebra(family: Family) -> tuple[frozenset[str], ...]:
    """Return, for each stack, the norms of a layer and the properties of its sublayers.

    Families with the same algebra have the same measures, and all stages run the same code for them.
    """
    algebra = []
    for stack in family.stacks:
        properties = {name for name in ALGEBRA_PROPERTIES if getattr(stack, name)}
        if stack.layers.count("*") > 1:
            properties.add("shared layers")
        algebra.append(frozenset({*stack.parts(), *properties}))
    return tuple(algebra)


def one_of_each_algebra() -> list[str]:
    """Return one family for each set of families whose layers compute the same equations.

    It is the first family in which the concatenated heads are wider or narrower than the residual stream; if there is
    none, the first family.
    """
    own_width = [name for name in FAMILIES if TINY[name]["config"].keys() & {"head_dim", "d_kv"}]
    chosen: dict[Any, str] = {}
    for name in (*own_width, *FAMILIES):
        chosen.setdefault(layer_algebra(tiny_family(name)), name)
    return sorted(chosen.values(), key=FAMILIES.index)


ALGEBRAS = one_of_each_algebra()
"""Families for tests of code that depends only on the layers."""
OWN_WIDTH, DECODER = "qwen3", "bart"
"""A family with an independent head width, and an encoder-decoder family."""
SEGMENTED = ("bert", "electra", "albert", "nomic_bert", "ernie")  # their tokenizers return token_type_ids


@dataclass(frozen=True)
class Tokens:
    """A family's tokenizer: its algorithm, its special tokens by role, and the token IDs in its config."""

    kind: str
    special: str
    roles: dict[str, str]
    template: str = "$A"
    ids: dict[str, str] = field(default_factory=dict)
    at_end: bool = False
    padding_side: str = "right"


TOKENS = {name: Tokens(**family["tokenizer"]) for name, family in {**TINY, **REFUSED}.items()}


def one_of_each_tokenizer() -> list[str]:
    """Return one family for each combination of tokenizer, template, padding token, segments and number of stacks."""
    chosen: dict[Any, str] = {}
    for name in FAMILIES:
        tokens = TOKENS[name]
        roles_of_padding = frozenset(role for role, token in tokens.roles.items() if token == tokens.roles.get("pad"))
        stacks = len(tiny_family(name).stacks)
        chosen.setdefault((tokens.kind, tokens.template, roles_of_padding, name in SEGMENTED, stacks), name)
    return list(chosen.values())


def corpus() -> list[str]:
    """Return texts that contain every word of the toy reviews; most words occur several times."""
    return [" ".join(word.removeprefix("##") for word in WORDS), *toy_reviews(48, seed=1)["text"]]


def wordpiece(special: list[str]) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer


def unigram(special: list[str]) -> Tokenizer:
    """Return a tokenizer that prefers whole words to single letters, as a trained tokenizer does."""
    texts = corpus()
    words = sorted({f"▁{word}" for text in texts for word in text.split()})
    pieces = sorted({"▁", *"".join(words)} - set(words))
    scores = [*((token, 0.0) for token in special), *((word, -4.0) for word in words), *((p, -8.0) for p in pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=special.index("<unk>")))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def pair_encoding(special: list[str], unknown: str | None) -> Tokenizer:
    """Return a BPE tokenizer: byte-level if `unknown` is None, otherwise with spaces marked as in SentencePiece."""
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    if unknown is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if unknown is None else []
    options: dict[str, Any] = {"vocab_size": 400, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(special_tokens=special, **options))
    return tokenizer


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the family's algorithm and the words of the toy reviews."""
    tokens = TOKENS[name]
    special = tokens.special.split()
    first = [] if tokens.at_end else special  # special tokens with the lowest IDs
    if tokens.kind == "wordpiece":
        tokenizer = wordpiece(first)
    elif tokens.kind == "unigram":
        tokenizer = unigram(first)
    else:
        tokenizer = pair_encoding(first, "<unk>" if tokens.kind == "metaspace" else None)
    tokenizer.add_special_tokens(special)
    # The template, such as "[CLS] $A [SEP]", adds special tokens to a text; the second text of a pair has segment 1.
    used = [(token, tokenizer.token_to_id(token)) for token in special if token in tokens.template.split()]
    if used:
        after = tokens.template.partition("$A")[2].strip()
        pair = f"{tokens.template} $B:1"
        if after:
            pair += f" {after}:1"
        template = processors.TemplateProcessing(single=tokens.template, pair=pair, special_tokens=used)
        tokenizer.post_processor = template
    roles = {f"{role}_token": token for role, token in tokens.roles.items()}
    inputs = ["input_ids", *(["token_type_ids"] if name in SEGMENTED else []), "attention_mask"]
    options: dict[str, Any] = {"padding_side": tokens.padding_side, "model_max_length": 60, "model_input_names": inputs}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options, **roles)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw parameters with larger standard deviations than at initialisation, and norm weights around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            kind = type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                centre = float(kind.endswith("Norm") and name == "weight" and not kind.startswith("Gemma"))
                parameter.copy_(centre + 0.25 * torch.randn(parameter.shape, generator=generator))


ARABIC = "الفيلم رائع IMAX"
# The last text has enough words for a map of the token embeddings.
TEXTS = ["the film was very good , the film", ARABIC, "a", " ".join(word for word in WORDS if word.isalpha())]


def run_family(folder: Path, layouts: Sequence[str] = ("separate",)) -> None:
    """Run the pipeline at all capture points, on reviews with special tokens; `folder` contains the folder `model`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    special, reviews = " ".join(tokenizer.all_special_tokens), toy_reviews(24, 0)
    reviews["text"] = f"{special} " + reviews["text"]
    reviews.to_csv(folder / "reviews.csv", index=False)
    run_stages(
        folder,
        dataset={"name": "reviews.csv", "validation_fraction": 0.25},
        capture={"documents": [], "texts": TEXTS, "max_length": 40, "points": list(POINTS), "dtype": "float32"},
        measure={"documents": 2, "matrices": list(MATRIX_NAMES), "gradient_documents": 1, "gradient_max_length": 8},
        umap={"layouts": list(layouts)},
    )


@cache
def tiny_folder(name: str) -> Path:
    """Return the folder of a family's tiny model, written once per process; tests must not change it."""
    folder = tempfile.mkdtemp(prefix=f"{name}-")
    atexit.register(shutil.rmtree, folder)
    return write_family(name, Path(folder))


def write_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a randomly initialised classifier of the family `name` with its tokenizer, and return `folder`."""
    tokenizer = make_tokenizer(name)
    tokenizer.save_pretrained(folder)
    named: dict[str, str | None] = {"pad": None, "bos": None, "eos": None, **TOKENS[name].ids}
    ids = {f"{role}_token_id": token and tokenizer.convert_tokens_to_ids(token) for role, token in named.items()}
    # BART has three classes by default, so the two labels are given explicitly. As in real models, embeddings have
    # additional rows.
    labels = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    if AutoConfig.for_model(name).is_encoder_decoder and ids["bos_token_id"] is None:
        ids["decoder_start_token_id"] = ids["pad_token_id"]
    config = AutoConfig.for_model(
        name, vocab_size=len(tokenizer) + 3, **labels, **{**TINY, **REFUSED}[name]["config"], **ids
    )
    model = AutoModelForSequenceClassification.from_config(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder
