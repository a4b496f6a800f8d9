"""Prints what one extra of pyproject.toml needs, the common dependencies included, one requirement a line: `requirements.py gateway`.

An image installs these before the code is copied into the build, so that an edit of the code installs nothing anew. `requirements.py
base` prints the common dependencies alone.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(extra: str, pyproject: str) -> list[str]:
    """The common dependencies and those of `extra` ("base": none more). Raises KeyError when there is no such extra."""
    project = tomllib.loads(pyproject)["project"]
    more = [] if extra == "base" else project["optional-dependencies"][extra]
    return [*project["dependencies"], *more]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())))
