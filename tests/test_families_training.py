"""Padding, truncation, token classes and classifiers are correct for all tokenizers and position encodings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EACH_FAMILY, TOKENS, corpus, make_tokenizer, tiny_folder, write_family
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from attnmix.core.errors import InputError
from attnmix.models.checkpoint import load_config, load_tokenizer, longest_text
from attnmix.models.encoding import encode, padded, tokenize_texts
from attnmix.models.loading import load_base, load_classifier

ROTARY = (
    *("nomic_bert", "modernbert", "gte", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"),
    *("gemma", "gemma2", "gemma3_text", "olmo2", "phi3", "smollm3"),
)
DECODERS = ("gpt2", "gpt_neo", "bloom", "opt", *ROTARY[3:])
T5 = ("t5", "mt5", "umt5")
UNLIMITED = ("bloom", *T5)
BY_DISTANCE = ("deberta-v2", *UNLIMITED)  # positions affect only attention scores, through distances
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=EACH_FAMILY)
def family(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Return a family's name and the folder of its tiny model."""
    return request.param, tiny_folder(request.param)


def texts_for(folder: Path) -> list[str]:
    """Return texts of different lengths; some contain names of special tokens or end with the padding token."""
    tokenizer = load_tokenizer(folder)
    names = " ".join(tokenizer.all_special_tokens)
    return [
        "good",
        "time flies like an arrow",
        f"the film was {names} very good .",
        f"the plot was so dull and the music was cold , not{tokenizer.pad_token}",
    ]


def logits_of(model: Any, ids: list[list[int]], pad: int) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**padded(ids, pad, CPU)).logits
    return logits


def test_padding_does_not_change_logits(family: tuple[str, Path]) -> None:
    name, folder = family
    tokenizer, model = load_tokenizer(folder), load_classifier(folder)
    assert model.config.pad_token_id == model.base_model.config.pad_token_id == tokenizer.pad_token_id
    ids = encode(tokenizer, texts_for(folder), 60)
    assert len({len(text) for text in ids}) == len(ids)
    alone = torch.cat([logits_of(model, [text], tokenizer.pad_token_id) for text in ids])
    batch = DataCollatorWithPadding(tokenizer)([{"input_ids": text} for text in ids])
    assert batch["attention_mask"].tolist() == padded(ids, 0, CPU)["attention_mask"].tolist()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, alone, atol=1e-5, rtol=0)
        assert hasattr(model, "score") == (name in DECODERS)
        if name in DECODERS:
            last = torch.stack([model.base_model(torch.tensor([text])).last_hidden_state[0, -1] for text in ids])
            torch.testing.assert_close(last @ model.score.weight.T, alone, atol=1e-5, rtol=0)


def test_half_precision_checkpoint_is_loaded_in_float32(family: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = family
    load_tokenizer(folder).save_pretrained(tmp_path)
    load_classifier(folder).to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    for model in (load_classifier(tmp_path), load_base(tmp_path)):
        tensors = [*model.parameters(), *model.buffers()]
        assert {each.dtype for each in tensors if each.is_floating_point()} == {torch.float32}
        with torch.no_grad():
            assert "past_key_values" not in model.base_model(input_ids=torch.tensor([[3, 4]]))


def test_longest_text_follows_from_positions(family: tuple[str, Path]) -> None:
    name, folder = family
    limit, base = longest_text(load_config(folder)), load_base(folder)
    assert limit == (None if name in UNLIMITED else 64)
    with torch.no_grad():
        for length in (64, 65):
            ids = torch.tensor([([10, 11, 12] * length)[:length]])
            if length == 64 or name in (*ROTARY, *BY_DISTANCE):
                assert base(ids).last_hidden_state.isfinite().all()
            else:
                with pytest.raises((IndexError, RuntimeError)):
                    base(ids)


def test_special_token_names_in_texts_are_ordinary_text(family: tuple[str, Path]) -> None:
    _, folder = family
    tokenizer = load_tokenizer(folder)
    assert encode(tokenizer, corpus(), 60) == encode(AutoTokenizer.from_pretrained(folder), corpus(), 60)
    special = {
        tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens if "unk" not in token.lower()
    }
    around = [token for token in encode(tokenizer, ["good"], 60)[0] if token in special]
    for ids in encode(tokenizer, texts_for(folder), 60):
        assert [token for token in ids if token in special] == around
    # Truncated texts keep the added special tokens, because BART's classifier uses the eos token.
    (cut,) = encode(tokenizer, ["the film was good " * 5], 9)
    assert len(cut) == 9
    assert [token for token in cut if token in special] == around


def break_padding(folder: Path) -> None:
    """Write a model without an embedding of its padding token."""
    tokenizer = load_tokenizer(write_family("llama", folder))
    rows = load_base(folder).get_input_embeddings().num_embeddings
    tokenizer.add_tokens([f"<added{i}>" for i in range(len(tokenizer), rows)])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)


def write_slow_tokenizer(folder: Path) -> None:
    """Write a model whose tokenizer has no fast implementation."""
    write_family("gpt2", folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"<unk>": 0, "a</w>": 1}')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')


def write_image_model(folder: Path) -> None:
    AutoConfig.for_model("vit").save_pretrained(folder)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (break_padding, r"its tokenizer pads with token \d+, but its embedding has only \d+ rows"),
        (write_slow_tokenizer, r"a fast tokenizer \(tokenizer\.json\) is required"),
        (write_image_model, r"^model\.name: .* of the family 'vit', wh"),
    ],
)
def test_unusable_classifier_is_one_error(tmp_path: Path, write: Any, expected: str) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match=expected):
        load_classifier(tmp_path)


@pytest.mark.parametrize(
    ("template", "roles", "padding"),
    [
        ("$A", {"pad_token": "<a>", "eos_token": "<b>"}, "<a>"),
        ("<c> $A <b>", {"eos_token": "<b>", "bos_token": "<c>"}, "<c>"),
        # As in Qwen3-Embedding, the padding token ends each text.
        ("$A <a>", {"pad_token": "<a>", "eos_token": "<b>"}, "<b>"),
        ("$A <b>", {"eos_token": "<b>", "unk_token": "<b>"}, None),
        ("$A", {}, None),
    ],
)
def test_padding_token_does_not_end_texts(
    tmp_path: Path, template: str, roles: dict[str, str], padding: str | None
) -> None:
    tokenizer = make_tokenizer("gpt2").backend_tokenizer
    tokenizer.add_special_tokens(["<a>", "<b>", "<c>"])
    used = [(name, tokenizer.token_to_id(name)) for name in ("<a>", "<b>", "<c>") if name in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **roles).save_pretrained(tmp_path)
    if padding is None:
        with pytest.raises(
            InputError, match="has no special token for padding; define a pad token that does not end texts"
        ):
            load_tokenizer(tmp_path)
        return
    loaded = load_tokenizer(tmp_path)
    assert (loaded.pad_token, loaded.padding_side) == (padding, "right")
    assert all(ids[-1] != loaded.pad_token_id for ids in encode(loaded, ["the film", "good"], 60))


def expected_class(words_of_tokens: list[set[int]], position: int) -> str:
    """Return the class of a token, derived from the words that each token overlaps, not from word indices."""
    words = words_of_tokens[position]
    if not words:
        return "punctuation"
    return "subword" if sum(bool(each & words) for each in words_of_tokens) > 1 else "word"


def test_token_classes_follow_words_for_every_tokenizer(family: tuple[str, Path]) -> None:
    name, folder = family
    text = "The film isn't unforgettably good,great  time (10€) \n\nflies! … 2009 naïve."
    tokenizer = load_tokenizer(folder)
    (tokenized,) = tokenize_texts(tokenizer, ["text/0"], [text], 200)
    encoding, classes = tokenizer([text]).encodings[0], tokenized.table["token_class"].tolist()
    before, after = (part.split() for part in TOKENS[name].template.split("$A"))
    inner = slice(len(before), len(classes) - len(after))
    assert classes[: inner.start] == ["cls"] * len(before)
    assert classes[inner.stop :] == ["sep"] * len(after)
    word_at = {i: word.start() for word in re.finditer(r"\w+", text) for i in range(*word.span())}
    reached = []
    for start, end in encoding.offsets[inner]:
        leads = text[start:end] == " " or start == end  # a lone space or an empty token belongs to the next word
        reached.append({word_at[i] for i in range(start, end + leads) if i in word_at})
    assert classes[inner] == [expected_class(reached, position) for position in range(len(reached))]
    assert {"punctuation", "word"} <= set(classes)
