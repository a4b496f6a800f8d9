"""JSON as it goes to a server: what json would write but nobody can read (NaN, half a character) is refused, in words for people."""

from __future__ import annotations

import json
from typing import Any


def encode(value: Any) -> bytes:
    """UTF-8 JSON of what a request holds. Raises ValueError, a sentence for the user, where it has none."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds half a character or a byte that is no text ({error.object[error.start]!a})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("it holds NaN or infinity, for which JSON has no number") from None


def decode(text: str | bytes) -> Any:
    """What JSON text says, if it can be sent on. Raises ValueError, a sentence for the user."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    encode(value)
    return value
