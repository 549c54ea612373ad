"""A repository of the hub at one commit: its list of files, and each file, checked against the hub's listing.

`huggingface_hub` checks no digest when it downloads, and its requests have no total time limit: they go through
`RetryingClient` instead. Its `verify_repo_checksums` lists the repository again at every run, and needs the network.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Literal

import huggingface_hub as client
from huggingface_hub import RepoFile, constants, errors
from huggingface_hub.utils.tqdm import tqdm

from attnmix.core.errors import InputError, first_line
from attnmix.core.terminal import printable, without_library_messages
from attnmix.data.hub.retries import RetryingClient, UnavailableError, error_chain

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n"
"""The pointer that git holds in place of a large file, by the specification of Git LFS."""
DOWNLOADS_PER_FILE = 2  # the second for a body that did not have the listed bytes
LOGIN = "log in (`hf auth login`, or a token in HF_TOKEN)"


class Repository:
    """`name` on the hub, at a branch, tag or commit; raises `InputError` where it cannot be had."""

    def __init__(self, kind: Literal["model", "dataset"], name: str, revision: str | None) -> None:
        self.kind, self.name, self._revision = kind, name, revision
        _use_retries()
        with self._errors_in_words():
            self.commit = client.resolve_revision(name, revision=revision, repo_type=kind).resolved
            # Fetches no file, but the listing, which the client keeps for HF_HUB_OFFLINE.
            options: dict[str, Any] = {"allow_patterns": [], "tqdm_class": _bar(disable=True)}
            client.snapshot_download(name, revision=self.commit, repo_type=kind, **options)
            try:
                tree = client.get_cached_repo_tree(name, revision=self.commit, repo_type=kind)
            except errors.CachedRepoTreeNotFoundError as error:
                remedy = "set HF_HOME to a folder to write to"
                raise UnavailableError(f"its listing cannot be kept in {constants.HF_HUB_CACHE}; {remedy}") from error
            listing = {file.path: file for file in tree}
            if any(path.startswith("/") or ".." in path.split("/") for path in listing):
                raise ValueError("a listing that leads out of the repository")
            self._listing, self.paths = listing, sorted(listing)

    def fetch(self, paths: Iterable[str]) -> dict[str, Path]:
        """Return each file's place in the client's cache, downloaded where it is missing, and checked."""
        with self._errors_in_words(), _plain_http():
            return {path: self._file(path) for path in paths}

    def _file(self, path: str) -> Path:
        listed = self._listing[path]
        bar = _bar(size=listed.size, desc=printable(path))  # the client's would show a signed address
        options: dict[str, Any] = {"revision": self.commit, "repo_type": self.kind, "tqdm_class": bar}
        for _ in range(DOWNLOADS_PER_FILE):
            try:
                file = Path(client.hf_hub_download(self.name, path, **options))
            except OSError as error:
                if type(error) is not OSError or error.errno is not None:
                    raise  # all but the error for a body of another size
                continue
            if _is_as_listed(file, listed):
                return file
            for spoilt in (file.resolve(), file):
                spoilt.unlink(missing_ok=True)
        listing = f"{listed.size} bytes, git's hash {listed.blob_id}"
        problem = f"{path} did not match the hub's listing in two downloads ({listing})"
        raise UnavailableError(f"{problem}; a proxy, or the hub itself, changes it")

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        """Turn every error of the client into an `InputError` of one line."""
        try:
            with without_library_messages():
                yield
        except errors.HFValidationError:
            raise InputError(f"{self.kind}.name: there is no folder {self.name}, and it is no hub identifier") from None
        except Exception as error:  # the client raises its transport's types, and a page that is no hub any other
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                place = f"{error.filename2 or error.filename or constants.HF_HUB_CACHE}: {error.strerror}"
                remedy = "set HF_HOME to a folder that can be written, with room"
                raise InputError(f"the cache of the hub's files refuses {place}; {remedy}") from error
            revision = f" at revision {self._revision}" if self._revision else ""
            problem = f"{self.name} is no folder here, and cannot be had from the hub{revision}"
            raise InputError(f"{self.kind}.name: {problem}: {self._reason(error)}") from error

    def _reason(self, error: BaseException) -> str:
        causes = error_chain(error)
        for cause in causes:
            if isinstance(cause, errors.HfHubHTTPError):
                return self._refusal(cause)
            if isinstance(cause, UnavailableError) and not client.is_offline_mode():
                return str(cause)
        if client.is_offline_mode():
            return "HF_HUB_OFFLINE is set, and the cache in HF_HOME lacks some of it; unset it to download the rest"
        if any(isinstance(cause, (errors.FileMetadataError, LookupError, TypeError, ValueError)) for cause in causes):
            remedy = "log in to the network, where that shows a page, or correct the proxy or HF_ENDPOINT"
            return f"what answers at {constants.ENDPOINT} is no hub; {remedy}"
        return first_line(causes[-1])

    def _refusal(self, error: errors.HfHubHTTPError) -> str:
        status = error.response.status_code
        address = f"{constants.ENDPOINT}/{'datasets/' * (self.kind == 'dataset')}{self.name}"
        if isinstance(error, errors.GatedRepoError):
            return f"it is gated; accept its terms at {address} and {LOGIN}"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"it has no such branch, tag or commit; {address} lists those that it has"
        if status == 401 and client.get_token() and not isinstance(error, errors.RepositoryNotFoundError):
            return f"the hub refuses the token of HF_TOKEN or of the login; {LOGIN} again"
        if status == 401 or isinstance(error, errors.RepositoryNotFoundError):
            return f"it shows no {self.kind} of that name; correct the name, or, for a private one, {LOGIN}"
        if status == 403:
            return f"the hub forbids it; {LOGIN} with the right to read it"
        return " ".join(f"it answers {status} {error.response.reason_phrase} {error.server_message or ''}".split())


def _is_as_listed(path: Path, listed: RepoFile) -> bool:
    """Return True where git's hash of the file is the listed one: of a large file, that of its pointer in Git LFS."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        pointer = LFS_POINTER.format(digest=digest, size=path.stat().st_size).encode()
        if listed.blob_id == _git_hash(len(pointer), pointer).hexdigest():
            return True
        file.seek(0)
        return hashlib.file_digest(file, lambda: _git_hash(listed.size)).hexdigest() == listed.blob_id


def _git_hash(size: int, content: bytes = b"") -> Any:
    """Return git's hash of a file of this size, into which `content` has been read."""
    return hashlib.sha1(b"blob %d\0" % size + content, usedforsecurity=False)


def _bar(size: float = inf, **fixed: Any) -> type[tqdm]:
    """Return the client's progress bar with some options `fixed`, which raises for a body of more bytes than `size`."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | fixed))  # type: ignore[no-untyped-call]  # the client's
            self.received = 0.0

        def update(self, n: float | None = 1) -> Any:
            self.received += n or 0
            if self.received > size:
                raise OSError("more bytes than the listing says")  # as the client does for fewer
            return super().update(n)

    return Bar


@contextmanager
def _plain_http() -> Iterator[None]:
    """Switch off the transfers of hf_xet, which pass by the client with its time limits."""
    disabled = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = disabled


@cache
def _use_retries() -> None:
    """Send all requests of `huggingface_hub` by a `RetryingClient` from now on."""
    hooks = client.get_session().event_hooks  # they keep HF_HUB_OFFLINE
    client.set_client_factory(lambda: RetryingClient(event_hooks=hooks, follow_redirects=True))
