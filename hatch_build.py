"""Build hook: generates the gRPC stubs from protos/ into libs/stubs/, as the top-level package `tokenloom`.

Also a command: `python hatch_build.py` (what `make protos` calls). The stubs are never committed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a command where hatchling is not installed
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> list[Path]:
    """Compiles every .proto below root/protos; returns the generated directory's files.

    Raises subprocess.CalledProcessError with protoc's own message on stderr when a file does not compile.
    """
    source, target = root / "protos", root / "libs" / "stubs"
    files = sorted(str(path.relative_to(source)) for path in source.rglob("*.proto"))
    staging = target.with_name("stubs.new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    outputs = ("python", "grpc_python", "mypy", "mypy_grpc")
    tools = str(Path(sys.executable).parent)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{source}", *(f"--{kind}_out={staging}" for kind in outputs), *files]
    subprocess.run(command, check=True, env={**os.environ, "PATH": f"{tools}:{os.environ.get('PATH', '')}"})
    for folder in [staging / "tokenloom", *(p for p in (staging / "tokenloom").rglob("*") if p.is_dir())]:
        (folder / "__init__.py").write_text('"""Generated from protos/ by hatch_build.py; do not edit."""\n')
    (staging / "tokenloom" / "py.typed").touch()
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    return sorted(target.rglob("*"))


class StubsHook(BuildHookInterface):
    """Runs `generate` before hatchling collects files, for wheels and for editable installs alike."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See BuildHookInterface. An editable install reads libs/stubs in place, so that `make protos` takes effect at once."""
        generate(Path(self.root))
        if self.target_name == "wheel" and version != "editable":
            build_data["force_include"][str(Path(self.root) / "libs" / "stubs" / "tokenloom")] = "tokenloom"


if __name__ == "__main__":
    print(f"generated {sum(path.suffix == '.py' for path in generate())} modules in libs/stubs")
