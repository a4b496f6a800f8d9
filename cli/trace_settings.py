"""Which traces the built-in store keeps: a concern of `tokenloom serve` and of the process that stores them."""

from __future__ import annotations

from pydantic import Field

from libs.config.settings import Settings
from libs.telemetry.trace_keeping import KeepPolicy


class TraceKeepingSettings(Settings):
    """Traces of the built-in store."""

    trace_keep_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the requests whose trace is kept, decided at the trace's end; failed ones and slow ones are kept beside it.",
    )
    trace_keep_slow: float | None = Field(
        None, gt=0, description="Seconds from which on a request is slow, so that its trace is kept. None: no such rule."
    )

    @property
    def keep_policy(self) -> KeepPolicy:
        """The same for the store."""
        return KeepPolicy(self.trace_keep_ratio, self.trace_keep_slow)
