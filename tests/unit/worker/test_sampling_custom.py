"""The operator's logits processors: found, ordered, refused at the start; and what their failures cost."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from libs.errors import ErrorCode, TokenloomError
from libs.sampling import SamplingParams
from services.worker.config import WorkerConfig
from services.worker.metrics import WorkerMetrics
from services.worker.sampling.custom import CustomProcessor, join_request, load_processors
from services.worker.sampling.sampler import sample
from services.worker.slots import SlotTable
from services.worker.step_inputs import build_sampling
from services.worker.steps import Steps
from tests.unit.worker.helpers import GREEDY, LIMITS, batch, load_engine, opening, row
from tokenloom.worker.v1 import worker_pb2

PAGE = Path(__file__).parents[3] / "docs" / "logits-processors.md"
CPU = torch.device("cpu")
VOCABULARY = 90


def install(site: Path, package: str, version: str, module: str, source: str, points: str) -> None:
    """What an installer leaves: the module and its metadata."""
    site.mkdir(exist_ok=True)
    (site / f"{module}.py").write_text(source)
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[tokenloom.logits_processors]\n{points}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that packages are found in; their modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def make(site: Path, module: str, body: str) -> None:
    (site / f"{module}.py").write_text(body)


def example() -> tuple[str, str]:
    """The page's module and the entry points of its pyproject.toml."""
    text = PAGE.read_text()
    module = re.search(r"```python\n(.*?)```", text, re.S)
    points = re.search(r'\[project\.entry-points\."tokenloom\.logits_processors"\]\n(.*?)\n```', text, re.S)
    assert module
    assert points
    return module[1], points[1].replace('"', "")


def test_the_documented_example_runs_from_an_installed_package_and_does_what_transformers_does(site: Path):
    install(site, "no_repeats", "1.0", "no_repeats", *example())
    (loaded,) = load_processors([], VOCABULARY, CPU)
    assert loaded.name == "no_repeats (no_repeats 1.0)"
    generator = np.random.default_rng(3)
    forbidden = 0
    for size in (1, 2, 3):
        params = replace(GREEDY, extra_args_json=b'{"no_repeat_ngram_size": %d}' % size)
        (joined,) = join_request([loaded], params)
        for length in (1, 2, 3, 40):
            ids = generator.integers(0, 4, length).astype(np.int32)
            logits = torch.randn(VOCABULARY)
            theirs = NoRepeatNGramLogitsProcessor(size)(torch.from_numpy(ids)[None].long(), logits[None].clone())[0]
            joined.process(ids[: length // 2], ids[length // 2 :], logits)
            assert torch.equal(logits, theirs)
            forbidden += int(torch.isinf(logits).sum())
    assert forbidden > 5
    assert join_request([loaded], GREEDY) == ()


def test_entry_points_run_by_name_then_flags_as_they_are_given(site: Path):
    source = "def factory(vocab_size, device):\n    return lambda params, extra_args: None\n"
    install(site, "late", "2.1", "late_module", source, "b = late_module:factory\nd = late_module:factory")
    install(site, "early", "0.3", "early_module", source, "c = early_module:factory\na = early_module:factory")
    make(site, "by_flag", source)
    names = [item.name for item in load_processors(["by_flag:factory", "early_module:factory"], VOCABULARY, CPU)]
    assert names == ["a (early 0.3)", "b (late 2.1)", "c (early 0.3)", "d (late 2.1)", "by_flag:factory", "early_module:factory"]


def test_a_factory_is_told_the_vocabulary_and_the_device(site: Path):
    make(site, "telling", "def factory(vocab_size, device):\n    assert (vocab_size, device.type) == (90, 'cpu')\n    return print\n")
    assert [item.processor for item in load_processors(["telling:factory"], VOCABULARY, CPU)] == [print]


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("absent_module:factory", "No module named 'absent_module'"),
        ("broken_ones:missing", "has no attribute 'missing'"),
        ("broken_ones:raising", "RuntimeError: no licence"),
        ("broken_ones:giving_nothing", "it gave a NoneType, no callable"),
        ("broken_ones:taking_nothing", "unexpected keyword argument"),
    ],
)
def test_one_that_cannot_be_made_stops_the_start_by_name(site: Path, flag: str, reason: str):
    make(
        site,
        "broken_ones",
        "def raising(**_):\n    raise RuntimeError('no licence')\n\n"
        "def giving_nothing(**_):\n    pass\n\n"
        "def taking_nothing():\n    pass\n",
    )
    with pytest.raises(TokenloomError, match=re.escape(reason)) as caught:
        load_processors([flag], VOCABULARY, CPU)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert flag in caught.value.message


def test_two_of_one_name_are_refused(site: Path):
    install(site, "one", "1", "one_module", "", "same = one_module:first")
    install(site, "two", "1", "two_module", "", "same = two_module:second")
    with pytest.raises(TokenloomError, match=r"two logits processors are called same \(one_module:first, two_module:second\)"):
        load_processors([], VOCABULARY, CPU)


@pytest.mark.parametrize("value", ["module", "module:", ":name", "module/name:thing", "a:b:c"])
def test_a_flag_that_names_no_factory_is_refused(value: str, tmp_path: Path):
    with pytest.raises(ValueError, match="write module:name"):
        WorkerConfig(model=tmp_path, logits_processors=[value])


class Scripted:
    """Does to a row what the request's extra arguments say."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []

    def __call__(self, params: SamplingParams, extra_args: dict[str, Any]) -> Any:
        wanted = extra_args.get("do")
        if wanted == "raise at opening":
            raise ValueError("not this one")
        return None if wanted is None else lambda prompt, output, logits: self.run(wanted, prompt, output, logits)

    def run(self, wanted: str, prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor | None:
        self.seen.append((prompt.tolist(), output.tolist()))
        match wanted:
            case "raise":
                logits[:] = 7.0
                raise KeyError("mine")
            case "return":
                return logits + 1
            case "nan":
                logits[3] = float("nan")
            case "infinity":
                logits[3] = float("inf")
            case "nothing left":
                logits[:] = float("-inf")
            case "write to the prompt":
                prompt[0] = 4
            case "prefer":
                logits[50] = 1000.0
        return None


def asking(what: str) -> SamplingParams:
    return replace(GREEDY, extra_args_json=b'{"do": "%s"}' % what.encode())


def run(*requests: SamplingParams, finite: bool = True) -> tuple[Any, Scripted]:
    """One step of requests with the prompt [5, 6] and the output [7]; the best id is 0."""
    scripted = Scripted(VOCABULARY, CPU)
    slots = SlotTable(LIMITS, (2,), [CustomProcessor("scripted", scripted)])
    opens = [opening(index, [5, 6], output=[7], sampling=params) for index, params in enumerate(requests)]
    staged = slots.stage(batch(*[row(index, 3, blocks=[index]) for index in range(len(requests))], opens=opens))
    logits = torch.linspace(4.0, -4.0, VOCABULARY).repeat(len(requests), 1)
    if not finite:
        logits[0] = float("nan")
    return sample(logits, build_sampling(staged.rows, VOCABULARY), VOCABULARY), scripted


@pytest.mark.parametrize("trouble", ["raise at opening", "raise", "return", "nan", "infinity", "write to the prompt"])
def test_what_goes_wrong_in_a_processor_fails_its_row_alone_and_is_logged_with_its_name(trouble: str, capfd: pytest.CaptureFixture[str]):
    sampled, _ = run(GREEDY, asking(trouble), asking("prefer"))
    assert sampled.failed.tolist() == [False, True, False]
    assert not sampled.dead.any()
    assert sampled.tokens[[0, 2]].tolist() == [0, 50]
    logged = capfd.readouterr()
    assert "scripted" in logged.out + logged.err


def test_a_processor_that_forbids_everything_is_a_dead_end():
    sampled, _ = run(asking("nothing left"), GREEDY)
    assert sampled.dead.tolist() == [True, False]
    assert not sampled.failed.any()


def test_a_processor_sees_prompt_and_output_apart():
    _, scripted = run(asking("prefer"))
    assert scripted.seen == [([5, 6], [7])]


def test_a_processor_is_not_shown_logits_that_are_not_finite():
    sampled, scripted = run(asking("raise"), GREEDY, finite=False)
    assert sampled.finite.tolist() == [False, True]
    assert not sampled.failed.any()
    assert scripted.seen == []


@pytest.mark.composes("logits processors", "greedy")
def test_a_worker_runs_them_names_them_and_answers_for_the_failed_row_alone(tiny_llama_dir: Path):
    engine = load_engine(tiny_llama_dir, logits_processors=[f"{__name__}:Scripted"])
    assert list(engine.facts.logits_processors) == [f"{__name__}:Scripted"]
    steps = Steps(engine, WorkerMetrics(), lambda _span: None)
    opens = [opening(slot, [5, 6, 7], sampling=params) for slot, params in enumerate((asking("prefer"), asking("raise")))]
    first = steps.run(batch(row(0, 3, blocks=[0]), row(1, 3, blocks=[1]), opens=opens), 0).result
    assert list(first.row_outcomes) == [worker_pb2.ROW_OUTCOME_OK, worker_pb2.ROW_OUTCOME_FAILED]
    assert list(first.token_counts) == [1, 0]
    assert np.frombuffer(first.token_ids, "<u4").tolist() == [50]
    second = steps.run(batch(row(0), number=2), 0).result
    assert np.frombuffer(second.token_ids, "<u4").tolist() == [50]


def test_arguments_that_a_processor_refuses_with_a_value_error_are_the_clients_fault(tiny_llama_dir: Path):
    engine = load_engine(tiny_llama_dir, logits_processors=[f"{__name__}:choosy"])
    steps = Steps(engine, WorkerMetrics(), lambda _span: None)
    asked = [replace(GREEDY, extra_args_json=b'{"choosy": %s}' % value) for value in (b"1", b"-1", b'"x"')]
    opens = [opening(slot, [5, 6, 7], sampling=params) for slot, params in enumerate(asked)]
    rows = [row(slot, 3, blocks=[slot]) for slot in range(3)]
    outcomes = list(steps.run(batch(*rows, opens=opens), 0).result.row_outcomes)
    assert outcomes == [worker_pb2.ROW_OUTCOME_OK, worker_pb2.ROW_OUTCOME_REFUSED_ARGS, worker_pb2.ROW_OUTCOME_FAILED]


def choosy(vocab_size: int, device: torch.device) -> Any:
    """A processor that takes numbers of at least 0, and breaks on what is no number."""

    def join(params: SamplingParams, extra_args: dict[str, Any]) -> Any:
        if "choosy" in extra_args and extra_args["choosy"] < 0:
            raise ValueError("choosy must be at least 0")

    return join
