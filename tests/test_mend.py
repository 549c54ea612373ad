"""What a killed DVC left cut short is mended before the next run, and nothing else is touched."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY
from dvc.lock import make_lock
from dvc_repository import Repository, new_repository, stages_run

from verify.mend import main

MAKE_REPRO = ("make", "--old-file", ".venv/.installed", "repro")  # the packages are there
LOCK, RWLOCK = Path("dvc.lock"), Path(".dvc/tmp/rwlock")
CUT = b"schema: '2.0'\nstages:\n  download:\n    cmd: python -m stages.download\n    deps:\n    - path"
HASH = CUT + b": data/sample\n      hash: md"  # the schema lets it pass
FROM_CACHE = {"finetune", "capture", "render"}  # others have outputs under `outs` that are in git
AT_WORK = {"write": {"reports": {"pid": 1, "cmd": "dvc repro"}}, "read": {"data": [{"pid": 1, "cmd": "dvc repro"}]}}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """The project's dvc.yaml and a dvc.lock in the last commit; the current folder."""
    made = new_repository(tmp_path / "repository")
    shutil.copy(REPOSITORY / LOCK, made.folder / LOCK)
    made.commit("A run")
    (made.folder / RWLOCK.parent).mkdir(exist_ok=True)
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def whole(repository: Repository) -> bytes:
    return LOCK.read_bytes()


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_nothing_is_said_or_changed_where_dvc_can_read_both(
    repository: Repository, whole: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for lock in (
        whole,
        whole.replace(b"md5: ", b"md5: a", 1),
        yaml.safe_dump({"schema": "2.0", "stages": {}}).encode(),
    ):
        LOCK.write_bytes(lock)
        RWLOCK.write_text(json.dumps(AT_WORK), encoding="utf-8")
        assert (main(), said(capsys)) == (0, [])
        assert (LOCK.read_bytes(), json.loads(RWLOCK.read_bytes())) == (lock, AT_WORK)
    for each in (LOCK, RWLOCK):
        each.unlink()
    assert (main(), said(capsys)) == (0, [])
    assert not LOCK.exists()


@pytest.mark.parametrize(
    "cut", [b"", b"schema", CUT, "schema: '2.0'\nä".encode()[:-1], HASH], ids=["0", "6", "path", "utf-8", "hash"]
)
def test_a_lock_that_was_cut_is_that_of_the_last_commit_again(
    cut: bytes, whole: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    LOCK.write_bytes(cut)
    assert main() == 0
    (line,) = said(capsys)
    assert "dvc.lock" in line
    assert "git's last commit" in line
    assert "DVC's cache" in line
    assert LOCK.read_bytes() == whole
    assert git("status", "--short") == ""
    assert (main(), said(capsys)) == (0, [])


def test_a_staged_lock_stays_staged(whole: bytes) -> None:
    staged = whole + b"# of a later run\n"
    LOCK.write_bytes(staged)
    git("add", "dvc.lock")
    LOCK.write_bytes(CUT)
    assert main() == 0
    assert LOCK.read_bytes() == whole
    assert git("show", ":dvc.lock").encode() == staged


@pytest.mark.parametrize(
    "cut", [b"", b'{"write": {"rep', b'{"write": {"reports": {"pid": 1}}}', b"[]", b'"\xc3'], ids=str
)
def test_an_rwlock_that_was_cut_is_removed(cut: bytes, whole: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    RWLOCK.write_bytes(cut)
    assert main() == 0
    (line,) = said(capsys)
    assert ".dvc/tmp/rwlock" in line
    assert "removed" in line
    assert not RWLOCK.exists()
    assert LOCK.read_bytes() == whole


def test_both_are_mended_at_once_and_from_a_folder_inside(
    whole: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    LOCK.write_bytes(CUT)
    RWLOCK.write_bytes(b"")
    monkeypatch.chdir("data")
    assert (main(), len(said(capsys))) == (0, 2)
    monkeypatch.chdir("..")
    assert (LOCK.read_bytes(), RWLOCK.exists()) == (whole, False)


def test_the_marks_of_a_merge_are_left_to_dvc(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    ours = LOCK.read_bytes()
    git("branch", "other")
    for branch, value in (("other", b"'9.0'"), ("main", b"'8.0'")):
        git("checkout", "--quiet", branch)
        LOCK.write_bytes(ours.replace(b"'2.0'", value, 1))
        repository.commit("Another run")
    repository.run("git", "merge", "other", succeeds=False)
    merged = LOCK.read_bytes()
    assert b"<<<<<<< " in merged
    assert (main(), said(capsys)) == (0, [])
    assert LOCK.read_bytes() == merged
    assert "merge conflict" in repository.run("dvc", "repro", succeeds=False).stderr


def _not_in_git(repository: Repository) -> None:
    git("rm", "--quiet", "--cached", "dvc.lock")
    repository.git("commit", "--quiet", "--message", "No dvc.lock")


def _outside_git(_repository: Repository) -> None:
    shutil.rmtree(".git")
    Path(".dvc/config.local").write_text("[core]\n    no_scm = true\n", encoding="utf-8")


def _no_repository(_repository: Repository) -> None:
    shutil.rmtree(".dvc")


def _cut_in_git(repository: Repository) -> None:
    LOCK.write_bytes(CUT[:-1])
    repository.commit("A dvc.lock that nobody can read")


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (_not_in_git, "not in 'HEAD'"),
        (_outside_git, "not a git repository"),
        (_no_repository, "not inside of a DVC repository"),
        (_cut_in_git, "that of git's last commit cannot be read either"),
    ],
)
def test_a_lock_that_cannot_be_restored_is_one_error_and_stays(
    made: object, cause: str, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(made)
    made(repository)
    LOCK.write_bytes(CUT)
    assert main() == 1
    (line,) = said(capsys)
    assert line.startswith("error: ")
    assert cause in line
    assert LOCK.read_bytes() == CUT


@pytest.mark.parametrize(
    "advice", [["git init --quiet", "git add -A", "git commit --quiet -m start"], ["dvc config core.no_scm true"]]
)
def test_source_archive_is_told_what_makes_it_a_repository(
    repository: Repository, advice: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(".git")
    assert main() == 1
    (line,) = said(capsys)
    assert line.startswith(f"error: {repository.folder} is not a git repository; run `")
    assert all(command.replace(" --quiet", "") in line for command in advice)
    for command in advice:
        repository.run(*command.split())
    assert (main(), said(capsys)) == (0, [])


@pytest.fixture(params=["lock", "rwlock.lock"])
def held(request: pytest.FixtureRequest, repository: Repository) -> Iterator[None]:
    with make_lock(str(RWLOCK.with_name(request.param))):
        yield


@pytest.mark.usefixtures("held")
def test_what_a_running_dvc_may_be_writing_is_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    LOCK.write_bytes(CUT)
    RWLOCK.write_bytes(b"")
    assert main() == 1
    (line,) = said(capsys)
    assert line.startswith("error: Unable to acquire lock")
    assert (LOCK.read_bytes(), RWLOCK.read_bytes()) == (CUT, b"")


@pytest.mark.long
def test_make_repro_mends_and_takes_what_was_finished_from_the_cache(tmp_path: Path) -> None:
    made = new_repository(tmp_path / "repository")
    shutil.copytree(REPOSITORY / "verify", made.folder / "verify", ignore=shutil.ignore_patterns("__pycache__"))
    made.commit("What mends")
    assert made.run(*MAKE_REPRO).stderr == ""
    made.commit("A run")
    params = (made.folder / "params.yaml").read_text(encoding="utf-8")
    (made.folder / "params.yaml").write_text(params.replace("seed: 111", "seed: 3"), encoding="utf-8")
    assert set(stages_run(made.run(*MAKE_REPRO).stdout)) >= FROM_CACHE
    after = yaml.safe_load((made.folder / LOCK).read_text(encoding="utf-8"))
    for place, cut in ((LOCK, CUT), (RWLOCK, b"")):
        (made.folder / place).write_bytes(cut)
    mended = made.run(*MAKE_REPRO)
    assert ["rwlock" in line for line in mended.stderr.splitlines()] == [True, False]
    assert not FROM_CACHE.intersection(stages_run(mended.stdout))
    assert yaml.safe_load((made.folder / LOCK).read_text(encoding="utf-8")) == after
    (made.folder / LOCK).unlink()  # as an error of `verify.mend` says
    assert not FROM_CACHE.intersection(stages_run(made.run(*MAKE_REPRO).stdout))
