"""What all commands of bench share: arguments that are checked before anything is measured, and ends without tracebacks.

Does not own what a command measures, nor its flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from libs.errors import TokenloomError

_WRONG, _INTERRUPTED = 2, 130


def run(main: Callable[[], int]) -> int:
    """The exit code of `main`: 2, with one line, for a model, a setting or a file that it cannot work with; 130 after Ctrl-C.

    Other exceptions are mistakes of the command's own and keep their traceback.
    """
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        return _refuse(found)
    except (TokenloomError, OSError) as error:
        return _refuse(str(error))


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument's type: a whole number of at least `least`, at most `most`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text} is not {least} {f'to {most}' if most is not None else 'or more'}")
        return value

    return number


def writable(text: str) -> Path:
    """An argument's type: a file that can be written. It is opened now, so that no minutes of measuring are lost; its content stays."""
    path = Path(text)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    return path


def readable(text: str) -> Path:
    """An argument's type: a file of text that holds something."""
    path = Path(text)
    try:
        if path.read_text(encoding="utf-8").strip():
            return path
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}") from error
    raise argparse.ArgumentTypeError(f"{text} holds no text")


def _refuse(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return _WRONG
