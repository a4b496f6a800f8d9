"""`tokenloom config` shows what a start would have, and ends as the start would."""

import json
from pathlib import Path

import pytest

from cli.config import documentation, main
from cli.flags import SERVICES, ServeConfig, refuse_disagreements, service_config
from libs.config import parse
from libs.errors import TokenloomError

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


@pytest.fixture
def shown(capsys):
    def shown(*args):
        assert main([*args, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return shown


@pytest.fixture
def file(tmp_path):
    def file(text):
        (tmp_path / "mesh.yaml").write_text(text)
        return f"--config={tmp_path}/mesh.yaml"

    return file


def test_every_value_is_shown_with_where_it_comes_from(shown, file, monkeypatch):
    monkeypatch.setenv("TOKENLOOM_MAX_NUM_SEQS", "9")
    mesh = shown(file("log-level: debug\nscheduler: {max-queue: 7}"), "--dtype=float32")
    assert (mesh["mesh"]["log_level"]["value"], mesh["mesh"]["log_level"]["source"]) == ("debug", "file")
    assert mesh["scheduler"]["max_queue"]["where"].endswith("mesh.yaml: scheduler.max-queue")
    assert mesh["worker"]["max_num_seqs"] == {"value": 9, "source": "environment", "where": "TOKENLOOM_MAX_NUM_SEQS"}
    assert mesh["worker"]["dtype"] == {"value": "float32", "source": "flag", "where": "--dtype"}
    assert mesh["gateway"]["port"] == {"value": 8000, "source": "default", "where": "default"}


def test_it_shows_every_setting_that_serve_takes_and_nothing_that_it_decides(shown):
    names = {name for settings in shown().values() for name in settings}
    assert names == set(ServeConfig.model_fields)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_alone_is_shown_with_all_it_has(shown, service):
    args = ["--model=/m"] if service == "worker" else []
    assert set(shown(service, *args)[service]) == set(SERVICES[service].model_fields)


def test_keys_and_passwords_are_hidden(shown, capsys):
    assert shown("--api-key=one,two")["gateway"]["api_key"]["value"] == ["********"] * 2
    assert shown("scheduler", "--store=redis://me:pass@h/0")["scheduler"]["store"]["value"] == "redis://me:********@h/0"
    assert main(["gateway", "--api-key=one"]) == 0
    assert "one" not in capsys.readouterr().out.replace("None", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["worker"], "--model: Field required"),
        (["--max-num-seqs=0"], "--max-num-seqs: Input should be greater than or equal to 1"),
        (["--kernels=cpu", "--dtype=float16"], "--kernels cpu and --dtype float16"),
        (["gateway", "--uds=/s", "--port=1"], "--uds and --port"),
    ],
)
def test_it_ends_with_the_message_and_code_of_the_start(args, message, capsys):
    try:
        code = main(args)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_page_for_people_shows_the_same(capsys):
    assert main(["scheduler", "--max-queue=7"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["max-queue", "7", "--max-queue"] in lines
    assert ["enable-prefix-caching", "on", "default"] in lines


def test_services_of_one_mesh_must_be_told_one_size_of_a_step(file):
    options = parse(ServeConfig, [file("worker: {max-num-seqs: 4}")], prog="tokenloom serve")
    configs = {name: service_config(config, options, model="m") for name, config in SERVICES.items()}
    with pytest.raises(TokenloomError, match=r"--max-num-seqs is one number .* 64 to the scheduler \(default\), 4 to the worker"):
        refuse_disagreements(configs)


def test_a_section_is_for_its_service_and_flags_win_over_it(file, shown):
    text = file("drain-timeout: 9\ngateway: {drain-timeout: 5}")
    assert [shown(text)[name]["drain_timeout"]["value"] for name in ("gateway", "scheduler", "tokenizer")] == [5, 9, 9]
    assert shown(text, "--drain-timeout=2")["gateway"]["drain_timeout"]["value"] == 2


@pytest.mark.parametrize("text", ["gateway: {uds: /tmp/s}", "store: x.db"])
def test_what_serve_decides_is_refused_in_a_file_too(file, text, capsys):
    assert main([file(text)]) == 2
    assert "`tokenloom serve` decides this" in capsys.readouterr().err


def test_the_documentation_is_made_of_the_fields():
    made = documentation()
    assert made in PAGE.read_text(), "run `tokenloom config --docs` and put its tables into docs/configuration.md"
    for config in SERVICES.values():
        assert all(f"| `--{name.replace('_', '-')}` |" in made for name in config.model_fields)
