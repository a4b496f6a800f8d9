"""Configuration of the tokenizer service; the field docs are its --help."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from libs.config import ServiceConfig, Settings
from libs.config.concerns import DrainSettings, TemplateSettings
from libs.config.settings import Address, Amount


class ListenSettings(Settings):
    """Model and address."""

    model: str = Field("", description="Model directory. Of its files the tokenizer needs config.json, tokenizer.json and the template.")
    listen: Address = Field("127.0.0.1:7001", description="gRPC address of the service: `unix:/path` or `host:port`.")


class PoolSettings(Settings):
    """Encoder processes."""

    tokenizer_pool_size: int = Field(2, ge=1, le=256, description="Encoder processes; each renders and encodes one prompt at a time.")
    tokenizer_queue: int = Field(
        256, ge=1, description="Most prompts that may wait for an encoder process; beyond it a call is refused with a 429."
    )
    tokenizer_timeout: float = Field(
        10.0, gt=0, description="Seconds that rendering and encoding one prompt may take; then its process is killed and replaced."
    )
    tokenizer_memory_bytes: Amount = Field(
        1 << 30, ge=1 << 26, description="Memory that one prompt may take in an encoder process beyond what loading the tokenizer took."
    )


class TokenizerConfig(ListenSettings, TemplateSettings, PoolSettings, DrainSettings, ServiceConfig):
    """The tokenizer: renders chats, encodes prompts, hashes their blocks, and knows what every token spells."""

    section: ClassVar[str] = "tokenizer"
