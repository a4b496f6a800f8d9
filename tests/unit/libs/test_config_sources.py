"""Where settings come from: a file under the environment under the flags, and what stops a start."""

from typing import ClassVar

import pytest
from pydantic import Field

from libs.config import ServiceConfig, parse
from libs.config.concerns import StepSettings
from libs.config.environment import without_settings
from libs.config.found import Source
from libs.config.settings import Amount


class ExampleConfig(StepSettings, ServiceConfig):
    """A scheduler, by its section; it knows a few of its settings."""

    section: ClassVar[str] = "scheduler"

    enable_prefix_caching: bool = Field(True, description="Caching.")
    worker_address: list[str] = Field(default_factory=list, description="Addresses.")
    max_queue_tokens: Amount | None = Field(None, description="Tokens.")


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "mesh.yaml"
        path.write_text(text)
        return f"--config={path}"

    return write


@pytest.fixture
def refusal(capsys):
    def refusal(*args, config=ExampleConfig):
        with pytest.raises(SystemExit) as ended:
            parse(config, args, prog="example")
        assert ended.value.code == 2
        return capsys.readouterr().err

    return refusal


def read(*args):
    return parse(ExampleConfig, args, prog="example")


@pytest.mark.parametrize(
    ("name", "in_file", "in_environment", "flag", "values"),
    [
        ("max_num_seqs", "2", "3", "--max-num-seqs=4", (64, 2, 3, 4)),
        ("enable_prefix_caching", "false", "true", "--no-enable-prefix-caching", (True, False, True, False)),
        ("worker_address", "[a, b]", "c,d", "--worker-address=e", ([], ["a", "b"], ["c", "d"], ["e"])),
        ("log_level", "debug", "warning", "--log-level=error", ("info", "debug", "warning", "error")),
    ],
)
def test_default_then_file_then_environment_then_flag(write, monkeypatch, name, in_file, in_environment, flag, values):
    seen, sources = [getattr(read(), name)], [read().found(name).source]
    file = write(f"{name}: {in_file}")
    steps = [(file,), (file,), (file, flag)]
    for index, args in enumerate(steps):
        if index == 1:
            monkeypatch.setenv(f"TOKENLOOM_{name.upper()}", in_environment)
        config = read(*args)
        seen.append(getattr(config, name))
        sources.append(config.found(name).source)
    assert tuple(seen) == values
    assert sources == [Source.DEFAULT, Source.FILE, Source.ENVIRONMENT, Source.FLAG]


def test_the_file_may_be_named_by_the_environment(write, monkeypatch):
    monkeypatch.setenv("TOKENLOOM_CONFIG", write("max-num-seqs: 5").removeprefix("--config="))
    assert read().max_num_seqs == 5


def test_dashes_and_underscores_and_vllms_names_are_the_same_key(write):
    assert read(write("max-num-seqs: 5\notlp-traces-endpoint: [http://x:4317]")).otlp_endpoint == ["http://x:4317"]
    assert read(write("max_num_seqs: 5")).max_num_seqs == 5
    assert read("--otlp-traces-endpoint=http://y:4317").otlp_endpoint == ["http://y:4317"]


def test_a_section_wins_over_the_shared_keys_and_other_sections_are_for_others(write):
    config = read(write("max-num-seqs: 5\nlog-level: debug\nscheduler: {max-num-seqs: 6}\nworker: {max-num-seqs: 7}\ngateway:"))
    assert (config.max_num_seqs, config.log_level) == (6, "debug")
    assert config.found("max_num_seqs").where.endswith("mesh.yaml: scheduler.max-num-seqs")


def test_a_shared_key_of_a_sibling_is_not_this_services_business(write):
    assert read(write("port: 8080\ndtype: float32")).max_num_seqs == 64


def test_an_empty_file_sets_nothing(write):
    assert read(write("# nothing yet\n")).model_fields_set == {"config"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 5", "mesh.yaml: max-num-seq: unknown setting; did you mean max-num-seqs?"),
        ("schedular: {}", "mesh.yaml: schedular: unknown setting; did you mean scheduler?"),
        ("worker: {max-num-seq: 5}", "mesh.yaml: worker.max-num-seq: unknown setting; did you mean max-num-seqs?"),
        ("worker: {max-queue: 5}", "mesh.yaml: worker.max-queue: unknown setting; it is a setting of the scheduler"),
        ("max-num-seqs: many", "mesh.yaml: max-num-seqs: Input should be a valid integer"),
        ("scheduler: {max-num-seqs: 0}", "mesh.yaml: scheduler.max-num-seqs: Input should be greater than or equal to 1"),
        ("max-num-seqs: true", "mesh.yaml: max-num-seqs: true is a truth value"),
        ("instance: 7", "mesh.yaml: instance: Input should be a valid string (write it in quotes)"),
        ("worker-address: [a, 7]", "mesh.yaml: worker-address[1]: Input should be a valid string"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "mesh.yaml: max_num_seqs: the same setting as max-num-seqs"),
        ("max-num-seqs: 1\nmax-num-seqs: 2", "mesh.yaml:2: max-num-seqs stands here a second time"),
        ("config: other.yaml", "mesh.yaml: config: a settings file cannot name another"),
        ("worker: 3", "mesh.yaml: worker: a section holds `key: value`, not a int"),
        ("- max-num-seqs", "mesh.yaml: settings are written `key: value`, not as a list"),
        ("a: [", "mesh.yaml:1: "),
        (f"instance: {'[' * 3000}", "mesh.yaml: it is nested too deeply"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_file_and_key(write, refusal, text, message):
    assert message in refusal(write(text))


def test_a_file_that_is_not_there_is_an_error_of_the_flag(refusal):
    assert "--config /no/such.yaml: No such file or directory" in refusal("--config=/no/such.yaml")


def test_every_problem_is_told_at_once_and_with_where_it_stands(write, monkeypatch, refusal):
    monkeypatch.setenv("TOKENLOOM_METRICS_PORT", "-1")
    told = refusal(write("max-num-seqs: 0"), "--log-level=loud").splitlines()
    assert len(told) == 3
    assert any(line.startswith("example: error: TOKENLOOM_METRICS_PORT: ") for line in told)
    assert any(line.startswith("example: error: --log-level: ") for line in told)


def test_a_siblings_variable_is_no_error_and_a_typo_is_one_for_everybody(monkeypatch, refusal):
    for name, value in {"MAX_MODEL_LEN": "5", "CACHE": "/tmp", "RUN_DIR": "/tmp", "PARENT_PID": "1"}.items():
        monkeypatch.setenv(f"TOKENLOOM_{name}", value)
    assert read().max_num_seqs == 64
    monkeypatch.setenv("TOKENLOOM_MAX_MODEL_LENGTH", "5")
    assert "TOKENLOOM_MAX_MODEL_LENGTH: no service has this setting; did you mean TOKENLOOM_MAX_MODEL_LEN?" in refusal()
    monkeypatch.delenv("TOKENLOOM_MAX_MODEL_LENGTH")
    monkeypatch.setenv("TOKENLOOM_FOO", "5")
    assert refusal().endswith("TOKENLOOM_FOO: no service has this setting\n"), "the prefix alone makes no two names alike"


def test_an_empty_variable_is_not_set_save_for_a_list(write, monkeypatch):
    monkeypatch.setenv("TOKENLOOM_MAX_NUM_SEQS", "")
    monkeypatch.setenv("TOKENLOOM_METRICS_HOST", "")
    monkeypatch.setenv("TOKENLOOM_WORKER_ADDRESS", "")
    config = read(write("worker-address: [a]"))
    assert (config.max_num_seqs, config.metrics_host, config.worker_address) == (64, "127.0.0.1", [])


def test_links_of_kubernetes_are_ignored_unless_they_stand_where_a_setting_does(monkeypatch, refusal):
    monkeypatch.setenv("TOKENLOOM_UI_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("TOKENLOOM_UI_SERVICE_PORT_HTTP", "80")
    monkeypatch.setenv("TOKENLOOM_UI_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("TOKENLOOM_UI_PORT_80_TCP_ADDR", "10.0.0.1")
    assert read().max_num_seqs == 64
    monkeypatch.setenv("TOKENLOOM_METRICS_PORT", "tcp://10.0.0.1:80")
    told = refusal()
    assert "enableServiceLinks: false" in told
    assert "a Service here is called tokenloom-metrics" in told


def test_a_typo_of_a_flag_is_told_what_it_meant(refusal):
    assert "did you mean --max-num-seqs?" in refusal("--max-num-seq", "4")
    assert "it is a setting of the gateway" in refusal("--port=4")


@pytest.mark.parametrize(("typed", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5m", 1_500_000), ("2G", 2 << 30)])
def test_amounts_are_written_as_vllm_writes_them(typed, value):
    assert read(f"--max-queue-tokens={typed}").max_queue_tokens == value


def test_an_amount_in_binary_units_takes_no_fraction(refusal):
    assert "--max-queue-tokens: K counts in 1024s and takes no fraction; k does" in refusal("--max-queue-tokens=1.5K")


def test_a_class_that_is_constructed_reads_no_environment(monkeypatch):
    monkeypatch.setenv("TOKENLOOM_MAX_NUM_SEQS", "3")
    assert ExampleConfig().max_num_seqs == 64


def test_a_process_that_is_told_all_by_flag_inherits_no_setting():
    given = {"TOKENLOOM_UDS": "x", "TOKENLOOM_CONFIG": "y", "TOKENLOOM_CACHE": "z", "PATH": "p"}
    assert without_settings(given) == {"TOKENLOOM_CACHE": "z", "PATH": "p"}
