"""The page of features says what the tests' marks say, and no mark can say what the page cannot show."""

from __future__ import annotations

import pytest

from tools.features_doc import FEATURES, NOT_BUILT, PAGE, ROOT, Claim, MarkError, collect, marks_of, render

MODULE = """
import pytest
pytestmark = [pytest.mark.e2e, pytest.mark.composes("n", "seed")]

@pytest.mark.composes("cancel")
@pytest.mark.parametrize("x", [1])
async def test_one(x): ...

BOTH = ("seed", "stop strings")

@pytest.mark.composes(*BOTH, "cancel")
def test_spread(): ...

@pytest.mark.refuses("n", "greedy", reason="all choices are equal")
def test_two(): ...

@pytest.mark.composes("preemption", "prefix caching")
class TestThree:
    @pytest.mark.refuses("logprobs", at="start", reason="not built yet")
    def test_inner(self): ...

def test_unmarked(): ...
"""


def test_marks_are_found_at_modules_classes_and_functions():
    assert list(marks_of("tests/test_a.py", MODULE)) == [
        Claim(("n", "seed"), "tests/test_a.py"),
        Claim(("cancel",), "tests/test_a.py::test_one"),
        Claim(("seed", "stop strings", "cancel"), "tests/test_a.py::test_spread"),
        Claim(("n", "greedy"), "tests/test_a.py::test_two", "request", "all choices are equal"),
        Claim(("preemption", "prefix caching"), "tests/test_a.py::TestThree"),
        Claim(("logprobs",), "tests/test_a.py::TestThree::test_inner", "start", "not built yet"),
    ]


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ('composes("chunked prefil")', "no feature"),
        ("composes", "names no features"),
        ("composes()", "at least one"),
        ('composes("n", "n")', "each once"),
        ('composes("n", reason="x")', "features only"),
        ("composes(NAME)", "plain strings"),
        ("composes(*NAMES)", "plain strings"),
        ('refuses("n")', "reason"),
        ('refuses("n", reason="")', "reason"),
        ('refuses("n", reason="x", at="night")', "reason"),
        ('refuses("n", **more)', "plain strings"),
    ],
)
def test_a_wrong_mark_is_refused_with_its_place(mark, words):
    with pytest.raises(MarkError, match=words) as caught:
        list(marks_of("tests/test_a.py", f"import pytest\n\n@pytest.mark.{mark}\ndef test_a(): ...\n"))
    assert str(caught.value).startswith("tests/test_a.py:3: ")


def row_of(page: str, start: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_test_of_three_features_shows_three_pairs():
    page = render([Claim(("greedy", "seed", "n"), "t::a"), Claim(("seed", "n"), "t::b")])
    assert row_of(page, "| 3 n |")[:3] == ["3 n", "1", "2"]
    assert row_of(page, "| seed + n |") == ["seed + n", "1, 2"]
    assert page.endswith("1. `t::a`\n2. `t::b`\n")
    assert row_of(page, "| 2 | seed |")[-1] == "2"
    assert row_of(page, "| 4 | prompt list |")[-1] == "no test yet"


def test_what_no_test_shows_is_listed_and_what_is_refused_is_not():
    page = render([Claim(("greedy", "n"), "t::a", "request", "all equal"), Claim(("greedy", "seed"), "t::b")])
    assert row_of(page, "| 3 n |")[1] == "R"
    assert row_of(page, "| greedy with n |") == ["greedy with n", "at the request", "all equal", "`t::a`"]
    (untested,) = [line for line in page.splitlines() if line.startswith("- greedy with: ")]
    assert untested.removeprefix("- greedy with: ").split(", ") == [feature.name for feature in FEATURES[3:]]


def test_every_pair_is_shown_refused_or_untested():
    claims = collect(ROOT)
    page = render(claims)
    shown = page.count(" + ")
    barred = sum(row_of(page, f"| {number} {feature.name} |").count("R") for number, feature in enumerate(FEATURES[1:], 2))
    untested = sum(line.count(", ") + 1 for line in page.split("## No test yet")[1].split("## ")[0].splitlines() if line.startswith("- "))
    assert shown + untested <= len(FEATURES) * (len(FEATURES) - 1) // 2 <= shown + barred + untested


def test_features_have_one_name_each():
    names = [feature.name for feature in (*FEATURES, *NOT_BUILT)]
    assert len(set(names)) == len(names)


def test_every_feature_has_a_test_and_all_that_is_not_built_a_refusal():
    claims = collect(ROOT)
    shown = {name for claim in claims if not claim.when for name in claim.features}
    refused = {name for claim in claims if claim.when for name in claim.features}
    assert {feature.name for feature in FEATURES} <= shown
    assert {feature.name for feature in NOT_BUILT} <= refused


def test_the_page_is_as_new_as_the_marks():
    assert (ROOT / PAGE).read_text() == render(collect(ROOT)), f"run: python tools/features_doc.py > {PAGE}"
