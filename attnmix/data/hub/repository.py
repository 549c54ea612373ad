"""A hub repository at one commit: the listing of its files, and downloads verified against this listing.

`huggingface_hub` does not verify downloads, and its `verify_repo_checksums` requests the listing in every run, which
needs network access. Requests of `huggingface_hub` have no total time limit, so `RetryingClient` sends them instead.
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
"""The pointer that replaces a large file in git, according to the specification of Git LFS."""
DOWNLOADS_PER_FILE = 2  # a second download if the first one does not match the listing
LOGIN = "log in (`hf auth login`, or a token in HF_TOKEN)"


class Repository:
    """The hub repository `name` at a branch, tag or commit; raises `InputError` if it is unavailable."""

    def __init__(self, kind: Literal["model", "dataset"], name: str, revision: str | None) -> None:
        """Resolve `revision` to a commit, and download the listing of its files."""
        self.kind = kind
        self.name = name
        self._revision = revision
        _register_retrying_client()
        with self._convert_errors():
            self.commit = client.resolve_revision(name, revision=revision, repo_type=kind).resolved
            self._listing = self._fetch_listing()
        self.paths = sorted(self._listing)

    def _fetch_listing(self) -> dict[str, RepoFile]:
        """Return the listed files by path; raise `ValueError` for a path outside the repository."""
        # This call downloads only the listing; the client caches the listing for runs with HF_HUB_OFFLINE.
        options: dict[str, Any] = {"allow_patterns": [], "tqdm_class": _create_progress_bar(disable=True)}
        client.snapshot_download(self.name, revision=self.commit, repo_type=self.kind, **options)
        try:
            tree = client.get_cached_repo_tree(self.name, revision=self.commit, repo_type=self.kind)
        except errors.CachedRepoTreeNotFoundError as error:
            remedy = "set HF_HOME to a writable folder"
            raise UnavailableError(f"its listing cannot be stored in {constants.HF_HUB_CACHE}; {remedy}") from error
        listing = {file.path: file for file in tree}
        for path in listing:
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError("the listing contains a path outside the repository")
        return listing

    def fetch(self, paths: Iterable[str]) -> dict[str, Path]:
        """Download missing files, verify all files in `paths`, and return the path of each in the client's cache."""
        with self._convert_errors(), _disable_xet():
            return {path: self._fetch_verified_file(path) for path in paths}

    def _fetch_verified_file(self, path: str) -> Path:
        """Return the path of a file in the client's cache; repeat the download if its hash differs from the listing."""
        listed = self._listing[path]
        bar = _create_progress_bar(size=listed.size, desc=printable(path))  # the client's bar would show a signed URL
        options: dict[str, Any] = {"revision": self.commit, "repo_type": self.kind, "tqdm_class": bar}
        for _ in range(DOWNLOADS_PER_FILE):
            try:
                file = Path(client.hf_hub_download(self.name, path, **options))
            except OSError as error:
                if not _has_wrong_size(error):
                    raise
                continue
            if _matches_listing(file, listed):
                return file
            content = file.resolve()  # `file` is a link to the content
            content.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        listing = f"{listed.size} bytes, git's hash {listed.blob_id}"
        problem = f"{path} did not match the hub's listing in two downloads ({listing})"
        raise UnavailableError(f"{problem}; check the proxy, or try again later")

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert every error of the client into a one-line `InputError`."""
        try:
            with without_library_messages():
                yield
        except errors.HFValidationError:
            raise InputError(
                f"{self.kind}.name: {self.name} is neither an existing folder nor a hub identifier"
            ) from None
        except Exception as error:  # any exception is possible if the server is not a hub
            if isinstance(error, OSError) and error.errno is not None:  # an error of the disk
                place = f"{error.filename2 or error.filename or constants.HF_HUB_CACHE}: {error.strerror}"
                remedy = "set HF_HOME to a writable folder with enough space"
                raise InputError(f"files of the hub cannot be cached ({place}); {remedy}") from error
            revision = f" at revision {self._revision}" if self._revision else ""
            problem = f"{self.name} is not a local folder and cannot be downloaded from the hub{revision}"
            raise InputError(f"{self.kind}.name: {problem}: {self._explain_failure(error)}") from error

    def _explain_failure(self, error: BaseException) -> str:
        """Return the reason for a failed download, with the next step for the user."""
        causes = error_chain(error)
        for cause in causes:
            if isinstance(cause, errors.HfHubHTTPError):
                return self._explain_status(cause)
            if isinstance(cause, UnavailableError) and not client.is_offline_mode():
                return str(cause)
        if client.is_offline_mode():
            return (
                "HF_HUB_OFFLINE is set, and the cache in HF_HOME is incomplete; unset it to download the missing files"
            )
        if any(isinstance(cause, (errors.FileMetadataError, LookupError, TypeError, ValueError)) for cause in causes):
            remedy = "log in to the network if it has a login page, or correct the proxy or HF_ENDPOINT"
            return f"the server at {constants.ENDPOINT} is not a hub; {remedy}"
        return first_line(causes[-1])

    def _explain_status(self, error: errors.HfHubHTTPError) -> str:
        """Return the reason for an error status in the response of the hub, with the next step for the user."""
        status = error.response.status_code
        folder = "datasets/" if self.kind == "dataset" else ""
        address = f"{constants.ENDPOINT}/{folder}{self.name}"
        if isinstance(error, errors.GatedRepoError):
            return f"it is gated; accept its terms at {address} and {LOGIN}"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"this branch, tag or commit does not exist; {address} lists the existing ones"
        if status == 401 and client.get_token() and not isinstance(error, errors.RepositoryNotFoundError):
            return f"the hub rejects the token from HF_TOKEN or the last login; {LOGIN} again"
        if status == 401 or isinstance(error, errors.RepositoryNotFoundError):
            return f"the hub has no public {self.kind} of this name; correct the name, or, for a private one, {LOGIN}"
        if status == 403:
            return f"the hub denies access; {LOGIN} with an account that has access"
        answer = f"the hub answers {status} {error.response.reason_phrase} {error.server_message or ''}"
        return " ".join(answer.split())


def _has_wrong_size(error: OSError) -> bool:
    """Return True for the error for a download that is too short or too long: `OSError` itself, without `errno`."""
    return type(error) is OSError and error.errno is None


def _matches_listing(path: Path, listed: RepoFile) -> bool:
    """Return True if git's hash of a file, or of the Git LFS pointer to a large file, matches the listing."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        pointer = LFS_POINTER.format(digest=digest, size=path.stat().st_size).encode()
        pointer_hash = _create_git_hash(len(pointer), pointer).hexdigest()
        if pointer_hash == listed.blob_id:
            return True
        file.seek(0)
        file_hash = hashlib.file_digest(file, lambda: _create_git_hash(listed.size)).hexdigest()
        return file_hash == listed.blob_id


def _create_git_hash(size: int, content: bytes = b"") -> Any:
    """Return a `hashlib` object for git's blob hash of a file of `size` bytes, updated with `content`."""
    return hashlib.sha1(b"blob %d\0" % size + content, usedforsecurity=False)


def _create_progress_bar(size: float = inf, **fixed: Any) -> type[tqdm]:
    """Return a subclass of the client's progress bar that always has the options `fixed`.

    The bar raises an error if more than `size` bytes are received.
    """

    class Bar(tqdm):
        """A progress bar that limits the size of a download."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | fixed))  # type: ignore[no-untyped-call]  # untyped in tqdm
            self.received = 0.0

        def update(self, n: float | None = 1) -> Any:
            self.received += n or 0
            if self.received > size:
                raise OSError("the file has more bytes than listed")  # the client raises the same type for fewer bytes
            return super().update(n)

    return Bar


@contextmanager
def _disable_xet() -> Iterator[None]:
    """Disable transfers by hf_xet, which bypass the client and its time limits."""
    disabled = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = disabled


@cache
def _register_retrying_client() -> None:
    """Set `RetryingClient` as the client of all subsequent requests of `huggingface_hub`."""
    hooks = client.get_session().event_hooks  # these implement HF_HUB_OFFLINE
    client.set_client_factory(lambda: RetryingClient(event_hooks=hooks, follow_redirects=True))
