"""Keeps functions and files small enough to hold in the head.

A function over 80 lines or a file over 600 fails; over 50 or 400 is a warning. Lines count as they stand, docstrings and
comments included: what has to be scrolled has to be scrolled. A line of C++ over 140 columns fails (ruff sees to Python's).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTION_WARNS, FUNCTION_FAILS = 50, 80
FILE_WARNS, FILE_FAILS = 400, 600
COLUMNS = 140
SUFFIXES = (".py", ".cpp", ".h", ".proto")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something long: where it is, how long in which unit, and whether that fails."""

    place: str
    lines: int
    limit: int
    fails: bool
    unit: str = "lines"

    def __str__(self) -> str:
        return f"{'error' if self.fails else 'warning'}: {self.place}: {self.lines} {self.unit} (over {self.limit})"


def measure(place: str, lines: int, warns: int, fails: int) -> Iterator[Finding]:
    """The finding for something of `lines` lines, if it is one."""
    if lines > warns:
        yield Finding(place, lines, fails if lines > fails else warns, lines > fails)


def check(path: str, source: str) -> Iterator[Finding]:
    """All findings in one file. Raises SyntaxError for Python that does not parse."""
    yield from measure(path, len(source.splitlines()), FILE_WARNS, FILE_FAILS)
    if path.endswith((".cpp", ".h")):
        yield from check_cpp(path, source)
    if not path.endswith(".py"):
        return
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield from measure(f"{path}:{node.lineno} {node.name}", lines, FUNCTION_WARNS, FUNCTION_FAILS)


def check_cpp(path: str, source: str) -> Iterator[Finding]:
    """Findings in C++ as it is laid out here: a function begins at the first column and ends with a brace alone there."""
    begins, head = 0, ""
    for number, line in enumerate(source.splitlines(), 1):
        if len(line) > COLUMNS:
            yield Finding(f"{path}:{number}", len(line), COLUMNS, True, "columns")
        if not begins and re.match(r"\w.*\(", line) and not line.endswith(("}", ";")):
            begins, head = number, line
        elif begins and re.match(r"\S*[};]", line):
            if line == "}":
                name = re.findall(r"[\w:~]+(?=\()", head)
                yield from measure(f"{path}:{begins} {name[-1] if name else head}", number - begins + 1, FUNCTION_WARNS, FUNCTION_FAILS)
            begins = 0


def main() -> int:
    """Checks every tracked or new source file; 1 when something fails."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = sorted(set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()))
    present = [path for path in files if path.endswith(SUFFIXES) and Path(path).is_file()]
    findings = [finding for path in present for finding in check(path, Path(path).read_text())]
    for finding in findings:
        print(finding)
    failed = sum(finding.fails for finding in findings)
    print(f"sizes: {len(present)} files, {failed} too long, {len(findings) - failed} warnings")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
