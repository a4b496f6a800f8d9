"""The base of every settings class: how a value is read whatever it came from, and where combinations of values are checked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, get_origin

from pydantic import AfterValidator, BeforeValidator, PrivateAttr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from libs.config.file import SettingsFile
from libs.config.found import Found, Source

SettingsT = TypeVar("SettingsT", bound="Settings")
ConfigT = TypeVar("ConfigT", bound="Settings")

ENV_PREFIX = "TOKENLOOM_"
# Linux's sockaddr_un holds 108 bytes, the last of them zero.
MAX_SOCKET_PATH = 107
# What stands for "no value" on a command line and in the environment.
NONE_WORD = "None"

# As vLLM reads them: k, m, g, t count in thousands and take fractions, K, M, G, T in 1,024s and do not.
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmgtKMGT])")


def _amount(value: Any) -> Any:
    found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    number, unit = found["number"], found["unit"]
    power = "kmgt".index(unit.lower()) + 1
    if unit.islower():
        return round(float(number) * 1000**power)
    if "." in number:
        raise ValueError(f"{unit} counts in {1024**power}s and takes no fraction; {unit.lower()} does")
    return int(number) * 1024**power


# A whole number that may be written 4k (4,000) or 4K (4,096).
Amount = Annotated[int, BeforeValidator(_amount)]


def _check_address(value: str) -> str:
    scheme, _, path = value.partition(":")
    if scheme in ("unix", "unix-abstract"):
        if not path:
            raise ValueError(f"{scheme}: names no socket")
        if len(path.encode()) > MAX_SOCKET_PATH:
            raise ValueError(f"the socket's path takes {len(path.encode())} bytes; the system takes {MAX_SOCKET_PATH}")
        return value
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{value or 'an empty text'} is no address: write host:port or unix:/path")
    if host.count(":") > 1 and not host.endswith("]") and not host.startswith("dns:"):
        raise ValueError(f"{value}: an IPv6 address stands in brackets, [{host}]:{port}")
    return value


# Where a gRPC server listens or is reached: host:port or unix:/path.
Address = Annotated[str, AfterValidator(_check_address)]


@dataclass(frozen=True, slots=True)
class Group:
    """One concern's settings: the first line of its class's docs, and its fields in the order in which they are written."""

    title: str
    fields: tuple[str, ...]


class Settings(BaseSettings):
    """Settings of one concern, or of a service that is composed of concerns."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags="dual",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        extra="forbid",
        frozen=True,
        # A time without end is no time that a timer can be set to: it would only fail later, far from its flag.
        allow_inf_nan=False,
        # The library's own reading of lists takes quotes and brackets for JSON: an API key is to arrive as it was typed.
        enable_decoding=False,
    )

    # Which section of a settings file is for this class; empty: the shared keys only.
    section: ClassVar[str] = ""
    # Settings of siblings that must not be given here, and why.
    refused: ClassVar[Mapping[str, str]] = {}

    _found: Mapping[str, Found] = PrivateAttr(default_factory=dict)
    _file: SettingsFile | None = PrivateAttr(None)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed: the environment is read by libs.config.sources, which remembers what came from where."""
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name].annotation if info.field_name else None
        if isinstance(value, str) and get_origin(annotation) is list:
            return [item.strip() for item in value.split(",") if item.strip()]
        if isinstance(value, bool) and annotation is not bool:
            # The library would read `true` in a file as the number 1.
            raise ValueError(f"{str(value).lower()} is a truth value, which this setting is not")
        return value

    @model_validator(mode="after")
    def _refuse_contradictions(self: SettingsT) -> SettingsT:
        found = [text for cls in type(self).__mro__ if "contradictions" in vars(cls) for text in vars(cls)["contradictions"](self)]
        if found:
            raise ValueError("; ".join(found))
        return self

    def contradictions(self) -> Iterator[str]:
        """What cannot hold together in this class's own fields; every message names the flags. Each class checks its own."""
        yield from ()

    def given(self, name: str) -> bool:
        """Whether somebody chose the value, rather than the default."""
        return name in self.model_fields_set

    def remember(self, found: Mapping[str, Found], file: SettingsFile | None) -> None:
        """Keeps where the values came from; for libs.config.sources, once."""
        self._found, self._file = found, file

    def found(self, name: str) -> Found:
        """The value as it is, and where it was given."""
        given = self._found.get(name)
        source = given.source if given else Source.FLAG if self.given(name) else Source.DEFAULT
        return Found(getattr(self, name), source, given.where if given else "default")

    def section_of(self, service: str) -> Mapping[str, Found]:
        """What the settings file says to one service alone."""
        return self._file.sections.get(service, {}) if self._file else {}

    @classmethod
    def secrets(cls) -> frozenset[str]:
        """The fields whose values nobody may read over another's shoulder: not on a command line, not in what is printed."""
        extras = {name: info.json_schema_extra for name, info in cls.model_fields.items()}
        return frozenset(name for name, extra in extras.items() if isinstance(extra, dict) and extra.get("secret"))

    @classmethod
    def groups(cls) -> list[Group]:
        """The fields by the concern that declares them, the class's own first."""
        seen: set[str] = set()
        found = []
        for part in cls.__mro__:
            names = [name for name in inspect.get_annotations(part) if name in cls.model_fields and name not in seen]
            if names and part.__doc__:
                seen.update(names)
                found.append(Group(part.__doc__.strip().partition("\n")[0].rstrip("."), tuple(names)))
        return found


def flag_of(name: str) -> str:
    """A field's flag: --max-num-seqs."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """A field's environment variable: TOKENLOOM_MAX_NUM_SEQS."""
    return ENV_PREFIX + name.upper()
