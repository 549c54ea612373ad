"""An HTTP client that retries requests with exponential backoff within a time limit, and resumes downloads.

`huggingface_hub` restarts interrupted downloads from the first byte, does not retry after connection resets, accepts
any waiting time requested by a server, and sets no time limit for listings.
"""

import logging
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import httpx2
from huggingface_hub import constants

from attnmix.core.errors import InputError, first_line

TIME_LIMIT_SECONDS = 120.0  # maximum time without progress
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
TEMPORARY_STATUSES = (408, 429, 500, 502, 503, 504)
# Until a server has answered for the first time, requests that fail with these errors are not retried.
UNREACHABLE = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)


class UnavailableError(InputError):
    """An error for content that the hub does not provide; the message contains the reason."""


class Backoff:
    """Exponential backoff between the attempts of a request, within `TIME_LIMIT_SECONDS`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Reset the waiting time and the time limit, after progress."""
        self._end = time.monotonic() + TIME_LIMIT_SECONDS
        self._wait = FIRST_WAIT_SECONDS

    def remaining(self) -> float:
        """Return the remaining seconds until the time limit."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raise `UnavailableError` if a response has not ended within the time limit."""
        if self.remaining() <= 0:
            raise _create_timeout_error("the response is incomplete")

    def wait(self, cause: str) -> None:
        """Wait before the next attempt; raise `UnavailableError` if the wait would exceed the time limit."""
        if self.remaining() <= self._wait:
            raise _create_timeout_error(cause)
        logging.info("the hub: %s; retrying in %.1f s", cause, self._wait)
        time.sleep(self._wait)
        self._wait = min(2 * self._wait, LONGEST_WAIT_SECONDS)


class RetryingClient(httpx2.Client):
    """A client that retries temporary failures; streamed bodies are resumed, other bodies have a time limit."""

    _has_answered = False  # True after the first response of any server

    def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request like `httpx2.Client`, with retries.

        With `stream`, the body is downloaded when the caller iterates over it, and resumed after an interruption. Raise
        `UnavailableError` after the time limit or for an unreachable server.
        """
        backoff = Backoff()
        if stream:
            request.headers["Accept-Encoding"] = "identity"  # compressed bodies cannot be resumed by file offset
            response = self.begin(request, backoff, **options)
            response.stream = ResumedBody(self, request, options, response, backoff)
            return response
        while True:
            response = self.begin(request, backoff, **options)
            response.stream = TimedBody(response.stream, backoff)
            try:
                response.read()
            except httpx2.TransportError as error:
                backoff.wait(_describe_failure(error))
            else:
                return response
            finally:
                response.close()

    def begin(self, request: httpx2.Request, backoff: Backoff, position: int = 0, **options: Any) -> httpx2.Response:
        """Return a response with an unread body, requested from byte `position` onwards.

        Temporary failures are retried. Raise `UnavailableError` after the time limit or for an unreachable server.
        """
        headers = request.headers.copy()
        if position:
            headers["Range"] = f"bytes={position}-"
        while True:
            extensions = request.extensions | {"timeout": _compute_timeouts(request, backoff)}
            attempt = httpx2.Request(
                request.method, request.url, headers=headers, stream=request.stream, extensions=extensions
            )
            try:
                response = super().send(attempt, stream=True, **options)
            except httpx2.TransportError as error:
                self._check_reachable(error)
                backoff.wait(_describe_failure(error))
                continue
            self._has_answered = True
            if response.status_code not in TEMPORARY_STATUSES:
                return response
            response.close()
            backoff.wait(f"the server answers {response.status_code} {response.reason_phrase}")

    def _check_reachable(self, error: httpx2.TransportError) -> None:
        """Raise `UnavailableError` if a request failed with `error` because the server is unreachable.

        If a server has answered before, the network works, and the failure may be temporary.
        """
        root = error_chain(error)[-1]
        is_unreachable = isinstance(root, UNREACHABLE) or isinstance(error, httpx2.ProxyError)
        if is_unreachable and not self._has_answered:
            raise UnavailableError(f"{constants.ENDPOINT} cannot be reached ({first_line(root)})") from error


class TimedBody(httpx2.SyncByteStream):
    """A short body, such as a page of a listing; it must be complete within the time limit."""

    def __init__(self, stream: Any, backoff: Backoff) -> None:
        self._stream = stream
        self._backoff = backoff

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            yield part
            self._backoff.check()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()


class ResumedBody(httpx2.SyncByteStream):
    """The body of a file download, which is resumed after an interruption.

    The time limit restarts only when bytes beyond the furthest previous position are received.
    """

    def __init__(
        self,
        client: RetryingClient,
        request: httpx2.Request,
        options: dict[str, Any],
        response: httpx2.Response,
        backoff: Backoff,
    ) -> None:
        """Prepare to read the body of `response`, the answer to `request`."""
        self._client = client
        self._request = request
        self._options = options
        self._stream: Any = response.stream
        self._backoff = backoff

    def __iter__(self) -> Iterator[bytes]:
        """Yield each byte of the file once, in order, across all responses."""
        position = 0  # number of yielded bytes
        repeated = 0  # number of bytes to skip in the current response, because they were already yielded
        while True:
            try:
                for part in self._stream:
                    new = part[repeated:]
                    skipped = len(part) - len(new)
                    repeated -= skipped
                    if new:
                        position += len(new)
                        self._backoff.restart()
                        yield new
                    else:
                        self._backoff.check()
                return
            except httpx2.TransportError as error:
                self._stream.close()
                self._backoff.wait(_describe_failure(error))
            response = self._request_rest(position)
            if response.status_code == httpx2.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return  # the interruption was after the last byte
            # A server without support for range requests answers OK, and sends the file from the first byte.
            repeated = position if response.status_code == httpx2.codes.OK else 0

    def _request_rest(self, position: int) -> httpx2.Response:
        """Request the body from byte `position` onwards, set `self._stream` to it, and return the response.

        If the server refuses, raise `OSError`, which `Repository` handles like a file of the wrong size.
        """
        response = self._client.begin(self._request, self._backoff, position, **self._options)
        self._stream = response.stream
        has_rest = response.status_code in (httpx2.codes.OK, httpx2.codes.PARTIAL_CONTENT)
        is_at_end = response.status_code == httpx2.codes.REQUESTED_RANGE_NOT_SATISFIABLE
        if not (has_rest or is_at_end):
            raise OSError(f"the server refuses the rest of the body with status {response.status_code}")
        return response

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()


def error_chain(error: BaseException) -> list[BaseException]:
    """Return an error, its cause, the cause of its cause, and so on.

    The context of an error counts as its cause if no cause is set: the HTTP transport sets some causes only as context.
    """
    cause = error.__cause__ or error.__context__
    return [error, *error_chain(cause)] if cause else [error]


def _compute_timeouts(request: httpx2.Request, backoff: Backoff) -> dict[str, float]:
    """Return the timeout in seconds of each phase of an attempt, at most the remaining time limit."""
    limits = request.extensions.get("timeout", {})
    timeouts = {}
    for phase in ("connect", "read", "write", "pool"):
        limit = limits.get(phase) or constants.HF_HUB_DOWNLOAD_TIMEOUT
        timeouts[phase] = max(0.01, min(limit, backoff.remaining()))
    return timeouts


def _create_timeout_error(cause: str) -> UnavailableError:
    return UnavailableError(f"{cause}, even after {TIME_LIMIT_SECONDS:g} s; try again later")


def _describe_failure(error: httpx2.TransportError) -> str:
    """Return a description of a connection failure."""
    if isinstance(error, httpx2.TimeoutException):
        return "the server does not respond"
    return f"the connection broke ({first_line(error_chain(error)[-1])})"
