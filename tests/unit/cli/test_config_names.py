"""The list of all settings' names is that of the classes, and everything that deploys the mesh uses names on it."""

import re
from pathlib import Path

import pytest

from cli.flags import SERVICES, ServeConfig
from libs.config import ServiceConfig
from libs.config.names import ALIASES, OTHER_VARIABLES, SERVE_SETTINGS, SERVICE_SETTINGS, all_names
from libs.config.settings import ENV_PREFIX, variable_of

ROOT = Path(__file__).parents[3]
DEPLOYED = [
    path
    for pattern in ("docker-compose*.yml", ".env", "deploy/**/*", "k8s/**/*.yaml")
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and path.suffix not in (".whl", ".pyc")
]


@pytest.mark.parametrize("service", SERVICES)
def test_the_names_of_a_service_are_those_of_its_class(service):
    assert set(SERVICES[service].model_fields) == SERVICE_SETTINGS[service], "correct libs/config/names.py"


def test_every_setting_of_serve_is_on_the_list():
    own = set(ServeConfig.model_fields) - {name for names in SERVICE_SETTINGS.values() for name in names}
    assert own == SERVE_SETTINGS, "correct libs/config/names.py"


def test_every_service_reads_its_own_section():
    assert [config.section for config in SERVICES.values()] == list(SERVICES)


def test_an_alias_is_another_name_for_a_setting_and_no_setting_itself():
    assert set(ALIASES.values()) <= all_names()
    assert not set(ALIASES) & all_names()


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_has_docs_and_every_concern_a_title(service):
    config: type[ServiceConfig] = SERVICES[service]
    assert all(info.description for info in config.model_fields.values())
    assert sorted(name for group in config.groups() for name in group.fields) == sorted(config.model_fields)
    assert all(group.title for group in config.groups())


@pytest.mark.parametrize("path", DEPLOYED, ids=[str(path.relative_to(ROOT)) for path in DEPLOYED])
def test_what_deploys_the_mesh_sets_only_variables_that_somebody_reads(path):
    known = {*map(variable_of, all_names()), *OTHER_VARIABLES}
    assert set(re.findall(rf"\b{ENV_PREFIX}[A-Z0-9_]+\b", path.read_text(errors="ignore"))) <= known
