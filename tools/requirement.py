"""Prints what pyproject.toml asks of one package, in pip's own spelling: `python tools/requirement.py torch` -> torch>=2.11,<2.14.

The Makefile installs torch from an index of its own where one is named; the range must still stand in one place only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirement(name: str, pyproject: str) -> str:
    """The first requirement on `name` among the dependencies and the extras. Raises KeyError when there is none."""
    project = tomllib.loads(pyproject)["project"]
    for line in [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]:
        if re.match(rf"{re.escape(name)}\b(?!-)", line):
            return str(line)
    raise KeyError(name)


if __name__ == "__main__":
    print(requirement(sys.argv[1], (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()))
