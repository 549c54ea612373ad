"""The parameters of all stages, and the function that reads them from params.yaml.

At the start of a stage, a single `InputError` reports all mistakes in params.yaml: unknown keys, wrong types and
invalid values.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import ValidationError, model_validator
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from attnmix.core import settings
from attnmix.core.errors import InputError
from attnmix.core.names import CAPTURED_CHECKPOINT, CHECKPOINT_NAMES
from attnmix.core.terminal import shorten


class Parameters(settings.Section):
    """All sections of params.yaml. `Parameters()` has the values of the committed file."""

    seed: settings.Seed = 111
    arithmetic: Literal["portable", "fastest"] = "portable"
    dataset: settings.DatasetParameters = settings.DatasetParameters()
    model: settings.ModelParameters = settings.ModelParameters()
    finetune: settings.FinetuneParameters = settings.FinetuneParameters()
    capture: settings.CaptureParameters = settings.CaptureParameters()
    measure: settings.MeasureParameters = settings.MeasureParameters()
    faithfulness: settings.FaithfulnessParameters = settings.FaithfulnessParameters()
    umap: settings.UmapParameters = settings.UmapParameters()
    render: settings.RenderParameters = settings.RenderParameters()

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The measured checkpoints. Without training and without `model.base`, this is a single checkpoint."""
        trained = self.finetune.epochs > 0 or self.model.base
        return CHECKPOINT_NAMES if trained else (CAPTURED_CHECKPOINT,)

    @model_validator(mode="after")
    def _check_kinds_of_texts(self) -> Self:
        """Raise ValueError if `capture.texts` and the texts of the dataset differ in kind (single texts or pairs)."""
        # A pair of texts is a list of two strings; the reviews are pairs if `text_column` is a list of two columns.
        review_kind = _name_kind(self.dataset.text_column)
        for number, text in enumerate(self.capture.texts):
            kind = _name_kind(text)
            if kind != review_kind:
                raise ValueError(
                    f"capture.texts[{number}]: {shorten(repr(text))} is {kind}, but each review is {review_kind}"
                )
        return self


def _name_kind(value: str | list[str]) -> str:
    """Return `one text` for a string, and `a pair of texts` for a list of two."""
    return "one text" if isinstance(value, str) else "a pair of texts"


def read_parameters(path: Path = Path("params.yaml")) -> Parameters:
    """Return the validated parameters; raise `InputError` for an invalid file or value."""
    # DVC writes params.yaml as YAML 1.2, with numbers such as 2e-05, which PyYAML would load as strings.
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing; run the pipeline in the repository's root folder") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must contain the sections {', '.join(Parameters.model_fields)}")
    try:
        return Parameters.model_validate(values)
    except ValidationError as error:
        problems = dict.fromkeys(_explain(problem) for problem in error.errors())
        raise InputError(f"{path}: " + "; ".join(problems)) from None


def _explain(problem: ErrorDetails) -> str:
    """Return a message for one mistake in params.yaml, with the parameter's key and the allowed values."""
    if not problem["loc"]:  # from a validator of several sections; its message includes the keys
        return problem["msg"].removeprefix("Value error, ")
    section, names, indices = _read_location(problem)
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return _explain_unknown_key(section, names)
    key = section
    if names and section in _list_keys_by_section():
        # Only the first name belongs to the key. For a union or constrained type, pydantic appends the name of the
        # type, as in `train_limit`, `int`. The same applies to keys outside sections, such as `seed`, `int`.
        key = f"{section}.{names[0]}"
    for index in indices:
        key += f"[{index}]"
    return f"{key}: {settings.problem_text(problem)}"


class _Location(NamedTuple):
    """The location of a mistake in params.yaml."""

    section: str
    """The name of a section or of a key outside sections."""
    names: list[str]
    """The names within the section."""
    indices: list[int]
    """The indices in the lists that contain the mistake, from the outermost list to the innermost one."""


def _read_location(problem: ErrorDetails) -> _Location:
    """Return the place of a mistake; pydantic joins names and indices in one tuple, such as `("capture", "texts", 0)`.

    The nested section is named `finetune.lora`.
    """
    parts = problem["loc"]
    if problem["type"] == "invalid_key":  # a key that is not a string; in other places, numbers are indices of lists
        parts = tuple(str(part) for part in parts)
    section, *names = [part for part in parts if isinstance(part, str)]
    indices = [part for part in parts if isinstance(part, int)]
    if section == "finetune" and names[:1] == ["lora"]:
        section = "finetune.lora"
        names = names[1:]
    return _Location(section, names, indices)


def _explain_unknown_key(section: str, names: Sequence[str]) -> str:
    """Return a message for an unknown key; `names` is the path of the key within a section, or empty for a section."""
    if names:
        key = names[-1]
        prefix = f"{section}."
        allowed = _list_keys_by_section()[section]
    else:
        key = section
        prefix = ""
        allowed = list(Parameters.model_fields)
    hint = ""
    for similar_key in difflib.get_close_matches(key, allowed, n=1):  # one key, or none
        hint = f"did you mean {prefix}{similar_key}? "
    return f"{prefix}{key} is unknown; {hint}allowed: {', '.join(allowed)}"


def _list_keys_by_section() -> dict[str, list[str]]:
    """Return the allowed keys of each section, including the nested section `finetune.lora`."""
    keys_by_section = {"finetune.lora": list(settings.LoraParameters.model_fields)}
    for name, value in Parameters().model_dump().items():
        if isinstance(value, dict):
            keys_by_section[name] = list(value)
    return keys_by_section
