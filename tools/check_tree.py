"""What no other checker sees: nothing generated is committed, every package says what it owns, nothing is left to do.

- Stubs (`libs/stubs`, `*_pb2*.py`) are made on install and never committed: a committed copy would drift from protos/.
- The `__init__.py` of every package has a docstring.
- No mark of unfinished work stays in the code.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

GENERATED = re.compile(r"^libs/stubs/|_pb2(_grpc)?\.pyi?$|\.so$|\.gguf$|\.safetensors$")
PACKAGES = re.compile(r"^(libs|services|cli)/(.*/)?__init__\.py$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bTBD\b|NotImplementedError\(\)")
SOURCES = re.compile(r"^(libs|services|cli|bench)/.*\.(py|cpp|h)$|^protos/.*\.proto$")


def check(path: str, text: str) -> Iterator[str]:
    """What is wrong with one tracked file, as sentences."""
    if GENERATED.search(path):
        yield f"{path}: is made by the build and must not be committed"
        return
    if PACKAGES.match(path) and not ast.get_docstring(ast.parse(text, path)):
        yield f"{path}: the package does not say what it owns (docstring)"
    if SOURCES.match(path):
        for number, line in enumerate(text.splitlines(), 1):
            if match := UNFINISHED.search(line):
                yield f"{path}:{number}: unfinished ({match[0]})"


def main() -> int:
    """Checks every tracked file; 1 when something is wrong."""
    files = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.splitlines()
    texts = ((path, Path(path).read_bytes().decode(errors="replace")) for path in files if Path(path).is_file())
    problems = [problem for path, text in texts for problem in check(path, text)]
    for problem in problems:
        print(f"error: {problem}")
    print(f"tree: {len(files)} files, {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
