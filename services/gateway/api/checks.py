"""What the checks of all fields share: ranges, and errors that name a parameter."""

from __future__ import annotations

import math

from libs.errors import ErrorCode, TokenloomError

UINT32 = range(2**32)
INT32 = range(-(2**31), 2**31)
INT64 = range(-(2**63), 2**63)


def check(name: str, value: float, allowed: bool, rule: str) -> None:
    """Raises TokenloomError INVALID_REQUEST saying what `name` must be, unless `allowed`."""
    # A JSON integer has any number of digits; beyond 64 bits it neither converts to a float nor is worth printing.
    if isinstance(value, int) and value.bit_length() > 64:
        raise invalid(f"{name} must be {rule}; the number is too large", name)
    if not allowed or not math.isfinite(value):
        raise invalid(f"{name} must be {rule}; got {value}", name)


def check_count(name: str, count: int, limit: int, what: str) -> None:
    """Raises TokenloomError INVALID_REQUEST for more than `limit` entries of a list."""
    if count > limit:
        raise invalid(f"{name}: {count} {what} exceed the limit of {limit}", name)


def check_text(name: str, text: str, max_bytes: int) -> None:
    """Raises TokenloomError INVALID_REQUEST for a text that is empty or longer than `max_bytes` of UTF-8."""
    if not text:
        raise invalid(f"{name} must not be empty", name)
    if len(text.encode()) > max_bytes:
        raise invalid(f"{name} exceeds the limit of {max_bytes} bytes", name)


def invalid(message: str, param: str) -> TokenloomError:
    """A 400 that names the parameter at fault."""
    return TokenloomError(ErrorCode.INVALID_REQUEST, message, param=param)


def unsupported(message: str, param: str) -> TokenloomError:
    """A 400 for what is understood and not served."""
    return TokenloomError(ErrorCode.UNSUPPORTED, message, param=param)
