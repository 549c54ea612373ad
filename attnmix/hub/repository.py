"""A repository of the hub at one commit: its list of files, and each file, checked against the hub's listing.

`huggingface_hub` checks no digest, lists a repository without a timeout, does not retry a reset connection, and waits
as long as a server asks, without a total limit. Its requests go through a client that retries with backoff instead.
"""

import hashlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import httpx2
import huggingface_hub as client
from huggingface_hub import constants, errors

# The public reader of the listing that the client keeps leaves out the sha256 of large files.
from huggingface_hub._tree_cache import TreeCacheEntry, read_tree_cache
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import tqdm

from attnmix.core.errors import InputError, first_line

TIME_LIMIT_SECONDS = 120.0  # for the retries of one request
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
TEMPORARY_STATUSES = (408, 429, 500, 502, 503, 504)
# Errors that a retry does not help with, before the first answer.
UNREACHABLE = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
LOGIN = "log in (`hf auth login`, or a token in HF_TOKEN)"


class UnavailableError(InputError):
    """The hub does not give what it is asked for; the text says why."""


class Repository:
    """`name` on the hub, at a branch, tag or commit; raises `InputError` where it cannot be had."""

    def __init__(self, kind: Literal["model", "dataset"], name: str, revision: str | None) -> None:
        self.kind, self.name, self._revision = kind, name, revision
        _use_retries()
        with self._errors_in_words():
            self.commit = client.resolve_revision(name, revision=revision, repo_type=kind).resolved
            # Fetches no file, but the listing, which the client keeps for HF_HUB_OFFLINE.
            options: dict[str, Any] = {"allow_patterns": [], "tqdm_class": _bar(lambda: None, disable=True)}
            client.snapshot_download(name, revision=self.commit, repo_type=kind, **options)
            folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).expanduser().resolve()
            listing = read_tree_cache(str(folder), self.commit)
            if listing is None:
                raise UnavailableError(f"its listing cannot be kept in {folder}; set HF_HOME to a folder to write to")
            if any(path.startswith("/") or ".." in path.split("/") for path in listing):
                raise ValueError("a listing that leads out of the repository")
            self._listing, self.paths = listing, sorted(listing)

    def fetch(self, paths: Iterable[str]) -> dict[str, Path]:
        """Return each file's place in the client's cache, downloaded where it is missing, and checked."""
        with self._errors_in_words():
            return {path: self._file(path) for path in paths}

    def _file(self, path: str) -> Path:
        listed, backoff, spoilt = self._listing[path], Backoff(), 0
        bar = _bar(backoff.restart, desc=path)  # the client's would show a signed address
        while spoilt < 2:
            options: dict[str, Any] = {"repo_type": self.kind, "tqdm_class": bar}
            try:
                file = Path(client.hf_hub_download(self.name, path, revision=self.commit, **options))
            except httpx2.TransportError as error:
                backoff.wait(_failure(error))  # the client then resumes where it broke
                continue
            except OSError as error:
                if type(error) is not OSError or error.errno is not None:
                    raise  # all but the client's error for a body of another size
            else:
                if _is_as_listed(file, listed):
                    return file
                for each in (file.resolve(), file):
                    each.unlink(missing_ok=True)
            spoilt += 1
        listing = f"{listed.size} bytes, hash {listed.lfs_sha256 or listed.blob_id}"
        problem = f"{path} did not match the hub's listing in two downloads ({listing})"
        raise UnavailableError(f"{problem}; a proxy, or the hub itself, changes it")

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        """Turn every error of the client into an `InputError` of one line."""
        try:
            yield
        except errors.HFValidationError:
            raise InputError(f"{self.kind}.name: there is no folder {self.name}, and it is no hub identifier") from None
        except Exception as error:  # the client raises its transport's types, and a page that is no hub any other
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            revision = f" at revision {self._revision}" if self._revision else ""
            problem = f"{self.name} is no folder here, and cannot be had from the hub{revision}"
            raise InputError(f"{self.kind}.name: {problem}: {self._reason(error)}") from error

    def _reason(self, error: BaseException) -> str:
        causes = _chain(error)
        for each in causes:
            if isinstance(each, errors.HfHubHTTPError):
                return self._refusal(each)
            if isinstance(each, UnavailableError) and not client.is_offline_mode():
                return str(each)
        if client.is_offline_mode():
            return "HF_HUB_OFFLINE is set, and the cache in HF_HOME lacks some of it; unset it to download the rest"
        if any(isinstance(each, (errors.FileMetadataError, LookupError, TypeError, ValueError)) for each in causes):
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


def _is_as_listed(path: Path, listed: TreeCacheEntry) -> bool:
    with path.open("rb") as file:
        if listed.lfs_sha256 is not None:
            return hashlib.file_digest(file, "sha256").hexdigest() == listed.lfs_sha256
        blob = hashlib.sha1(b"blob %d\0" % listed.size, usedforsecurity=False)
        return hashlib.file_digest(file, lambda: blob).hexdigest() == listed.blob_id


def _bar(progress: Callable[[], None], **fixed: Any) -> type[tqdm]:
    """Return the client's progress bar with some options `fixed`, which calls `progress` for each part that arrives."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | fixed))  # type: ignore[no-untyped-call]  # the client's

        def update(self, n: float | None = 1) -> Any:
            progress()
            return super().update(n)

    return Bar


class Backoff:
    """Waits between the tries of one request, twice as long each time, within `TIME_LIMIT_SECONDS`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start again with the shortest wait and the whole limit, as after progress."""
        self._end, self._wait = time.monotonic() + TIME_LIMIT_SECONDS, FIRST_WAIT_SECONDS

    def remaining(self) -> float:
        """Return how many seconds are left of the limit."""
        return self._end - time.monotonic()

    def wait(self, cause: str) -> None:
        """Wait before the next try; raise `UnavailableError` past the limit."""
        if self.remaining() <= self._wait:
            raise UnavailableError(f"{cause}, for more than {TIME_LIMIT_SECONDS:g} s; try again later")
        logging.info("the hub: %s; retrying in %.1f s", cause, self._wait)
        time.sleep(self._wait)
        self._wait = min(2 * self._wait, LONGEST_WAIT_SECONDS)


class RetryingClient(httpx2.Client):
    """A client that retries temporary failures; a response whose body is streamed is retried until it begins."""

    _has_answered = False

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send as httpx does; raise `UnavailableError` once the time limit is over, or for a server out of reach."""
        backoff, limits = Backoff(), dict(request.extensions.get("timeout", {}))
        while True:
            request.extensions["timeout"] = {
                phase: max(0.01, min(limits.get(phase) or constants.HF_HUB_DOWNLOAD_TIMEOUT, backoff.remaining()))
                for phase in ("connect", "read", "write", "pool")
            }
            try:
                response = super().send(request, **options)
            except httpx2.TransportError as error:
                root = _chain(error)[-1]
                if not self._has_answered and (isinstance(root, UNREACHABLE) or isinstance(error, httpx2.ProxyError)):
                    raise UnavailableError(f"{constants.ENDPOINT} cannot be reached: {first_line(root)}") from error
                backoff.wait(_failure(error))
                continue
            self._has_answered = True
            if response.status_code not in TEMPORARY_STATUSES:
                return response
            response.close()
            backoff.wait(f"it answers {response.status_code} {response.reason_phrase}")


@cache
def _use_retries() -> None:
    """Send all requests of `huggingface_hub` by a `RetryingClient` from now on."""
    hooks = client.get_session().event_hooks  # they keep HF_HUB_OFFLINE
    client.set_client_factory(lambda: RetryingClient(event_hooks=hooks, follow_redirects=True))


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and those that it comes from; the transport keeps some of them as context only."""
    cause = error.__cause__ or error.__context__
    return [error, *_chain(cause)] if cause else [error]


def _failure(error: httpx2.TransportError) -> str:
    """Return what went wrong with a connection, in words."""
    if isinstance(error, httpx2.TimeoutException):
        return "it does not respond"
    return f"the connection broke ({first_line(_chain(error)[-1])})"
