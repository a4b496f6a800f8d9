"""The project's own checkers."""

import pytest

from tools.check_sizes import Finding
from tools.check_sizes import check as check_size
from tools.check_tree import check as check_tree
from tools.requirement import requirement


def function(lines):
    return "def long():\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(("lines", "fails"), [(50, None), (51, False), (80, False), (81, True)])
def test_a_function_warns_over_50_lines_and_fails_over_80(lines, fails):
    findings = [finding.fails for finding in check_size("a.py", function(lines))]
    assert findings == ([] if fails is None else [fails])


@pytest.mark.parametrize(("lines", "fails"), [(400, None), (401, False), (600, False), (601, True)])
@pytest.mark.parametrize("path", ["a.py", "kernel.cpp", "a.proto"])
def test_a_file_warns_over_400_lines_and_fails_over_600(path, lines, fails):
    findings = [finding.fails for finding in check_size(path, "x = 1\n" * lines)]
    assert findings == ([] if fails is None else [fails])


def test_a_finding_names_its_place():
    (finding,) = check_size("a.py", "\n" + function(90).replace("def", "async def"))
    assert str(finding) == str(Finding("a.py:2 long", 90, 80, True)) == "error: a.py:2 long: 90 lines (over 80)"


@pytest.mark.parametrize(
    "head", ["int long_one(int a) {", "template <int N>\nvoid long_one(int a,\n        int b) {", "A::long_one(int a)\n    : a_(a) {"]
)
@pytest.mark.parametrize(("lines", "fails"), [(50, None), (51, False), (80, False), (81, True)])
def test_a_function_of_cpp_is_measured_as_one_of_python(head, lines, fails):
    lines -= head.count("\n") - head.count("template")
    text = f"namespace {{\n\nint f() {{ return 1; }}\nint g(int);\n\n{head}\n" + "    x = 1;\n" * (lines - 2) + "}\n\n}  // namespace\n"
    findings = list(check_size("kernel.h", text))
    assert [finding.fails for finding in findings] == ([] if fails is None else [fails])
    assert all("long_one" in finding.place for finding in findings)


@pytest.mark.parametrize(("columns", "found"), [(140, 0), (141, 1)])
def test_lines_of_cpp_have_at_most_140_columns(columns, found):
    assert len(list(check_size("kernel.h", "x" * columns + "\n"))) == found
    assert list(check_size("a.py", "x" * columns + " = 1\n")) == []


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("libs/stubs/tokenloom/__init__.py", '"""Made."""', "must not be committed"),
        ("other/worker_pb2_grpc.py", "", "must not be committed"),
        ("services/worker/library.so", "", "must not be committed"),
        ("services/new/__init__.py", "", "does not say what it owns"),
        ("libs/a.py", "x = 1  # TO" + "DO: more", "unfinished"),
        ("protos/a.proto", "// T" + "BD", "unfinished"),
    ],
)
def test_what_must_not_be_in_the_tree_is_found(path, text, words):
    (problem,) = check_tree(path, text)
    assert words in problem


@pytest.mark.parametrize(
    ("path", "text"),
    [("libs/a.py", "x = 1"), ("libs/a/__init__.py", '"""Owns a."""'), ("tests/unit/__init__.py", ""), ("docs/a.md", "TO" + "DO")],
)
def test_ordinary_files_pass(path, text):
    assert list(check_tree(path, text)) == []


def test_a_requirement_is_found_in_dependencies_and_extras():
    pyproject = """
[project]
dependencies = ["grpcio-status>=1", "grpcio>=2"]
[project.optional-dependencies]
worker = ["torch>=2.11,<2.14"]
"""
    assert requirement("torch", pyproject) == "torch>=2.11,<2.14"
    assert requirement("grpcio", pyproject) == "grpcio>=2"
    with pytest.raises(KeyError):
        requirement("numpy", pyproject)
