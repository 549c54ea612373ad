"""A client for the hub with a timeout for each request and retries with exponential backoff.

`huggingface_hub` retries some requests itself, but lists a repository without a timeout, does not retry a reset
connection, and waits as long as a server asks, without a total limit.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]  # its stub forgets it

from attnmix.core.errors import InputError, first_line

TIME_LIMIT_SECONDS = 120.0  # for the retries of one request
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
TEMPORARY_STATUSES = (408, 429, 500, 502, 503, 504)
UNREACHABLE = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
"""Errors that a retry does not help with, before the first answer."""


class UnavailableError(InputError):
    """The hub does not give what it is asked for; the text says why."""


class Backoff:
    """Waits between the tries of one request, twice as long each time, within `TIME_LIMIT_SECONDS`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew, as after progress."""
        self._ends = time.monotonic() + TIME_LIMIT_SECONDS
        self._wait = FIRST_WAIT_SECONDS

    def remaining(self) -> float:
        """Return how many seconds are left of the limit."""
        return self._ends - time.monotonic()

    def wait(self, cause: str, requested: float = 0.0) -> None:
        """Wait, as long as the server has `requested` at least; raise `UnavailableError` past the limit."""
        wait = max(self._wait, requested)
        if self.remaining() <= wait:
            asks = f", and asks to wait {requested:.0f} s" if requested else ""
            raise UnavailableError(f"{cause}{asks}, for more than {TIME_LIMIT_SECONDS:g} s; try again later")
        logging.info("the hub: %s; retried in %.1f s", cause, wait)
        time.sleep(wait)
        self._wait = min(2 * self._wait, LONGEST_WAIT_SECONDS)


class RetryingClient(httpx2.Client):
    """A client that retries temporary failures; a response whose body is streamed is retried until it begins."""

    def __init__(self, hooks: Mapping[str, list[Callable[..., Any]]]) -> None:
        super().__init__(event_hooks=hooks, follow_redirects=True)
        self._reached = False

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send as httpx does; raise `UnavailableError` once the time limit is over, or for a server out of reach."""
        backoff, given = Backoff(), dict(request.extensions.get("timeout", {}))
        while True:
            request.extensions["timeout"] = {
                phase: max(0.01, min(given.get(phase) or constants.HF_HUB_DOWNLOAD_TIMEOUT, backoff.remaining()))
                for phase in ("connect", "read", "write", "pool")
            }
            requested = 0.0
            try:
                response = super().send(request, **options)
                self._reached = True
                if response.status_code not in TEMPORARY_STATUSES:
                    return response
                cause, requested = f"it answers {response.status_code} {response.reason_phrase}", _requested(response)
                response.close()
            except httpx2.TransportError as error:
                root = list(chain(error))[-1]
                if not self._reached and (isinstance(root, UNREACHABLE) or isinstance(error, httpx2.ProxyError)):
                    raise UnavailableError(f"{constants.ENDPOINT} cannot be reached: {first_line(root)}") from error
                cause = failure(error)
            backoff.wait(cause, requested)


def use_retries() -> None:
    """Send all requests of `huggingface_hub` by a `RetryingClient` from now on."""
    hooks = get_session().event_hooks  # they keep HF_HUB_OFFLINE
    set_client_factory(lambda: RetryingClient(hooks))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it comes from; the transport keeps some of them as context only."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def failure(error: httpx2.TransportError) -> str:
    """Return what went wrong with a connection, in words."""
    if isinstance(error, httpx2.TimeoutException):
        return "it sends nothing"
    return f"the connection breaks ({first_line(list(chain(error))[-1])})"


def _requested(response: httpx2.Response) -> float:
    """Return the seconds that the server asks to wait, by rate limits or Retry-After; 0 where it asks for none."""
    limits = parse_ratelimit_headers(response.headers)
    if response.status_code == 429 and limits is not None and limits.remaining == 0:
        return limits.reset_in_seconds
    value = response.headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
