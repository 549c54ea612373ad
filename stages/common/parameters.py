"""Reads params.yaml into typed, checked options.

An unknown key, a wrong type or an impossible value is one `InputError` that names every
offending key and what is allowed, before any work starts.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from attnmix.core.errors import InputError
from attnmix.core.options import Parameters


def read_parameters(path: Path = Path("params.yaml")) -> Parameters:
    """The checked parameters; `InputError` where the file or a value in it is not usable."""
    # DVC writes params.yaml as YAML 1.2, where 2e-05 is a number; PyYAML would read a string.
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing; run the pipeline from the repository's root") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {_first_problem(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold the sections {', '.join(Parameters.model_fields)}")
    problems = _missing(values)
    try:
        parameters = Parameters.model_validate(values)
    except ValidationError as error:
        problems += dict.fromkeys(_explain(problem) for problem in error.errors())
    if problems:
        raise InputError(f"{path}: " + "; ".join(problems)) from None
    return parameters


def _first_problem(error: YAMLError | UnicodeDecodeError) -> str:
    """In one line."""
    if isinstance(error, MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem.splitlines()[0]}"
    return str(error).splitlines()[0]


def _missing(values: dict[str, Any]) -> list[str]:
    """A default is no value for a key that the file lacks: DVC would not see that it was used."""
    problems = []
    for key, default in Parameters().model_dump().items():
        if key not in values:
            problems.append(f"{key} is missing")
        elif isinstance(default, dict) and isinstance(values[key], dict):
            problems += [f"{key}.{name} is missing" for name in default if name not in values[key]]
    return problems


def _explain(problem: ErrorDetails) -> str:
    names = [part for part in problem["loc"] if isinstance(part, str) and not part.startswith("constrained")]
    key = ".".join(_key_parts(names)) + "".join(f"[{part}]" for part in problem["loc"] if isinstance(part, int))
    if problem["type"] == "extra_forbidden":
        allowed = _fields_of(names[:-1])
        close = difflib.get_close_matches(names[-1], allowed, n=1)
        hint = f"did you mean {'.'.join([*names[:-1], close[0]])}? " if close else ""
        return f"{key} is unknown; {hint}allowed: {', '.join(allowed)}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {problem['input']!r} is not allowed: {message[0].lower()}{message[1:]}"


def _key_parts(names: list[str]) -> list[str]:
    """Without the name of the union's branch that pydantic appends (`train_limit`, `int`)."""
    sections = [name for name, value in Parameters().model_dump().items() if isinstance(value, dict)]
    depth = 2 if names[0] in sections else 1
    return names[:depth]


def _fields_of(section: list[str]) -> list[str]:
    model: Any = Parameters
    for name in section:
        model = model.model_fields[name].annotation
    return list(model.model_fields)
