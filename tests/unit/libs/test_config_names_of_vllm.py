"""Settings under the names that vLLM gives or gave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.config import parse
from services.worker.config import WorkerConfig


def backend_of(*args: str) -> str:
    return parse(WorkerConfig, ["--model", "m", *args], prog="worker").structured_outputs_config_backend


@pytest.mark.parametrize("flag", ["--structured-outputs-config.backend", "--structured-outputs-config-backend"])
def test_the_backend_of_constraints_is_given_with_a_dot_or_without(flag: str, capsys: pytest.CaptureFixture[str]):
    assert backend_of(flag, "xgrammar") == "xgrammar"
    assert not capsys.readouterr().err


def test_the_older_name_works_and_says_the_newer(capsys: pytest.CaptureFixture[str]):
    assert backend_of("--guided-decoding-backend=guidance") == "guidance"
    assert "write structured-outputs-config.backend" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["outlines", "lm-format-enforcer", "foo"])
def test_a_backend_that_is_not_built_stops_the_start(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        backend_of("--structured-outputs-config.backend", name)
    assert ("is not built here" if name != "foo" else "xgrammar") in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "structured-outputs-config:\n  backend: xgrammar\n",
        "worker:\n  structured_outputs_config:\n    backend: xgrammar\n",
        "structured-outputs-config.backend: xgrammar\n",
        "guided-decoding-backend: xgrammar\n",
    ],
)
def test_a_file_names_it_nested_or_dotted(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mesh.yaml").write_text(text)
    assert backend_of("--config", str(tmp_path / "mesh.yaml")) == "xgrammar"
    assert ("older name" in capsys.readouterr().err) == text.startswith("guided")


def test_a_mapping_with_a_key_of_nobody_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mesh.yaml").write_text("structured-outputs-config:\n  colour: red\n")
    with pytest.raises(SystemExit):
        backend_of("--config", str(tmp_path / "mesh.yaml"))
    assert "structured-outputs-config.colour: unknown setting" in capsys.readouterr().err


def test_the_environment_names_it_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKENLOOM_STRUCTURED_OUTPUTS_CONFIG_BACKEND", "guidance")
    assert backend_of() == "guidance"


@pytest.mark.parametrize(
    "name", ["awq", "awq_marlin", "cpu_awq", "gptq", "fp8", "fbgemm_fp8", "bitsandbytes", "compressed-tensors", "mxfp4", "gguf"]
)
def test_a_quantization_that_is_not_built_is_refused_by_its_name(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse(WorkerConfig, ["--model", "m", "--quantization", name], prog="worker")
    assert ended.value.code == 2
    assert f"--quantization: {name} is not built here; int8 and int4 are" in capsys.readouterr().err


def test_a_quantization_of_nobody_is_no_choice(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(WorkerConfig, ["--model", "m", "--quantization", "int5"], prog="worker")
    message = capsys.readouterr().err
    assert "'int8' or 'int4'" in message
    assert "not built here" not in message


def test_an_empty_quantization_is_told_what_stands_for_nothing(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(WorkerConfig, ["--model", "m", "--quantization="], prog="worker")
    assert "--quantization: an empty text is no form of weights; write int8, int4 or None" in capsys.readouterr().err


def test_a_quantization_of_none_is_floats():
    assert parse(WorkerConfig, ["--model", "m", "--quantization", "None"], prog="worker").quantization is None
    assert parse(WorkerConfig, ["--model", "m", "--quantization", "int4"], prog="worker").quantization == "int4"
