"""The HTTP API as `tokenloom chat` and `tokenloom complete` use it: requests, streams of events, and errors in words for people."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from cli.json_text import encode

DEFAULT_URL = "http://127.0.0.1:8000"
# Seconds. A stream says something every 15 s (--sse-keep-alive); a whole answer may take its time.
_CONNECT, _READ_STREAM, _READ_WHOLE = 5.0, 300.0, 3600.0
_JSON = {"content-type": "application/json"}


@dataclass(slots=True)
class ApiError(Exception):
    """What went wrong, as a sentence for the user. `code` is the server's label for it, empty where no server answered."""

    message: str
    code: str = ""

    def __str__(self) -> str:
        return self.message


class WrongUsage(ApiError):
    """What the command line asks for cannot be: exit code 2, as for a wrong flag."""


class ApiClient:
    """One server. Its methods raise ApiError. A context manager: leaving it closes the connections."""

    def __init__(self, url: str, api_key: str = "", transport: httpx.BaseTransport | None = None) -> None:
        """`url` may end in /v1, as the base URL of OpenAI's clients does. Raises WrongUsage for what is no HTTP address or key."""
        self.url = url.rstrip("/").removesuffix("/v1")
        if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
            raise WrongUsage(
                "the key (--api-key or TOKENLOOM_API_KEY) holds what no HTTP header can carry: a letter beyond ASCII, a line break or "
                "a space at its end"
            )
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            parsed = httpx.URL(self.url)
            if parsed.scheme not in ("http", "https") or not parsed.host:
                raise httpx.InvalidURL("it does not begin with http:// or https:// and a host")
            timeout = httpx.Timeout(_READ_WHOLE, connect=_CONNECT)
            # A proxy from the environment is for the world outside, not for a mesh on this machine.
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, trust_env=not _is_local(parsed.host), transport=transport
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise WrongUsage(f"{url} is no address of a server: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """The names of the served models, the default first."""
        with self._failures():
            response = self._http.get("/v1/models", timeout=httpx.Timeout(30.0, connect=_CONNECT))
            _refuse(response)
            try:
                return [card["id"] for card in response.json()["data"]]
            except (ValueError, KeyError, TypeError):
                raise ApiError(f"{self.url} answers, but not as an OpenAI-compatible server does") from None

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        with self._failures():
            response = self._http.post(route, content=_encoded(body), headers=_JSON)
            _refuse(response)
            answer: dict[str, Any] = response.json()
            if not isinstance(answer, dict):
                raise ApiError(f"{self.url} answers, but not as an OpenAI-compatible server does")
            return answer

    def stream(self, route: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed answer as they come. Closing the iterator ends the request at the server too."""
        content = _encoded({**body, "stream": True})
        timeout = httpx.Timeout(_READ_STREAM, connect=_CONNECT)
        with self._failures(), self._http.stream("POST", route, content=content, headers=_JSON, timeout=timeout) as response:
            if response.status_code != 200:
                response.read()
                _refuse(response)
            for data in _events(response):
                if data == b"[DONE]":
                    return
                chunk: dict[str, Any] = json.loads(data)
                if not isinstance(chunk, dict):
                    raise ApiError(f"{self.url} answers, but not as an OpenAI-compatible server does")
                if "error" in chunk:
                    raise _error_of(chunk["error"], prefix="the answer broke off: ")
                yield chunk
            raise ApiError("the answer broke off: the connection ended before it did")

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ApiError(f"no server answers at {self.url} ({error}); `tokenloom serve` starts one, --url names another") from None
        except httpx.TimeoutException:
            raise ApiError(f"the server at {self.url} says nothing; its /ready tells whether it can serve") from None
        except httpx.HTTPError as error:
            raise ApiError(f"the connection to {self.url} broke: {error}") from None
        except ValueError:  # of json, or of bytes that are no text
            raise ApiError(f"{self.url} answers with what is no JSON; is it an OpenAI-compatible server?") from None


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return encode(body)
    except ValueError as error:
        raise ApiError(f"the request cannot be sent: {error}") from None


def _events(response: httpx.Response) -> Iterator[bytes]:
    """The data of server-sent events. Split by hand: httpx's lines also end at characters that JSON may hold (U+2028)."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line[5:].strip() for line in lines if line.startswith(b"data:"))


def _refuse(response: httpx.Response) -> None:
    """Raises ApiError for an answer that is an error."""
    if response.is_success:
        return
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise ApiError(f"the server answers {response.status_code} {response.reason_phrase}", str(response.status_code)) from None
    after = response.headers.get("retry-after")
    raise _error_of(error, suffix=f" (try again in {after} s)" if after else "")


def _error_of(error: Any, *, prefix: str = "", suffix: str = "") -> ApiError:
    if not isinstance(error, dict):
        return ApiError(f"{prefix}{error}{suffix}")
    message, code = str(error.get("message")), str(error.get("code") or "")
    hints = {
        "unauthorized": "; give the key with --api-key or TOKENLOOM_API_KEY",
        "model_not_found": "; --model (in a chat /model) chooses another",
    }
    return ApiError(f"{prefix}{message}{hints.get(code, '')}{suffix}", code)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
