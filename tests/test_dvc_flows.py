"""DVC runs the project's own dvc.yaml: what a parameter reruns, and what a clone pulls."""

from __future__ import annotations

from pathlib import Path

from dvc_repository import STAGES, Repository, new_repository, stages_run

PAGE = ("reports/index.html", "reports/figures")
FEATURES = (
    *("features/tokenize", "features/capture", "features/measure/contributions", "features/measure/heads"),
    *("features/measure/layer_parts.json", "features/measure/tokens.parquet", "features/faithfulness"),
)


def assert_same_files(author: Repository, reader: Repository, *outs: str) -> None:
    for out in outs:
        files = [path for path in (author.folder / out, *(author.folder / out).rglob("*")) if path.is_file()]
        assert files
        for path in files:
            assert (reader.folder / path.relative_to(author.folder)).read_bytes() == path.read_bytes(), path


def test_a_clone_pulls_what_it_needs_and_a_parameter_reruns_the_stages_that_read_it(tmp_path: Path) -> None:
    author = new_repository(tmp_path / "author")
    assert stages_run(author.dvc("repro")) == STAGES
    author.dvc("remote", "add", "--default", "store", str(tmp_path / "remote"))
    author.dvc("push")
    author.commit("The run and its remote")
    reader = author.clone(tmp_path / "reader")
    reader.dvc("pull", *PAGE)
    assert reader.existing(*PAGE, *FEATURES, "data/reviews", "models", "features") == list(PAGE)
    assert_same_files(author, reader, *PAGE)
    assert reader.git("status", "--short") == ""

    for each in (author, reader):
        text = (each.folder / "params.yaml").read_text(encoding="utf-8")
        assert text.count("metric: euclidean") == 1
        (each.folder / "params.yaml").write_text(text.replace("metric: euclidean", "metric: cosine"), encoding="utf-8")
    assert stages_run(author.dvc("repro")) == ["reduce", "render"]
    assert stages_run(reader.dvc("repro", "--pull", "--allow-missing")) == ["reduce", "render"]
    assert reader.existing(*PAGE, *FEATURES, "data/reviews", "models") == [*PAGE, *FEATURES]
    # No stage has taken a part of its input for the whole.
    assert_same_files(author, reader, "dvc.lock", *PAGE, "features/reduce")
