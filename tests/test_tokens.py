"""Tokens as people read them: whatever the tokenizer, their parts make up the text, and its words are found again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
from conftest import tokens_table
from families import make_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnmix.core.names import DECODER_INPUT, Site
from attnmix.figures.tokens import DisplayToken, frequent_words, read_captured, short_part, words
from attnmix.models.encoding import tokenize_texts

# ruff: noqa: RUF001  # the signs that look like others are what is tested
TEXT = "The café wasn’t ‘dull’, the 42 cafés weren't: naïve film \U0001f600 film 你好 the film\n\nThe end ## of ▁ it."
NO_STEPS = pd.DataFrame({"step": [], "layer": []})
SPECIAL = {"[CLS]": "cls", "[SEP]": "sep", "<s>": "cls", "</s>": "sep"}


def shown(tokenizer: Any, text: str, max_length: int = 200) -> list[DisplayToken]:
    (tokenized,) = tokenize_texts(tokenizer, ["test/0"], [text], max_length)
    return read_captured(tokenized.table, NO_STEPS).readings[0]


def read(labels: Sequence[str]) -> list[DisplayToken]:
    return read_captured(tokens_table(labels, SPECIAL), NO_STEPS).readings[0]


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_level(vocabulary: int, trim: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": ["<s>", "</s>"], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=vocabulary, **options))
    ends = (("</s>", 1), ("<s>", 0))
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=trim, add_prefix_space=False)
    return wrapped(tokenizer)


def metaspace(prefix: bool) -> PreTrainedTokenizerFast:
    """As in Llama's: characters that the vocabulary lacks become bytes."""
    letters = sorted(set(TEXT.replace(" ", "▁")) - {"\U0001f600", "你"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *letters, "▁t", "he"]
    vocabulary = {piece: number for number, piece in enumerate(names)}
    merges = [("▁", "t"), ("h", "e")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return wrapped(tokenizer)


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(258), byte_level(300), byte_level(300, trim=True), metaspace(prefix=False), metaspace(prefix=True)],
    ids=["bytes", "bpe", "trimmed", "spaces", "prefix"],
)
def test_labels_make_up_the_text_and_words_begin_after_spaces(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = shown(tokenizer, TEXT)
    assert (pieces[0].label, pieces[-1].label) == ("<s>", "</s>")
    before = ""
    for piece in (each for each in pieces[1:-1] if each.label != "…"):  # a further part of a character
        assert piece.begins == (not before or before[-1] in "␣⏎" or piece.label[0] in "␣⏎")
        before += piece.label
    text = TEXT.replace("▁", " ")  # SentencePiece cannot tell them apart
    assert before.replace("⏎", "\n").replace("␣", " ").replace("▁", " ").removeprefix(" ") == text
    # A tokenizer may part a word at an apostrophe.
    assert re.findall(r"\w+", " ".join(words(pieces))) == re.findall(r"\w+", text.lower())
    assert frequent_words(words(pieces), 2) == ["the", "film"]


def test_wordpiece_keeps_its_names_and_the_spaces_of_the_text(default_weights: Any) -> None:
    pieces = shown(AutoTokenizer.from_pretrained(default_weights), "Unloved, it isn't a Café film ☂!")
    labels = ["[CLS]", "un", "##lov", "##ed", ",", "it", "isn", "'", "t", "a", "cafe", "film", "[UNK]", "!", "[SEP]"]
    assert [piece.label for piece in pieces] == labels
    assert [piece.text for piece in pieces] == [label.removeprefix("##") for label in labels]
    apart = {"[CLS]", "un", "it", "isn", "a", "cafe", "film", "[UNK]", "[SEP]"}
    assert {piece.label for piece in pieces if piece.begins} == apart
    assert list(filter(None, words(pieces))) == ["unloved", "it", "isn", "t", "a", "cafe", "film", "[UNK]"]


def test_a_text_that_is_cut_within_a_character_is_still_read() -> None:
    assert [piece.label for piece in shown(byte_level(258), "a 好", 5)] == ["<s>", "a", "␣", "好", "</s>"]
    assert [piece.label for piece in shown(byte_level(258), "好", 9)] == ["<s>", "好", "…", "…", "</s>"]


def test_a_decoder_reads_each_text_one_token_later() -> None:
    table = tokens_table(["<s>", "␣a", "␣fi", "lm", "</s>"], SPECIAL)
    both = pd.concat([table, table.assign(document="test/1")], ignore_index=True)
    both["decoder_token"] = ["</s>", "<s>", "Ġa", "Ġfi", "lm"] * 2
    steps = pd.DataFrame({"step": ["heads"] * 4 + ["cross_attention"] * 2, "layer": [1, 2, 3, 4, 3, 4]})
    captured = read_captured(both, steps)
    assert [piece.label for piece in captured.readings[1]] == ["</s>", "<s>", "␣a", "␣fi", "lm"] * 2
    assert [piece.token_class for piece in captured.readings[1]] == ["sep", "cls", "word", "word", "word"] * 2
    assert words(captured.readings[1]) == ["", "", "a", "film", ""] * 2
    assert captured.encoder == 2
    sites = [Site(0, "word_embedding"), Site(2, "layer_output"), Site(2, DECODER_INPUT), Site(3, "attention_heads")]
    assert [captured.reading(site) for site in sites] == [0, 0, 1, 1]
    assert captured.class_label("sep") == "</s>"


def test_without_special_tokens_none_is_called_so() -> None:
    (tokenized,) = tokenize_texts(make_tokenizer("gpt2"), ["test/0"], ["The film"], 9)
    captured = read_captured(tokenized.table, NO_STEPS)
    assert captured.class_label("cls") == captured.class_label("sep") == ""
    assert captured.encoder is None
    assert captured.reading(Site(9, "layer_output")) == 0


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ("[CLS] a film . [SEP]", 5, range(5)),  # the whole text
        ("[CLS] a good film . a film . [SEP]", 5, range(1, 5)),  # the longest that fits
        ("[CLS] a good film . a film . [SEP]", 3, range(5, 8)),
        ("[CLS] a good film . a film . [SEP]", 2, range(2)),  # none fits
        ("[CLS]", 5, range(1)),
        ("[CLS] It works . Does it ? ( Yes ! ) No [SEP]", 4, range(7, 11)),
        ("[CLS] Well . . . \u201c so \u201d , then !! [SEP]", 6, range(5, 11)),
        ("[CLS] Well . . . \u201c so \u201d , then !! [SEP]", 5, range(1, 5)),
        ("[CLS] 映画 。 良い [SEP]", 3, range(1, 3)),
        ("no end", 1, range(1)),
    ],
)
def test_short_part_of_a_text_is_a_whole_sentence_where_one_fits(tokens: str, most: int, expected: range) -> None:
    assert short_part(read(tokens.split()), most) == expected
