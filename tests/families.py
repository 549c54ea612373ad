"""A tiny classifier of every model family, with a tokenizer of its kind; everything is made here, offline."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS, toy_reviews
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

WIDTHS = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
ENCODER = {**WIDTHS, "intermediate_size": 40}
ROBERTA = {**ENCODER, "num_hidden_layers": 2, "max_position_embeddings": 66, "type_vocab_size": 1}
DECODER = {**ENCODER, "hidden_size": 32}
GROUPED = {**DECODER, "num_key_value_heads": 2, "num_hidden_layers": 2}
BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 40}

# Keyword arguments of each configuration; what is not named has the family's default.
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "electra": {**ENCODER, "embedding_size": 16},
    "albert": {**ENCODER, "embedding_size": 16},
    "distilbert": {"dim": 24, "hidden_dim": 40, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64},
    "nomic_bert": ENCODER,
    "modernbert": {**DECODER, "num_hidden_layers": 4, "local_attention": 8},
    "gpt2": {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_inner": 40, "n_positions": 64},
    "gpt_neox": {**DECODER, "rotary_pct": 0.25, "use_parallel_residual": True},
    "opt": {**WIDTHS, "ffn_dim": 40},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 6},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "hidden_size": 24, "head_dim": 12},
    "gemma3_text": {
        **{**GROUPED, "hidden_size": 24, "head_dim": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 16},
        **{"sliding_window": 6, "sliding_window_pattern": 2},
    },
    "olmo2": GROUPED,
    "phi3": {**GROUPED, "sliding_window": 10, "original_max_position_embeddings": 64},
    "smollm3": {**GROUPED, "num_hidden_layers": 3, "no_rope_layer_interval": 2},
    "bart": {
        **{f"encoder_{key}": value for key, value in BART_SIDE.items()},
        **{f"decoder_{key}": value for key, value in BART_SIDE.items()},
        **{"d_model": 24, "max_position_embeddings": 64},
    },
}
FAMILIES = tuple(CONFIGS)
# One of each kind, for long tests; `pytest -m families`, which .ci/run adds, runs them for the others.
KINDS = ("gpt_neox", "qwen3", "bart")
EACH_FAMILY = [name if name in KINDS else pytest.param(name, marks=pytest.mark.families) for name in FAMILIES]
SEGMENTED = ("bert", "electra", "albert", "nomic_bert")  # their tokenizers give token_type_ids


@dataclass(frozen=True)
class Tokens:
    """How a family's tokenizer splits, its special tokens by role, and which of them its config names."""

    kind: str
    special: str
    roles: dict[str, str]
    template: str = "$A"
    config: dict[str, str] = field(default_factory=dict)
    at_end: bool = False
    padding_side: str = "right"


WORDPIECE = Tokens(
    "wordpiece",
    "[PAD] [UNK] [CLS] [SEP] [MASK]",
    {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "[CLS] $A [SEP]",
    {"pad": "[PAD]"},
)
ROBERTA_IDS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>"}
ROBERTA_ROLES = {**ROBERTA_IDS, "cls": "<s>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
BYTES = Tokens("bytes", "<s> <pad> </s> <unk> <mask>", ROBERTA_ROLES, "<s> $A </s>", ROBERTA_IDS)
PIECES = Tokens("unigram", "<s> <pad> </s> <unk> <mask>", ROBERTA_ROLES, "<s> $A </s>", ROBERTA_IDS)
END = "<|endoftext|>"
END_IDS = {"bos": END, "eos": END}
END_ROLES = {**END_IDS, "unk": END}
LLAMA_ROLES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
LLAMA = Tokens("metaspace", "<unk> <s> </s>", LLAMA_ROLES, "<s> $A", {"bos": "<s>", "eos": "</s>"})
QWEN = Tokens("bytes", f"{END} <|im_start|> <|im_end|>", {"eos": END, "pad": END}, config=END_IDS, at_end=True)
TOKENS = {
    **dict.fromkeys(("bert", "electra", "distilbert", "nomic_bert"), WORDPIECE),
    **dict.fromkeys(("roberta", "bart"), BYTES),
    "xlm-roberta": PIECES,
    "camembert": Tokens(
        "unigram", "<s>NOTUSED <pad> </s>NOTUSED <unk> <mask> <s> </s>", ROBERTA_ROLES, "<s> $A </s>", ROBERTA_IDS
    ),
    "albert": Tokens(
        "unigram",
        "<pad> <unk> [CLS] [SEP] [MASK]",
        {**WORDPIECE.roles, "pad": "<pad>", "unk": "<unk>", "bos": "[CLS]", "eos": "[SEP]"},
        "[CLS] $A [SEP]",
        {"pad": "<pad>", "bos": "[CLS]", "eos": "[SEP]"},
    ),
    "modernbert": Tokens(
        "bytes",
        "[UNK] [CLS] [SEP] [PAD] [MASK]",
        WORDPIECE.roles,
        "[CLS] $A [SEP]",
        {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "cls": "[CLS]", "sep": "[SEP]"},
        at_end=True,
    ),
    "gpt2": Tokens("bytes", END, END_ROLES, config=END_IDS, at_end=True),
    "gpt_neox": Tokens("bytes", f"{END} <|padding|>", END_ROLES, config=END_IDS),
    "opt": Tokens(
        "bytes",
        "<s> <pad> </s> <unk>",
        {"bos": "</s>", "eos": "</s>", "unk": "</s>", "pad": "<pad>"},
        "</s> $A",
        {"bos": "</s>", "eos": "</s>", "pad": "<pad>"},
    ),
    **dict.fromkeys(("llama", "mistral"), LLAMA),
    **dict.fromkeys(("qwen2", "qwen3"), QWEN),
    "gemma3_text": Tokens(
        "metaspace",
        "<pad> <eos> <bos> <unk>",
        {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"},
        "<bos> $A",
        {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>"},
        padding_side="left",
    ),
    "olmo2": Tokens(
        "bytes", f"{END} <|pad|>", {**END_ROLES, "pad": "<|pad|>"}, config={"eos": END, "pad": "<|pad|>"}, at_end=True
    ),
    "phi3": Tokens(
        "metaspace",
        f"<unk> <s> </s> {END}",
        {"unk": "<unk>", "bos": "<s>", "eos": END, "pad": END},
        config={"bos": "<s>", "eos": END, "pad": END},
        padding_side="left",
    ),
    "smollm3": Tokens(
        "bytes",
        "<|begin_of_text|> <|end_of_text|> <|pad|>",
        {"eos": "<|end_of_text|>", "pad": "<|pad|>"},
        config={"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "pad": "<|pad|>"},
        at_end=True,
    ),
}


def corpus() -> list[str]:
    """Every word of the toy reviews, most of them often."""
    return [" ".join(word.removeprefix("##") for word in WORDS), *toy_reviews(48, seed=1)["text"]]


def wordpiece(special: list[str]) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram(special: list[str]) -> Tokenizer:
    """Whole words before single letters, the order that a trained model's scores give."""
    texts = corpus()
    words = sorted({f"▁{word}" for text in texts for word in text.split()})
    pieces = sorted({"▁", *"".join(words)} - set(words))
    scores = [*((token, 0.0) for token in special), *((word, -4.0) for word in words), *((p, -8.0) for p in pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=special.index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def pair_encoding(special: list[str], unknown: str | None) -> Tokenizer:
    """Byte-level merges, or with a token for what is unknown SentencePiece's kind with the visible space."""
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    alphabet = []
    if unknown is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The family's kind of tokenizer, over the words of the toy reviews."""
    tokens = TOKENS[name]
    special = tokens.special.split()
    first = [] if tokens.at_end else special
    if tokens.kind in ("wordpiece", "unigram"):
        tokenizer = {"wordpiece": wordpiece, "unigram": unigram}[tokens.kind](first)
    else:
        tokenizer = pair_encoding(first, "<unk>" if tokens.kind == "metaspace" else None)
    tokenizer.add_special_tokens(special)
    used = [(token, tokenizer.token_to_id(token)) for token in special if token in tokens.template.split()]
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=tokens.template, special_tokens=used)
    roles = {f"{role}_token": token for role, token in tokens.roles.items()}
    inputs = ["input_ids", *(["token_type_ids"] if name in SEGMENTED else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side=tokens.padding_side,
        model_max_length=60,
        model_input_names=inputs,
        **roles,
    )


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter far from its initial value, norms' weights around the one that leaves lengths as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            kind = type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                centre = float(kind.endswith("Norm") and name == "weight" and not kind.startswith("Gemma"))
                parameter.copy_(centre + 0.25 * torch.randn(parameter.shape, generator=generator))


def write_family(name: str, folder: Path, seed: int = 0) -> Path:
    """A randomly initialised classifier of the family `name` with its tokenizer, in `folder`."""
    tokenizer = make_tokenizer(name)
    tokenizer.save_pretrained(folder)
    named: dict[str, str | None] = {"pad": None, "bos": None, "eos": None, **TOKENS[name].config}
    ids = {f"{role}_token_id": token and tokenizer.convert_tokens_to_ids(token) for role, token in named.items()}
    # Labels by name: BART's configuration reads unnamed ones back as three. Tables of embeddings are larger than
    # the vocabulary, as real ones are.
    labels = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    config = AutoConfig.for_model(name, vocab_size=len(tokenizer) + 3, **labels, **CONFIGS[name], **ids)
    model = AutoModelForSequenceClassification.from_config(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder
