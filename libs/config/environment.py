"""Settings in the environment: TOKENLOOM_ and the field's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import get_origin

from libs.config.found import Found, Source
from libs.config.names import OTHER_VARIABLES, all_names, nearest
from libs.config.settings import ENV_PREFIX, NONE_WORD, Settings, variable_of
from libs.errors import ErrorCode, TokenloomError

# What Kubernetes tells every container about a Service whose name begins with `tokenloom` in the pod's namespace.
_LINK_NAME = re.compile(rf"{ENV_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def read_environment(config: type[Settings], environ: Mapping[str, str]) -> dict[str, Found]:
    """The settings that the environment gives to this class. An empty variable is one that is not set, save for a list: the empty one.

    Raises TokenloomError (INVALID_REQUEST) for a TOKENLOOM_ variable that no service knows, and for a Kubernetes service link in the place
    of a setting.
    """
    known = {variable_of(name): name for name in {*config.model_fields, *config.refused}}
    everywhere = {*known, *OTHER_VARIABLES, *map(variable_of, all_names())}
    found: dict[str, Found] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable in everywhere:
            _refuse_link(variable, value)
        elif not _is_link(variable, value):
            raise _refused(f"{variable}: no service has this setting{_meant(variable, everywhere)}")
        if variable not in known:
            continue
        name = known[variable]
        if value or _is_list(config, name):
            found[name] = Found(None if value == NONE_WORD else value, Source.ENVIRONMENT, variable)
    return found


def _meant(variable: str, known: Iterable[str]) -> str:
    """A suggestion by what follows the prefix, which all have in common."""
    near = nearest(variable.removeprefix(ENV_PREFIX).upper(), (name.removeprefix(ENV_PREFIX) for name in known))
    return f"; did you mean {ENV_PREFIX}{near}?" if near else ""


def _is_list(config: type[Settings], name: str) -> bool:
    return name in config.model_fields and get_origin(config.model_fields[name].annotation) is list


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is told every setting by flag: without the TOKENLOOM_ variables that are settings."""
    settings = set(map(variable_of, all_names()))
    return {name: value for name, value in environ.items() if name not in settings}


def _is_link(variable: str, value: str) -> bool:
    return _LINK_NAME.fullmatch(variable) is not None or (variable.endswith("_PORT") and _LINK_VALUE.fullmatch(value) is not None)


def _refuse_link(variable: str, value: str) -> None:
    if variable.endswith("_PORT") and _LINK_VALUE.fullmatch(value):
        service = variable.removesuffix("_PORT").lower().replace("_", "-")
        raise _refused(
            f"{variable}={value}: Kubernetes put this in the place of a setting because a Service here is called {service}: "
            "set `enableServiceLinks: false` in the pod's spec, or give the Service another name"
        )


def _refused(message: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message)
