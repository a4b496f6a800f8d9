"""What the operator of this gateway allows and sets for all requests."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.config import GatewayConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """`max_sequences`: prompts times choices of one request. `tokens_as_ids`: how log-probabilities name tokens where the client is silent.
    `trust_chat_template`: whether a client may bring a template of its own.
    """

    max_sequences: int
    tokens_as_ids: bool = False
    trust_chat_template: bool = False

    @classmethod
    def of(cls, config: GatewayConfig) -> Policy:
        """The policy of a configuration."""
        return cls(config.max_prompts, config.return_tokens_as_token_ids, config.trust_request_chat_template)
