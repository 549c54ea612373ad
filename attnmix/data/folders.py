"""Assignment of files to the splits of a dataset by file names and descriptions, according to the rules of the hub.

The rules of `datasets` (`datasets.data_files`) are applied only to the names of data files; see `attnmix.data.listing`.
"""

import glob
import json
import logging
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from attnmix.core.errors import InputError
from attnmix.core.extras import require_extra
from attnmix.core.settings import DatasetParameters
from attnmix.core.terminal import shorten
from attnmix.data.columns import shown_names
from attnmix.data.formats import JSON_SUFFIXES, SEPARATORS, allowed_names, check_sizes, data_suffix, split_suffixes
from attnmix.data.listing import Contents, find_contents, is_description, list_files, no_data_problem

PART_NUMBER = re.compile(r"(?P<head>.*?)(?P<number>\d+)-of-(?P<total>\d+)")
SHARD = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""File names written by `push_to_hub`, for any split name."""
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
MAX_SHOWN_FILES = 20
MAX_SHOWN_CAUSE = 400  # maximum length of an error's cause in a message
FORMATS = {**dict.fromkeys(SEPARATORS, "csv"), **dict.fromkeys(JSON_SUFFIXES, "json")}
FORMAT_PREFERENCE = (".parquet", ".arrow", ".jsonl", ".json", ".csv")  # order of preference for equal numbers of files
READER_CONFIGS = {
    "csv": ("datasets.packaged_modules.csv.csv", "CsvConfig"),
    "json": ("datasets.packaged_modules.json.json", "JsonConfig"),
    ".parquet": ("datasets.packaged_modules.parquet.parquet", "ParquetConfig"),
    ".arrow": ("datasets.packaged_modules.arrow.arrow", "ArrowConfig"),
}
"""The module and class of `datasets` that declare the reader options for each format."""
KNOWN_OPTIONS = ("name", "version", "data_dir", "data_files", "description", "sep", "delimiter", "features")
"""Options of a description that select files or are supported by this module."""
SPEED_OPTIONS = ("chunksize", "batch_size", "block_size", "low_memory", "memory_map", "use_threads")
EQUIVALENT_OPTIONS = {"encoding": ("utf-8", "utf8", "utf-8-sig"), "header": (0, "infer"), "newlines_in_values": (True,)}
"""Option values that correspond to the default behaviour of the readers."""


class Layout(NamedTuple):
    """The file names of each split in a configuration of a dataset, and information from the dataset's descriptions."""

    files: dict[str, list[str]]
    separator: str | None
    class_names: Mapping[str, list[str]]
    """The names of the classes, by column."""
    contents: Contents
    creators: list[str]
    """The sources of the texts according to the dataset card (`language_creators`), such as `machine-generated`."""


class _Cards(NamedTuple):
    """The content of the files that describe a dataset."""

    configurations: Any
    """The options of each configuration (`MetadataConfigs` of `datasets`)."""
    features: Mapping[str, Any]
    """The features of each configuration: the types of the columns."""
    creators: list[str]
    """The sources of the texts."""


def split_name(name: str) -> tuple[str, str | None]:
    """Return the source in a `dataset.name` (a hub identifier, folder or file), and the configuration after a colon.

    The configuration is None if the name has none. The name of a data file, or of an existing folder, may contain
    colons itself.
    """
    path = Path(name)
    try:
        exists = path.exists()
    except OSError as error:  # for example, a name that is too long
        problem = f"{shorten(name)} cannot be read ({error.strerror})"
        raise InputError(f"dataset.name: {problem}; specify a file, a folder or a hub identifier") from error
    has_colon = ":" in name[1:]  # a source cannot be empty
    is_data_file = bool(data_suffix(path.name))
    if not has_colon or is_data_file or exists:
        return name, None
    # The name of a folder may contain colons, so the configuration of a folder follows the last colon.
    source, _, configuration = name.rpartition(":")
    if not Path(source).is_dir():
        source, _, configuration = name.partition(":")
    return source, configuration or None


def source_files(dataset: DatasetParameters) -> dict[str, Path]:
    """Return the local files that are loaded for a dataset, by relative path; empty for a hub dataset.

    These are the files of the chosen splits and the dataset's descriptions, such as a dataset card in README.md.
    Raise `InputError` for an unreadable folder, and for files that exceed the size limit.
    """
    source, configuration = split_name(dataset.name)
    path = Path(source)
    if path.is_file():
        check_sizes([path])
        return {path.name: path}
    if not path.is_dir():
        return {}
    names = list_folder(path)
    descriptions = {name: path / name for name in names if is_description(name)}
    layout = find_layout(dataset.name, names, descriptions, configuration)
    required = set(descriptions)
    for split in chosen_splits(layout, dataset).values():
        required.update(layout.files[split])
    files = {name: path / name for name in sorted(required)}
    check_sizes(list(files.values()))
    return files


def list_folder(folder: Path) -> list[str]:
    """Return the names of the files in a data folder; raise `InputError` if it contains the working folder."""
    if Path.cwd().resolve().is_relative_to(folder.resolve()):
        problem = f"{folder} contains the working folder, whose files are not texts"
        raise InputError(f"dataset.name: {problem}; specify a folder or file that contains only texts")
    return list_files(folder)


def find_layout(
    shown: str, names: Sequence[str], descriptions: Mapping[str, Path], configuration: str | None
) -> Layout:
    """Return the layout of a configuration of the dataset with the files `names`.

    The layout contains the data files of each split, and information from the dataset's descriptions. `shown` is the
    name of the dataset in messages, and `descriptions` contains the local path of each file that satisfies
    `is_description`. Raise `InputError` if there are no data files, if the configuration is unknown, and for invalid
    descriptions.
    """
    require_extra("pipeline", "a dataset of several files")
    contents = find_contents(names, descriptions)
    if not contents.data:
        raise InputError(f"dataset.name: {shown} {no_data_problem(names)}")
    with errors_in_words(shown):
        cards = _read_cards(descriptions)
        chosen = _choose_configuration(shown, cards, configuration)
        options = cards.configurations.get(chosen, {})
        files = {}
        for split, split_files in _find_files(shown, contents, options).items():
            files[split] = _keep_one_format(split_files)
        _check_options(shown, options, files)
        separator = _read_separator(shown, options)
        features = options.get("features") or _find_features(cards, chosen)
    return Layout(
        files=files,
        separator=separator,
        class_names=_list_declared_classes(features or {}),
        contents=contents,
        creators=cards.creators,
    )


def _choose_configuration(shown: str, cards: _Cards, configuration: str | None) -> str:
    """Return the given `configuration` or, if it is None, the default configuration in the dataset `cards`.

    Raise `InputError` for an unknown configuration; `shown` is the name of the dataset in messages.
    """
    chosen: str = configuration or cards.configurations.get_default_config_name() or "default"
    # A dataset card without configurations may still declare features; their keys are names of configurations.
    known = list(cards.configurations) or ["default", *cards.features]
    if chosen not in known:
        listed = shown_names(known)
        raise InputError(f"dataset.name: {shown} has the configurations {listed}; append one of them after a colon")
    return chosen


def chosen_splits(layout: Layout, dataset: DatasetParameters) -> dict[str, str]:
    """Return the names that the splits have in the source; the keys are `train` and, if there is a test split, `test`.

    Raise `InputError` for a missing split, for missing parts of a table, and for duplicate tables.
    """
    splits = {"train": dataset.train_split}
    if dataset.test_split is not None:
        has_only_train = list(layout.files) == [dataset.train_split]
        if has_only_train:
            message = "%s: split %s is missing; a part of %s is used instead"
            logging.info(message, dataset.name, dataset.test_split, dataset.train_split)
        else:
            splits["test"] = dataset.test_split
    for split, name in splits.items():
        if name not in layout.files:
            allowed = shown_names(list(layout.files))
            if split == "test":
                allowed += "; or leave it empty to use a part of train"
            raise InputError(f"dataset.{split}_split: {dataset.name} has no split {shorten(name)}; allowed: {allowed}")
        _check_parts(layout.files[name], dataset.name)
        _check_variants(layout.files[name], dataset.name)
    return splits


def shown_file(name: str) -> str:
    """Return a file name for a list in a log message, in quotes if it contains commas or unprintable characters."""
    shown = shorten(name)
    if shown.isprintable() and "," not in shown:
        return shown
    return repr(shown)


def warn_of_unread_files(shown: str, contents: Contents, read: Sequence[str]) -> None:
    """Warn about table files that belong to no selected split."""
    tables = {*contents.data, *contents.unread_tables}
    unread = sorted(tables.difference(read))
    if not unread:
        return
    names = [shown_file(name) for name in unread[:MAX_SHOWN_FILES]]
    more = len(unread) - len(names)
    if more:
        names.append(f"and {more} more")
    message = "%s: %d of %d files are not used: %s"
    all_files = len(unread) + len(read)
    logging.warning(message, shown, len(unread), all_files, ", ".join(names))


@contextmanager
def errors_in_words(shown: str) -> Iterator[None]:
    """Convert every error of `datasets` into an `InputError` with the cause and the dataset's name `shown`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # `datasets` raises dozens of exception types for an invalid description
        raise InputError(f"dataset.name: {shown} cannot be loaded ({_describe_cause(error)})") from error


def _read_cards(descriptions: Mapping[str, Path]) -> _Cards:
    """Return the content of those of README.md, .huggingface.yaml and dataset_infos.json that exist."""
    from datasets.utils.metadata import MetadataConfigs  # slow import (seconds)

    card = _read_card_data(descriptions)
    configurations = MetadataConfigs.from_dataset_card_data(card)
    features = _read_features(descriptions, card)
    creators = _read_creators(card.get("language_creators"))
    return _Cards(configurations, features, creators)


def _read_card_data(descriptions: Mapping[str, Path]) -> Any:
    """Return the metadata (`DatasetCardData`) in README.md and .huggingface.yaml; either file may be missing."""
    import yaml
    from huggingface_hub import DatasetCard, DatasetCardData

    card = DatasetCardData()
    if "README.md" in descriptions:
        card = DatasetCard.load(descriptions["README.md"]).data
    if ".huggingface.yaml" in descriptions:
        text = descriptions[".huggingface.yaml"].read_text(encoding="utf-8")
        values = yaml.safe_load(text) or {}
        _check_mapping(".huggingface.yaml", values)
        card = DatasetCardData(**(vars(card) | values))  # these values override those of README.md
    return card


def _read_features(descriptions: Mapping[str, Path], card: Any) -> dict[str, Any]:
    """Return the features of each configuration in dataset_infos.json (if it exists) and in the metadata `card`.

    The metadata have precedence.
    """
    from datasets.info import DatasetInfo, DatasetInfosDict

    infos: dict[str, Any] = {}
    if "dataset_infos.json" in descriptions:
        text = descriptions["dataset_infos.json"].read_text(encoding="utf-8")
        content = json.loads(text)
        _check_mapping("dataset_infos.json", content)
        for name, values in content.items():
            infos[name] = DatasetInfo.from_dict(values)
    infos.update(DatasetInfosDict.from_dataset_card_data(card))
    return {name: info.features for name, info in infos.items()}


def _read_creators(value: Any) -> list[str]:
    """Return the sources of the texts that a dataset card declares; empty if `value` is neither a name nor a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [str(name) for name in value]
    return []


def _check_mapping(name: str, content: Any) -> None:
    """Raise `InputError` if the `content` of the file `name` is not a mapping."""
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else f"a {type(content).__name__}"
        raise InputError(f"dataset.name: {name} contains {kind}; allowed: a mapping")


def _find_features(cards: _Cards, configuration: str) -> Any:
    """Return the features of a configuration, or None.

    If a dataset declares one set of features but no configurations, `datasets` applies these features to all data.
    """
    features = cards.features
    if configuration in features:
        return features[configuration]
    if len(features) == 1 and not cards.configurations:
        return next(iter(features.values()))
    return None


def _list_declared_classes(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the class names of each column whose declared feature has class names."""
    classes = {}
    for name, feature in features.items():
        if hasattr(feature, "names"):
            classes[name] = list(feature.names)
    return classes


def _find_files(shown: str, contents: Contents, options: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the data files of each split, according to the `options` of a configuration.

    The option `data_dir` is the folder that contains the data, and patterns of files are relative to this folder.
    """
    folder = posixpath.normpath(options.get("data_dir") or ".")
    prefix = "" if folder == "." else f"{folder}/"
    names = [name.removeprefix(prefix) for name in contents.data if name.startswith(prefix)]
    if not names:
        problem = f"the description of {shown} refers to the folder {shorten(folder)}, which contains no data file"
        raise InputError(f"dataset.name: {problem}; allowed: {allowed_names()}")
    files = _assign_to_splits(shown, names, contents.saved_splits, options)
    return {split: [f"{prefix}{name}" for name in split_files] for split, split_files in files.items()}


def _assign_to_splits(
    shown: str, names: Sequence[str], saved_splits: Sequence[str], options: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the files among `names` that belong to each split.

    If the `options` of a configuration contain `data_files`, the splits are those of `data_files`. If `options` is
    empty and `save_to_disk` wrote the folders `saved_splits`, these folders are the splits. Otherwise, the splits
    follow from the file names.
    """
    from datasets.data_files import sanitize_patterns

    files = {}
    if options.get("data_files") is not None:
        # `data_files` has several forms, such as a list of patterns (for train) or a mapping from splits to patterns.
        patterns_by_split = sanitize_patterns(options["data_files"])
        for split, patterns in patterns_by_split.items():
            files[split] = _match_all(shown, patterns, names)
    elif saved_splits and not options:
        for split in saved_splits:
            pattern = f"{glob.escape(split)}/**"
            files[split] = _match_all(shown, [pattern], names)
    else:
        files = _find_by_names(names)
    return files


def _find_by_names(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files by split, according to the first rule of the hub that matches a name.

    If no rule matches, the rules for folders and files are applied to the names in lower case. If this also fails,
    all files belong to train. A rule must result in several splits, one of which is train.
    """
    from datasets import data_files

    shards = _find_shards(names)
    if shards:
        return shards
    # There are two rules, for names of folders and for names of files; both contain the patterns of every split.
    rules = (data_files.DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME, data_files.DEFAULT_PATTERNS_SPLIT_IN_FILENAME)
    for split_patterns in rules:
        files = _match_splits(split_patterns, names)
        if files:
            return files
    for split_patterns in rules:
        files = _match_splits_in_lower_case(split_patterns, names)
        if len(files) > 1 and "train" in files:
            shown = ", ".join(f"{split}: {shown_file(split_files[0])}" for split, split_files in files.items())
            logging.warning("splits are assigned by names with capitals (%s); the hub supports only lower case", shown)
            return files
    return {"train": list(names)}


def _find_shards(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files whose names match `SHARD`, by split: first the usual splits, then the other splits, sorted."""
    from datasets import data_files

    shards: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = SHARD.fullmatch(name)
        if match:
            shards[match["split"]].append(name)
    invalid = [split for split in shards if not SPLIT_NAME.fullmatch(split)]
    if invalid:
        raise ValueError(f"the split name {shorten(invalid[0])!r} has characters other than letters, digits, _ and .")
    usual = [str(split) for split in data_files.DEFAULT_SPLITS if split in shards]
    others = sorted(set(shards) - set(usual))
    return {split: shards[split] for split in (*usual, *others)}


def _match_splits(split_patterns: Mapping[Any, Sequence[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """Return, for each split, the file names that match any of its patterns; splits without files are omitted."""
    files = {}
    for split, patterns in split_patterns.items():
        split_files = _match_each(patterns, names)
        if split_files:
            files[str(split)] = split_files
    return files


def _match_splits_in_lower_case(
    split_patterns: Mapping[Any, Sequence[str]], names: Sequence[str]
) -> dict[str, list[str]]:
    """Return, for each split, the file names whose lower-case form matches any of its patterns; omit empty splits."""
    originals: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        originals[name.lower()].append(name)
    files: dict[str, list[str]] = {}
    for split, names_in_lower_case in _match_splits(split_patterns, list(originals)).items():
        files[split] = []
        for lower in names_in_lower_case:
            files[split].extend(originals[lower])
    return files


def _match_all(shown: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the files that match the patterns of a description; raise `InputError` if there are none."""
    normal_patterns = []
    for pattern in patterns:
        normal = posixpath.normpath(pattern)
        if posixpath.isabs(pattern) or "://" in pattern or normal.startswith("../"):
            problem = f"the description of {shown} refers to {shorten(pattern)}, which is outside the dataset"
            raise InputError(f"dataset.name: {problem}; copy this file into the folder, and correct the description")
        normal_patterns.append(normal)
    files = _match_each(normal_patterns, names)
    if not files:
        problem = f"the description of {shown} refers to {shown_names(patterns)}, but the dataset has no such data file"
        raise InputError(f"dataset.name: {problem}; allowed: {allowed_names()}")
    return files


def _match_each(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the unique names that match any of the patterns, in the order of the patterns."""
    matched: dict[str, None] = {}
    for pattern in patterns:
        for name in _match_pattern(pattern, names):
            matched[name] = None
    return list(matched)


def _match_pattern(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the sorted names that match a pattern; a pattern equal to a file name matches only this file."""
    from fsspec.utils import glob_translate

    if pattern in names:
        return [pattern]
    expression = re.compile(glob_translate(pattern))
    return [name for name in sorted(names) if expression.match(name)]


def _keep_one_format(files: Sequence[str]) -> list[str]:
    """Return the files whose format is that of the most frequent suffix; `warn_of_unread_files` reports other files.

    If several suffixes are equally frequent, the first one in `FORMAT_PREFERENCE` is selected, as on the hub. A format
    may have several suffixes, such as `.csv` and `.tsv`.
    """
    counts = Counter(data_suffix(name) for name in files)
    most_files = max(counts.values())
    in_order = [*FORMAT_PREFERENCE, *sorted(counts)]
    most_frequent = [suffix for suffix in in_order if counts[suffix] == most_files]
    chosen_format = _find_format(most_frequent[0])
    return [name for name in files if _find_format(data_suffix(name)) == chosen_format]


def _find_format(suffix: str) -> str:
    """Return the format of a suffix; formats with a single suffix are named after it."""
    return FORMATS.get(suffix, suffix)


def _check_options(shown: str, options: Mapping[str, Any], files: Mapping[str, Sequence[str]]) -> None:
    """Raise `InputError` if the dataset card sets an option that is not supported for the formats of its `files`.

    Options are arguments of the readers in `datasets`, such as `sep` for csv files. `shown` is the name of the dataset.
    """
    suffixes: dict[str, None] = {}
    for split_files in files.values():
        for name in split_files:
            suffixes[data_suffix(name)] = None
    for suffix in suffixes:
        module, config_name = READER_CONFIGS[_find_format(suffix)]
        config_class = getattr(import_module(module), config_name)  # its attributes are the options of the reader
        defaults = vars(config_class())
        for key, value in options.items():
            if not _is_supported(key, value, defaults):
                problem = f"the description of {shown} sets {key}={shorten(value)}, unsupported for {suffix} files"
                allowed = "sep, data_files, data_dir and features; remove the option, or convert the files"
                raise InputError(f"dataset.name: {problem}; allowed: {allowed}")


def _read_separator(shown: str, options: Mapping[str, Any]) -> str | None:
    """Return the separator set by a description, or None; raise `InputError` unless it is a single character."""
    separator = options.get("delimiter") or options.get("sep")
    if separator is None:
        return None
    if not isinstance(separator, str) or len(separator) != 1 or separator in '"\r\n':
        problem = f"the description of {shown} sets sep={shorten(separator)!r}; allowed: one character, such as ';'"
        raise InputError(f"dataset.name: {problem}")
    return separator


def _is_supported(key: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Return True if the `value` of an option is applied by this module, or has no effect on the tables.

    `defaults` contains the default values of all options of the reader in `datasets`.
    """
    if key in KNOWN_OPTIONS or key in SPEED_OPTIONS:
        return True
    if key not in defaults:  # `datasets` ignores options that its reader does not have
        return True
    is_default = value == defaults[key]
    return is_default or value in EQUIVALENT_OPTIONS.get(key, ())


def _describe_cause(error: BaseException) -> str:
    """Return the message of an error's root cause in one line, or the type of this cause if its message is empty."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    return message[:MAX_SHOWN_CAUSE] or type(error).__name__


class _Series(NamedTuple):
    """The common name of files that are parts of one table, such as `train-00000-of-00003.csv`."""

    folder: str
    head: str  # for example `train-`
    total: int
    suffix: str


def _check_parts(files: Sequence[str], shown: str) -> None:
    """Raise `InputError` if a part of a table is missing, such as `train-00001-of-00003.csv`."""
    numbers_by_series = defaultdict(set)
    for file in files:
        folder, name = posixpath.split(file)
        match = PART_NUMBER.match(name)
        if match:
            series = _Series(folder, match["head"], int(match["total"]), data_suffix(name))
            numbers_by_series[series].add(int(match["number"]))
    for series, present in numbers_by_series.items():
        first = 1 if series.total in present else 0  # some datasets count from 1
        expected = range(first, first + series.total)
        missing = [number for number in expected if number not in present]
        if missing:
            parts = ", ".join(map(str, missing[:MAX_SHOWN_FILES]))
            names = f"{series.head}*-of-{series.total:05}{series.suffix}"
            problem = f"{len(missing)} of the {series.total} parts {names} are missing ({parts})"
            raise InputError(f"dataset.name: {shown}: {problem}; download them, or rename the files")


def _check_variants(files: Sequence[str], shown: str) -> None:
    """Raise `InputError` for duplicate tables, such as `train.csv` and `train.csv.gz`."""
    first: dict[str, str] = {}
    for file in files:
        stem, _ = split_suffixes(file)
        if stem in first:
            problem = f"{first[stem]} and {file} differ only in the suffix and would both be loaded"
            raise InputError(f"dataset.name: {shown}: {problem}; remove one, or rename it")
        first[stem] = file
