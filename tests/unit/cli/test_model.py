import pytest
from typer.testing import CliRunner

from cli.main import app
from libs.models import catalog
from libs.models.directory import ModelDirectory
from tests.support.tiny_llama import make_tiny_llama


@pytest.fixture
def models(tmp_path):
    make_tiny_llama(tmp_path / "models" / "mine")
    return tmp_path / "models"


def run(*arguments, **env):
    return CliRunner().invoke(app, ["model", "import", *map(str, arguments)], env={"MODEL": None, "MODELS_DIR": None} | env)


def test_it_imports_what_the_environment_names_and_says_so(models, tmp_path):
    target = tmp_path / "volume" / "served"
    result = run("--to", target, MODEL="mine", MODELS_DIR=str(models))
    assert result.exit_code == 0
    assert f"mine imported into {target}" in result.stderr
    assert ModelDirectory(target).config


def test_a_second_time_it_says_that_the_model_is_there(models, tmp_path):
    target = tmp_path / "served"
    assert run("mine", "--to", target, "--models", models).exit_code == 0
    again = run("mine", "--to", target, "--models", models)
    assert again.exit_code == 0
    assert f"mine is already at {target}" in again.stderr


def test_what_cannot_be_served_is_told_from_what_may_work_later(models, tmp_path, monkeypatch):
    unknown = run("nothing", "--to", tmp_path / "served", "--models", models)
    assert unknown.exit_code == 2
    assert "error: 'nothing' is neither" in unknown.stderr

    def unreachable(*_args, **_kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(catalog.huggingface_hub, "snapshot_download", unreachable)
    away = run("org/model", "--to", tmp_path / "served", "--models", models)
    assert away.exit_code == 1
    assert "cannot be reached" in away.stderr


def test_files_that_only_their_owner_may_read_are_told_with_what_helps(models, tmp_path, monkeypatch):
    def refused(source, _place):
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr("libs.models.served.shutil.copyfile", refused)
    result = run("mine", "--to", tmp_path / "served", "--models", models)
    assert result.exit_code == 1
    assert "Permission denied" in result.stderr
    assert "chmod -R a+rX" in result.stderr


def test_a_target_that_cannot_be_written_is_an_error_on_one_line(models, tmp_path):
    (tmp_path / "file").touch()
    result = run("mine", "--to", tmp_path / "file" / "served", "--models", models)
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
