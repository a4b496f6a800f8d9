"""What the operator of this gateway allows and sets for all requests."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.config import GatewayConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """`max_sequences`: prompts times choices of one request. `tokens_as_ids`: how log-probabilities name tokens where the client is silent.
    `trust_chat_template`: whether a client may bring a template of its own. `tool_format`: the parser of calls, "" for the one that the
    template asks for; `auto_tools`: whether calls that the model chose to make are parsed. `reasoning`: the parser of reasoning, or None.
    """

    max_sequences: int
    tokens_as_ids: bool = False
    trust_chat_template: bool = False
    tool_format: str = ""
    auto_tools: bool = True
    reasoning: str | None = None

    @classmethod
    def of(cls, config: GatewayConfig) -> Policy:
        """The policy of a configuration."""
        return cls(
            max_sequences=config.max_prompts,
            tokens_as_ids=config.return_tokens_as_token_ids,
            trust_chat_template=config.trust_request_chat_template,
            tool_format=config.tool_call_parser,
            auto_tools=config.enable_auto_tool_choice,
            reasoning=config.reasoning_parser or None,
        )
