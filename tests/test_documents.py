"""Documents agree with the code and the committed result files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import REPOSITORY
from families import FAMILIES

from docs import classifiers
from docs.number_formats import change, decimal, percent, points, rounded, share
from docs.tables import DOCUMENTS, MARKED, parse_results, read_file, render_parts, results, update
from docs.texts import render_texts


def test_generated_parts_are_up_to_date() -> None:
    documents = {name: (REPOSITORY / name).read_text("utf-8") for name in DOCUMENTS}
    names = [name for document in documents.values() for _, _, name, _, _ in MARKED.findall(document)]

    def stale_documents(read: Any) -> list[str]:
        parts = render_parts(read)
        assert sorted(names) == sorted(parts)
        return [name for name, document in documents.items() if update(document, parts) != document]

    # After a new run, which changes dvc.lock, documents may contain the new or the last committed results.
    command = ["git", "diff", "--quiet", "HEAD", "dvc.lock"]
    has_new_run = subprocess.run(command, cwd=REPOSITORY, check=False).returncode == 1
    stale = has_new_run and stale_documents(read_committed_file)
    if stale or not has_new_run:
        stale = stale_documents(read_file)
    assert not stale, "`make docs` updates them"


def read_committed_file(path: str) -> Any:
    """Return a result file of the last commit."""
    command = ["git", "show", f"HEAD:{path}"]
    return parse_results(
        path, subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode("utf-8")
    )


def test_numbers_are_rounded_and_changes_are_signed() -> None:
    row = {"mean": -0.1234, "ci_low": -0.2, "ci_high": 0.0456}
    assert (percent(0.4849), percent(0.4849, 1), percent(-0.001)) == ("48", "48.5", "0")
    assert (points(0.0456), points(-0.324, 0)) == ("+4.6", "-32")
    assert (decimal(0.125001), decimal(27.4, 0)) == ("0.13", "27")
    assert (rounded(148_508), rounded(2_185), rounded(2_185, 3)) == ("150,000", "2,200", "2,180")
    assert change(row) == "-12.3 [-20.0, +4.6]"
    assert share(row) == "-12 % [-20, 5]"
    for number in (percent, points, decimal):
        with pytest.raises(ValueError, match="not defined"):
            number(float("nan"))


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("table('a.csv').row(layer=7).mean", "a.csv: no row with layer=7"),
        ("table('a.csv').where(method='x').row(layer=2).mean", "a.csv where method='x': no row with layer=2"),
        ("table('a.csv').query('mean > 1')", "a.csv: no row with mean > 1"),
        ("table('a.csv').row(method='x').mean", "a.csv where method='x': 2 rows instead of one"),
        ("table('a.csv').row(depth=1).mean", "a.csv: no column depth; its columns: method, layer, mean"),
        ("table('a.csv').row(layer=1, method='x').median", "no attribute 'median'"),
        ("table('a.csv').row(layer=3).mean | points", "not defined"),
        ("require(table('a.csv')['mean'].min() > 0.4, 'all are above 0.4')", "no longer true: all are above 0.4"),
    ],
)
def test_template_error_names_file_and_reason(tmp_path: Path, expression: str, error: str) -> None:
    (tmp_path / "a_text.md.j2").write_text(f"It is {{{{ {expression} }}}}.\n", "utf-8")
    with pytest.raises(ValueError, match=re.escape(error)) as raised:
        render_texts(
            lambda path: parse_results(path, "method,layer,mean\nx,1,0.3\nx,1.5,0.5\ny,2,0.5\nz,3,\n"), tmp_path
        )
    assert str(raised.value).startswith("docs/texts/a_text.md.j2: ")


def test_ratio_table_matches_its_csv() -> None:
    ratios = pd.read_csv(REPOSITORY / "reports/plots/measure/mixing_weighted.csv")
    ratios = ratios.query("weight == 'token' and tokens_of == 'all' and layer == 'all'")
    ratios = ratios.set_index(["method", "checkpoint"])[["mean", "ci_low", "ci_high"]]
    table = results(read_file)["overall"].splitlines()[2:]
    assert len(table) == len(ratios.index.unique("method"))
    for line in table:
        method, _, *cells = [cell.strip(" `") for cell in line.strip("|").split(" | ")]
        for checkpoint, cell in zip(("pretrained", "finetuned", "difference"), cells, strict=True):
            numbers = [float(number) for number in re.findall(r"[-+]?\d+\.\d", cell)]
            expected = 100 * ratios.loc[(method, checkpoint)].to_numpy()[: len(numbers)]
            assert numbers == pytest.approx(expected, abs=0.051)


def test_hub_architectures_match_their_documented_outcome() -> None:
    outcomes = pd.read_csv(REPOSITORY / "docs/classifiers.csv").set_index("architecture")["outcome"].to_dict()
    assert list(outcomes) == list(classifiers.CLASSIFIERS)
    for name, outcome in outcomes.items():
        if outcome == classifiers.WORKS:
            assert name in FAMILIES  # compared with a reference in tests/test_families.py
        else:
            assert classifiers.outcome(name)["outcome"] == outcome


def test_repeated_facts_agree_between_documents() -> None:
    documents = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "llms.txt", "docs/installation.md", "docs/pipeline.md")
    words = {name: " ".join((REPOSITORY / name).read_text("utf-8").split()) for name in documents}
    everything = " ".join(words.values())
    for pattern, expected in {
        r"make repro[^.]*?(\w+ to \w+ minutes) on 2 cores": {"four to nine minutes"},
        r"(\d+) families": {str(len(FAMILIES))},
        r"Python (3\.\d+ to 3\.\d+)": {"3.11 to 3.13"},
        r"CPU build has ([\d.]+) GB|CPU build \(([\d.]+) GB\)": {"0.2"},
        r"([\d.]+) \(AMD\) to [\d.]+ times|take ([\d.]+) times as long as with": {"1.15"},
    }.items():
        stated = {next(filter(None, match.groups())) for match in re.finditer(pattern, everything)}
        assert stated == expected, pattern
    downloads = re.search(r"torch for GPUs: ([\d.]+) GB, and ([\d.]+) GB of CUDA", words["docs/installation.md"])
    assert downloads
    assert sum(map(float, downloads.groups())) == pytest.approx(2.7)
    profiles = {name for text in words.values() for name in re.findall(r"profiles/(\w+\.txt)", text)}
    assert "paper.txt" in re.findall(r"profiles/(\w+\.txt)", words["README.md"])
    assert [name for name in profiles if not (REPOSITORY / "profiles" / name).is_file()] == []
    assert len((REPOSITORY / "README.md").read_bytes()) <= 8000
