"""What a mutation is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule of PROTOCOL.md that is broken by replacing `before` by `after` in a file of `package` (a folder of services/).

    `drive`: the module below tests.property that must notice. `quick`: part of the ordinary suite.
    """

    name: str
    rule: str
    file: str
    before: str
    after: str
    quick: bool = False
    package: str = "scheduler/core"
    drive: str = "core_drive"

    @property
    def path(self) -> Path:
        """The file, relative to the repository."""
        return Path("services") / self.package / f"{self.file}.py"

    def apply(self, root: Path) -> None:
        """Edits the file below `root`. Raises ValueError when the code it is about is not there exactly once."""
        text = (root / self.path).read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: its code is {text.count(self.before)} times in {self.path}")
        (root / self.path).write_text(text.replace(self.before, self.after))
