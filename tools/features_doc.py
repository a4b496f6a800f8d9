"""Writes docs/features.md from the marks of the tests: `python tools/features_doc.py > docs/features.md`.

    @pytest.mark.composes("prefix caching", "preemption")       a test that shows every pair of these working together
    @pytest.mark.refuses("logprobs", reason="not built yet")    a test that shows the refusal, at="request" unless at="start" is said

Arguments are strings, or `*NAMES` where the module says NAMES = ("...", ...). A mark may stand at a test, at a class, or at a module
(`pytestmark = ...`). Tests are read, not run and not imported: the page costs no model and no torch. It must be as new as the marks
(tests/unit/tools/test_features_doc.py).
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/features.md"
WHENS = ("request", "start")


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table: its name in marks, and how one asks for it or when it happens."""

    name: str
    how: str


FEATURES = (
    Feature("greedy", "`temperature` 0"),
    Feature("seed", "`seed`"),
    Feature("n", "`n` choices of a prompt"),
    Feature("prompt list", "several prompts in one completion"),
    Feature("stop strings", "`stop`"),
    Feature("penalties", "`presence_penalty`, `frequency_penalty`, `repetition_penalty`"),
    Feature("token bias", "`logit_bias`, `bad_words`, `allowed_token_ids`"),
    Feature("logits processors", "the operator's own: entry points, `--logits-processors`, `vllm_xargs`"),
    Feature("structured output", "`response_format`, `structured_outputs`, `guided_*`"),
    Feature("logprobs", "`logprobs`, `top_logprobs`, `prompt_logprobs`, `echo`"),
    Feature("tools", "`tools`, `tool_choice`"),
    Feature("reasoning", "`--reasoning-parser`"),
    Feature("streaming", "`stream`"),
    Feature("cancel", "a client leaves, at any stage"),
    Feature("deadline", "`timeout`, `--request-timeout`"),
    Feature("priority", "`priority`, with `--scheduling-policy priority`"),
    Feature("bounded queue", "`--max-queue`, `--max-queue-tokens`, windows"),
    Feature("prefix caching", "always, unless `--no-enable-prefix-caching`"),
    Feature("cache_salt", "`cache_salt`"),
    Feature("chunked prefill", "always, unless `--no-enable-chunked-prefill`"),
    Feature("preemption", "the cache is too small for all that run"),
    Feature("dispatch-ahead", "always, unless `--dispatch-margin-ms 0`"),
    Feature("leases", "`--max-lease-steps`: several decode steps in one message"),
    Feature("failed batches", "a step fails, or runs out of memory: replayed, in halves"),
    Feature("worker loss", "a worker dies, hangs or restarts: its requests are opened anew"),
    Feature("session loss", "a scheduler dies or a stream breaks: the gateway resubmits"),
    Feature("several workers", "more than one worker group"),
    Feature("several gateways", "more than one session"),
)
NOT_BUILT = (
    Feature("beam search", "`use_beam_search`"),
    Feature("images and audio", "content parts, `modalities`, `audio`"),
    Feature("LoRA", "`lora_request`, `adapter`"),
)


class MarkError(ValueError):
    """A mark says something that no page can show."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one mark says. `test`: path and name; `when` and `reason`: of a refusal, else empty."""

    features: tuple[str, ...]
    test: str
    when: str = ""
    reason: str = ""


def marks_of(path: str, source: str) -> Iterator[Claim]:
    """The claims of a test module's source. Raises MarkError naming path and line."""
    body = ast.parse(source).body
    yield from _Module(path, _tuples(body)).claims(body, path)


def _tuples(body: Iterable[ast.stmt]) -> dict[str, ast.Tuple]:
    """The tuples that a module gives names to."""
    pairs = [(ast.unparse(node.targets[0]), node.value) for node in body if isinstance(node, ast.Assign)]
    return {name: value for name, value in pairs if isinstance(value, ast.Tuple)}


@dataclass(frozen=True, slots=True)
class _Module:
    """A test module as it is read: its path, and its named tuples."""

    path: str
    tuples: dict[str, ast.Tuple]

    def claims(self, body: Iterable[ast.stmt], inside: str) -> Iterator[Claim]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                test = f"{inside}::{node.name}"
                yield from self._of_marks(node.decorator_list, test)
                if isinstance(node, ast.ClassDef):
                    yield from self.claims(node.body, test)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                value = node.value
                yield from self._of_marks(value.elts if isinstance(value, ast.List | ast.Tuple) else [value], inside)

    def _of_marks(self, nodes: Iterable[ast.expr], test: str) -> Iterator[Claim]:
        for node in nodes:
            name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            if name not in ("pytest.mark.composes", "pytest.mark.refuses"):
                continue
            where = f"{self.path}:{node.lineno}"
            if not isinstance(node, ast.Call):
                raise MarkError(f"{where}: {name} names no features")
            features = tuple(_text(argument, where) for argument in self._spread(node.args))
            options = {keyword.arg or "**": _text(keyword.value, where) for keyword in node.keywords}
            yield _claim(features, options, test, where, refuses=name.endswith("refuses"))

    def _spread(self, arguments: Iterable[ast.expr]) -> Iterator[ast.expr]:
        for argument in arguments:
            named = self.tuples.get(ast.unparse(argument.value)) if isinstance(argument, ast.Starred) else None
            yield from [argument] if named is None else named.elts


def _claim(features: tuple[str, ...], options: dict[str, str], test: str, where: str, *, refuses: bool) -> Claim:
    known = {feature.name for feature in (*FEATURES, *NOT_BUILT)}
    for feature in features:
        if feature not in known:
            raise MarkError(f"{where}: {feature!r} is no feature of tools/features_doc.py")
    if not features or len(set(features)) < len(features):
        raise MarkError(f"{where}: a mark names at least one feature, and each once")
    allowed = {"at", "reason"} if refuses else set[str]()
    if not set(options) <= allowed or options.get("at", "request") not in WHENS or (refuses and not options.get("reason")):
        raise MarkError(f"{where}: composes takes features only; refuses takes reason='...' and perhaps at='start'")
    return Claim(features, test, options.get("at", "request") if refuses else "", options.get("reason", ""))


def _text(node: ast.expr, where: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MarkError(f"{where}: a mark's arguments must be plain strings")


def collect(root: Path) -> list[Claim]:
    """The claims of all tests below `root`, in the order of their paths."""
    paths = sorted((root / "tests").rglob("test_*.py"))
    return [claim for path in paths for claim in marks_of(path.relative_to(root).as_posix(), path.read_text())]


def render(claims: Sequence[Claim]) -> str:
    """The page."""
    shown = [claim for claim in claims if not claim.when]
    refused = [claim for claim in claims if claim.when]
    pairs = {pair: [claim.test for claim in shown if set(pair) <= set(claim.features)] for pair in _pairs()}
    barred = {pair: [claim for claim in refused if set(claim.features) == set(pair)] for pair in _pairs()}
    parts = [_HEAD, _features(shown), _matrix(pairs, barred), _refusals(refused), _untested(pairs, barred), _tests(shown, pairs)]
    return "\n".join(parts)


_HEAD = """# What works together

Made from the marks of the tests by `tools/features_doc.py`; do not edit. A pair counts as working together when a test marked
`@pytest.mark.composes(...)` with both exercises them in one run and checks the result; as refused when a test marked
`@pytest.mark.refuses(...)` shows the refusal. What no test shows is listed as such, whatever the code may do.
"""
_Pair = tuple[str, str]


def _pairs() -> Iterator[_Pair]:
    names = [feature.name for feature in FEATURES]
    return itertools.combinations(names, 2)


def _features(shown: Sequence[Claim]) -> str:
    rows = ["## Features", "", "| | feature | asked for by, or happens when | tests |", "|---|---|---|---|"]
    for number, feature in enumerate(FEATURES, 1):
        tests = {claim.test for claim in shown if feature.name in claim.features}
        rows.append(f"| {number} | {feature.name} | {feature.how} | {len(tests) or 'no test yet'} |")
    return "\n".join([*rows, ""])


def _matrix(pairs: dict[_Pair, list[str]], barred: dict[_Pair, list[Claim]]) -> str:
    count = len(FEATURES)
    head = "| | " + " | ".join(str(number) for number in range(1, count)) + " |"
    rows = ["## Pairs", "", "The number of tests that show the pair; R: refused; empty: no test yet.", "", head, "|---" * count + "|"]
    for index, feature in enumerate(FEATURES[1:], 1):
        cells = []
        for other in FEATURES[:index]:
            pair = (other.name, feature.name)
            cells.append("R" if barred[pair] else str(len(pairs[pair]) or ""))
        cells += [""] * (count - 1 - index)
        rows.append(f"| {index + 1} {feature.name} | " + " | ".join(cells) + " |")
    return "\n".join([*rows, ""])


def _refusals(refused: Sequence[Claim]) -> str:
    how = {feature.name: feature.how for feature in NOT_BUILT}
    rows = ["## Refused", "", "| what | when | why | shown by |", "|---|---|---|---|"]
    by_what: dict[tuple[str, str, str], list[str]] = {}
    for claim in refused:
        what = " with ".join(f"{name} ({how[name]})" if name in how else name for name in claim.features)
        by_what.setdefault((what, claim.when, claim.reason), []).append(claim.test)
    for (what, when, reason), tests in sorted(by_what.items()):
        rows.append(f"| {what} | at the {when} | {reason} | {'<br>'.join(f'`{test}`' for test in tests)} |")
    missing = [feature.name for feature in NOT_BUILT if not any(feature.name in claim.features for claim in refused)]
    if missing:
        rows += ["", f"Not built, and no test shows the refusal yet: {', '.join(missing)}."]
    return "\n".join([*rows, ""])


def _tests(shown: Sequence[Claim], pairs: dict[_Pair, list[str]]) -> str:
    """Each test once, with a number, because one test shows many pairs."""
    numbers = {test: number for number, test in enumerate(dict.fromkeys(claim.test for claim in shown), 1)}
    rows = ["## Shown by", "", "| pair | tests |", "|---|---|"]
    for (one, other), tests in pairs.items():
        if tests:
            rows.append(f"| {one} + {other} | {', '.join(str(numbers[test]) for test in dict.fromkeys(tests))} |")
    rows += ["", "## Tests", "", *(f"{number}. `{test}`" for test, number in numbers.items())]
    return "\n".join([*rows, ""])


def _untested(pairs: dict[_Pair, list[str]], barred: dict[_Pair, list[Claim]]) -> str:
    rows = ["## No test yet", ""]
    for feature in FEATURES:
        others = [pair[1] for pair, tests in pairs.items() if pair[0] == feature.name and not tests and not barred[pair]]
        if others:
            rows.append(f"- {feature.name} with: {', '.join(others)}")
    return "\n".join([*rows, ""])


def main() -> None:
    """Prints the page; a wrong mark ends with its place."""
    try:
        sys.stdout.write(render(collect(ROOT)))
    except MarkError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
