"""The YAML file that --config names: keys for every service at its top, and one section for each service."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from libs.config.found import Found, Source
from libs.config.names import ALIASES, RENAMED, SERVICE_SETTINGS, all_names, belongs_to, suggestion, warn_renamed
from libs.errors import ErrorCode, TokenloomError


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A file that was read and whose every key is some service's: settings by field name, at the top and by section."""

    path: str
    shared: Mapping[str, Found]
    sections: Mapping[str, Mapping[str, Found]]

    def of(self, section: str) -> dict[str, Found]:
        """What the file says to a service: the shared keys, and over them its own section's."""
        return {**self.shared, **self.sections.get(section, {})}


def read_file(path: str) -> SettingsFile:
    """Reads and checks a settings file.

    Raises TokenloomError (INVALID_REQUEST) that names the file and the line or key: unreadable, no YAML, a key twice or of no service.
    """
    content = _load(path)
    shared: dict[str, Any] = {}
    sections: dict[str, Mapping[str, Found]] = {}
    for key, value in content.items():
        if key in SERVICE_SETTINGS:
            sections[key] = _section(path, key, value)
        else:
            shared[key] = value
    return SettingsFile(path, _settings(path, "", shared), sections)


def _load(path: str) -> Mapping[Any, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _refused(f"--config {path}: {reason}") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _refused(f"{path}{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise _refused(f"{path}: {error}") from None
    except RecursionError:
        raise _refused(f"{path}: it is nested too deeply to be settings") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise _refused(f"{path}: settings are written `key: value`, not as a {type(content).__name__}")
    return content


def _section(path: str, service: str, value: Any) -> Mapping[str, Found]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _refused(f"{path}: {service}: a section holds `key: value`, not a {type(value).__name__}")
    return _settings(path, service, value)


def _settings(path: str, section: str, content: Mapping[Any, Any]) -> dict[str, Found]:
    known = SERVICE_SETTINGS[section] if section else all_names()
    found: dict[str, Found] = {}
    for key, value in _flattened(content):
        name = str(key).replace("-", "_")
        where = f"{path}: {section}.{key}" if section else f"{path}: {key}"
        if name in RENAMED:
            warn_renamed(where, name)
        name = ALIASES.get(name, name)
        if name == "config":
            raise _refused(f"{where}: a settings file cannot name another")
        if name not in known:
            sections = () if section else SERVICE_SETTINGS
            near = suggestion(name.replace("_", "-"), [*(item.replace("_", "-") for item in known), *sections])
            raise _refused(f"{where}: unknown setting{belongs_to(name) or near}")
        if name in found:
            raise _refused(f"{where}: the same setting as {found[name].where.removeprefix(f'{path}: ')}")
        found[name] = Found(value, Source.FILE, where)
    return found


def _flattened(content: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The keys and values; a mapping under a name that has settings behind a dot becomes these."""
    for key, value in content.items():
        prefix = str(key).replace("-", "_") + "."
        if isinstance(value, dict) and any(alias.startswith(prefix) for alias in ALIASES):
            yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in value.items())
        else:
            yield key, value


def _refused(message: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message, param="config")


class _Loader(yaml.SafeLoader):
    """The safe loader, which by itself lets the last of two equal keys win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """See yaml.SafeLoader. Raises yaml.constructor.ConstructorError for a key that stands twice."""
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} stands here a second time", key_node.start_mark)
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep)
