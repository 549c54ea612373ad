"""A repository of the hub at one commit: its list of files, and each file, checked against the hub's listing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import httpx2
from huggingface_hub import constants, get_token, hf_hub_download, is_offline_mode, resolve_revision, snapshot_download

# The public reader of the listing that the client keeps leaves out the sha256 of large files.
from huggingface_hub._tree_cache import TreeCacheEntry, read_tree_cache
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import tqdm

from attnmix.core.errors import InputError, first_line
from attnmix.hub.retries import Backoff, UnavailableError, chain, failure

Kind = Literal["model", "dataset"]
LOGIN = "log in (`hf auth login`, or a token in HF_TOKEN)"


class Repository:
    """`name` on the hub, at a branch, tag or commit; raises `InputError` where it cannot be had."""

    def __init__(self, kind: Kind, name: str, revision: str | None) -> None:
        self.kind, self.name, self._revision = kind, name, revision
        with self._errors_in_words():
            self.commit = resolve_revision(name, revision=revision, repo_type=kind).resolved
            # Fetches no file, but the listing, which the client keeps for HF_HUB_OFFLINE.
            snapshot_download(
                name, revision=self.commit, repo_type=kind, allow_patterns=[], tqdm_class=_bar(disable=True)
            )
            folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).expanduser().resolve()
            listing = read_tree_cache(str(folder), self.commit)
            if listing is None:
                raise UnavailableError(f"its listing cannot be kept in {folder}; set HF_HOME to a folder to write to")
            if any(PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts for path in listing):
                raise ValueError("a listing that leads out of the repository")
            self._listing = listing

    @property
    def paths(self) -> list[str]:
        """The paths of all files."""
        return sorted(self._listing)

    def fetch(self, paths: Iterable[str]) -> dict[str, Path]:
        """Return where the files lie in the client's cache, downloaded where they are missing, all checked."""
        with self._errors_in_words():
            return {path: self._file(path) for path in paths}

    def _file(self, path: str) -> Path:
        listed, backoff, spoilt = self._listing[path], Backoff(), 0
        bar, kind = _bar(progress=backoff.restart, desc=path), self.kind  # the client's would show a signed address
        while spoilt < 2:
            try:
                file = Path(hf_hub_download(self.name, path, revision=self.commit, repo_type=kind, tqdm_class=bar))
            except httpx2.TransportError as error:
                backoff.wait(failure(error))
                continue  # from where it broke
            except OSError as error:
                if type(error) is not OSError or error.errno is not None:
                    raise
                spoilt += 1  # the client's error for a body of another size
                continue
            if _is_as_listed(file, listed):
                return file
            spoilt += 1
            for each in (file.resolve(), file):
                each.unlink(missing_ok=True)
        digest = f"sha256 {listed.lfs_sha256}" if listed.lfs_sha256 is not None else f"git blob {listed.blob_id}"
        raise UnavailableError(
            f"{path} came twice with other bytes than the hub's listing says ({listed.size} bytes, {digest}); "
            "a proxy, or the hub itself, spoils it"
        )

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        """Turn every error of the client into an `InputError` of one line."""
        try:
            yield
        except HFValidationError:
            raise InputError(f"{self.kind}.name: there is no folder {self.name}, and it is no hub identifier") from None
        except Exception as error:  # the client raises its transport's types, and a page that is no hub any other
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            revision = f" at revision {self._revision}" if self._revision else ""
            raise InputError(
                f"{self.kind}.name: {self.name} is no folder here, and cannot be had from the hub{revision}: "
                f"{self._reason(error)}"
            ) from error

    def _reason(self, error: BaseException) -> str:
        for each in chain(error):
            if isinstance(each, HfHubHTTPError):
                return self._refusal(each)
            if isinstance(each, UnavailableError) and not is_offline_mode():
                return str(each)
        if is_offline_mode():
            return "HF_HUB_OFFLINE is set, and the cache in HF_HOME lacks some of it; unset it to download the rest"
        if any(isinstance(each, (FileMetadataError, LookupError, TypeError, ValueError)) for each in chain(error)):
            page = " but a page" if isinstance(error, json.JSONDecodeError) and error.doc.lstrip()[:1] == "<" else ""
            return (
                f"what answers at {constants.ENDPOINT} is no hub{page}; log in to the network that shows it, "
                "or mend the proxy or HF_ENDPOINT"
            )
        return first_line(list(chain(error))[-1])

    def _refusal(self, error: HfHubHTTPError) -> str:
        status = error.response.status_code
        where = f"{constants.ENDPOINT}/{'datasets/' * (self.kind == 'dataset')}{self.name}"
        if isinstance(error, GatedRepoError):
            return f"it is gated; accept its terms at {where} and {LOGIN}"
        if isinstance(error, RevisionNotFoundError):
            return f"it has no such branch, tag or commit; {where} lists those that it has"
        if status == 401 and get_token() and not isinstance(error, RepositoryNotFoundError):
            return f"the hub refuses the token of HF_TOKEN or of the login; {LOGIN} anew"
        if status == 401 or isinstance(error, RepositoryNotFoundError):
            return f"there is no {self.kind} of that name that it shows; mend the name, or, for a private one, {LOGIN}"
        if status == 403:
            return f"the hub forbids it; {LOGIN} with the right to read it"
        return " ".join(f"it answers {status} {error.response.reason_phrase} {error.server_message or ''}".split())


def _bar(progress: Callable[[], None] | None = None, **fixed: Any) -> type[tqdm]:
    """Return the client's progress bar, which calls `progress` for each part that arrives; `fixed` are its options."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | fixed))  # type: ignore[no-untyped-call]  # the client's

        def update(self, n: float | None = 1) -> bool | None:
            if progress:
                progress()
            shown: bool | None = super().update(n)
            return shown

    return Bar


def _is_as_listed(path: Path, listed: TreeCacheEntry) -> bool:
    if path.stat().st_size != listed.size:
        return False
    with path.open("rb") as file:
        if listed.lfs_sha256 is not None:
            return hashlib.file_digest(file, "sha256").hexdigest() == listed.lfs_sha256
        blob = hashlib.sha1(b"blob %d\0" % listed.size, usedforsecurity=False)
        return hashlib.file_digest(file, lambda: blob).hexdigest() == listed.blob_id
