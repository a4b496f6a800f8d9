"""What the gateway can be told on its command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, field_validator

from libs.config import ServiceConfig, Settings
from libs.config.concerns import DrainSettings, StatsSettings, StoreSettings
from libs.config.settings import MAX_SOCKET_PATH, Address, Amount
from services.gateway.parsers.factory import reasoning_format, reasoning_parser_names, tool_format, tool_parser_names

# What a browser sends as Origin: no path and no trailing slash; `null` for files.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s\[\]\"']+|[a-z]+://\[[0-9a-f:.]+\](:\d+)?")

# What a client can send behind `Bearer `: blanks at its ends are not part of it, and a header holds no control characters.
_KEY = re.compile(r"[^\s\x00-\x1f\x7f\ud800-\udfff]+")


def _check_key(value: str) -> str:
    """The message does not show the key: it goes to the log."""
    if not value:
        raise ValueError("an empty key would open /v1 to everybody who sends none; leave it out for no keys at all")
    if not _KEY.fullmatch(value):
        raise ValueError("a key with blanks, control characters or what is no text can be sent by no client")
    return value


class ListenSettings(Settings):
    """Serving HTTP."""

    host: str = Field("127.0.0.1", description="Address to serve HTTP on; 0.0.0.0 for every interface.")
    port: int = Field(8000, ge=0, le=65535, description="Port to serve HTTP on. 0: any free one (the log names it).")
    uds: str = Field("", description="Path of a Unix socket to serve HTTP on instead of host and port. Empty: none.")
    drain_delay: float = Field(
        0.0,
        ge=0,
        description="Seconds after SIGTERM in which new requests are still served while /ready refuses, so that balancers can notice; "
        "--drain-timeout begins afterwards.",
    )

    def contradictions(self) -> Iterator[str]:
        """See Settings."""
        if len(self.uds.encode()) > MAX_SOCKET_PATH:
            yield f"--uds: the path takes {len(self.uds.encode())} bytes; the system takes {MAX_SOCKET_PATH}"
        for name in ("host", "port"):
            if self.uds and self.given(name):
                yield f"--uds and --{name}: a gateway that serves on a Unix socket serves on no address; leave one of them out"


class ApiSettings(Settings):
    """Clients."""

    served_model_name: list[str] = Field(
        default_factory=list,
        description="Name clients ask for in `model`; may be repeated, the first is reported by default. "
        "None: `default`, and the model's own under `tokenloom serve`.",
    )
    api_key: list[Annotated[str, AfterValidator(_check_key)]] = Field(
        default_factory=list,
        description="Key that /v1 requires as a bearer token; may be repeated. None: open, unless --api-keys-from-store.",
        json_schema_extra={"secret": True},
    )
    api_keys_from_store: bool = Field(
        False,
        description="Take the keys of `tokenloom keys` too, with their limits per minute. /v1 is closed to all others, "
        "and to keys that cannot be checked while the store is away.",
    )
    trust_request_chat_template: bool = Field(
        False,
        description="Serve `chat_template` of a request: a client's Jinja program then runs in the tokenizer, in a sandbox with "
        "limits of time and memory.",
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Log-probabilities name tokens `token_id:17` where a request does not say `return_tokens_as_token_ids`."
    )


class ParsingSettings(Settings):
    """Tool calls and reasoning."""

    enable_auto_tool_choice: bool = Field(
        True,
        description="Parse the text for tool calls where a request has `tools` and leaves the choice to the model. "
        "Off: the text stays as it is.",
    )
    tool_call_parser: str = Field(
        "",
        description="How the model writes tool calls: hermes, llama3_json, mistral, pythonic, or an entry point of tokenloom.tool_parsers. "
        "None: as the chat template asks for.",
    )
    reasoning_parser: str = Field(
        "",
        description="How the model marks its reasoning, which responses show apart: deepseek_r1, qwen3, or an entry point of "
        "tokenloom.reasoning_parsers. None: it stays in the text.",
    )

    @field_validator("tool_call_parser")
    @classmethod
    def _check_tool_parser(cls, value: str) -> str:
        if value and value not in tool_parser_names():
            raise ValueError(f"there is no parser of tool calls called {value}: there are {', '.join(tool_parser_names())}")
        if value:
            tool_format(value)
        return value

    @field_validator("reasoning_parser")
    @classmethod
    def _check_reasoning_parser(cls, value: str) -> str:
        if value and value not in reasoning_parser_names():
            raise ValueError(f"there is no parser of reasoning called {value}: there are {', '.join(reasoning_parser_names())}")
        if value:
            reasoning_format(value)
        return value


class CorsSettings(Settings):
    """Calls from browsers (CORS)."""

    allowed_origins: list[str] = Field(default_factory=list, description="Origin that browsers may call from (CORS), or *. Repeatable.")
    allowed_methods: list[str] = Field(default_factory=lambda: ["*"], description="Method that CORS allows, or *; may be repeated.")
    allowed_headers: list[str] = Field(default_factory=lambda: ["*"], description="Header that CORS allows, or *; may be repeated.")
    allow_credentials: bool = Field(False, description="Whether CORS allows cookies and authorization of the browser.")

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin} is no origin, and no browser would ever match it: write https://host, with :port if any, or *")
        return value

    def contradictions(self) -> Iterator[str]:
        """See Settings."""
        if self.allow_credentials and not self.allowed_origins:
            yield "--allow-credentials says nothing without --allowed-origins: no browser may call at all"
        if self.allow_credentials and "*" in self.allowed_origins:
            yield "--allow-credentials with --allowed-origins *: every site could act as its visitor; name the origins"


class LimitSettings(Settings):
    """Limits of a request."""

    max_body_bytes: Amount = Field(32 * 1024 * 1024, ge=1024, description="Largest request body, in bytes; a larger one is a 413.")
    max_prompts: int = Field(256, ge=1, description="Most sequences of one request, prompts times n; more are a 400.")
    request_timeout: float = Field(
        0.0, ge=0, description="Seconds a request may take when it names no `timeout`, and the most it may ask for. 0: no limit."
    )
    slow_reader_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds a client may leave a full connection unread; then its request is cancelled and the connection cut.",
    )
    sse_keep_alive: float = Field(
        15.0,
        ge=0,
        description="Seconds of silence after which a stream gets a comment, which clients skip: no proxy takes it for dead then. 0: none.",
    )


class UpstreamSettings(Settings):
    """The services behind it."""

    scheduler_address: Address = Field(
        "127.0.0.1:50052",
        description="gRPC address of the scheduler (unix:/path or host:port). Not given, but --store: where the store says that it is.",
    )
    tokenizer_address: list[Address] = Field(
        default_factory=lambda: ["127.0.0.1:7001"],
        min_length=1,
        description="gRPC address of a tokenizer replica; may be repeated. Calls go to the one with the fewest outstanding.",
    )
    tokenizer_patience: float = Field(
        10.0, ge=0, description="Seconds that a request waits for a tokenizer to come back while none can be reached; then it gets a 503."
    )
    scheduler_patience: float = Field(
        10.0, ge=0, description="Seconds that a new request waits while the mesh can take none, as when the scheduler restarts; then a 503."
    )
    resume_timeout: float = Field(
        30.0, ge=0, description="Seconds that live requests wait for a new session after the scheduler was lost; then they fail with a 503."
    )


class GatewayConfig(
    ListenSettings,
    ApiSettings,
    ParsingSettings,
    CorsSettings,
    LimitSettings,
    UpstreamSettings,
    StoreSettings,
    DrainSettings,
    StatsSettings,
    ServiceConfig,
):
    """The OpenAI-compatible HTTP server of the mesh."""

    section: ClassVar[str] = "gateway"

    def contradictions(self) -> Iterator[str]:
        """See Settings."""
        if self.api_keys_from_store and not self.store:
            yield "--api-keys-from-store: there is no --store to take them from"

    @property
    def model_names(self) -> list[str]:
        """The names clients may ask for; never empty."""
        return self.served_model_name or ["default"]
