"""What the pages point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
# A path in code quotes that begins with one of the project's folders: `services/gateway/app.py`.
_QUOTED = re.compile(r"`((?:services|libs|cli|tests|tools|docs|bench|protos|deploy|k8s)/[\w./-]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_and_path_of_a_page_exists(page: Path):
    text = page.read_text()
    links = [link for link in _LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in _QUOTED.findall(text) if not (ROOT / path).exists()]
    assert not missing


def test_the_pages_are_found():
    assert {"README.md", "CONTRIBUTING.md", "ownership.md", "api.md"} <= {page.name for page in PAGES}
