"""Which store a URL means."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from libs.errors import ErrorCode, TokenloomError
from libs.store.base import Store, StoreObserver
from libs.store.redis import RedisStore
from libs.store.sqlite import SqliteStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# redis-py takes database 0 for a path that it cannot read.
_DATABASE = re.compile(r"(/\d*)?")
# Of a Redis URL's query: the namespace, a socket's database, and what TLS needs. Timeouts and the pool are this package's.
_OPTIONS = frozenset({"prefix", "db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})


def open_store(url: str, observer: StoreObserver | None = None) -> Store:
    """The store that `url` names: the path of a SQLite file, redis://, rediss:// or unix://. Nothing is connected yet.

    Raises TokenloomError (INVALID_REQUEST, param --store) for another scheme, a path whose directory does not exist, or an option that is
    not known.
    """
    scheme = _SCHEME.match(url)
    if scheme is None:
        return _sqlite(url, observer)
    parts = urlsplit(url)
    if scheme[1] not in ("redis", "rediss", "unix") or not url.startswith(f"{scheme[1]}://"):
        raise _refusal(f"{scheme[0]} is no kind of store: give a SQLite file's path, redis://host:6379/0, rediss:// or unix:///path")
    return _redis(parts, observer)


def _sqlite(path: str, observer: StoreObserver | None) -> Store:
    if not path:
        raise _refusal("the path is empty")
    if not Path(path).absolute().parent.is_dir():
        raise _refusal(f"{path}: the directory does not exist")
    return SqliteStore(Path(path), observer=observer)


def _redis(parts: SplitResult, observer: StoreObserver | None) -> Store:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise _refusal(f"{unknown[0]} is no option of a Redis URL; {', '.join(sorted(_OPTIONS))} are")
    prefix = options.pop("prefix", "tokenloom")
    if not _PREFIX.fullmatch(prefix):
        raise _refusal(f"prefix={prefix}: a namespace has 1 to 64 characters of A-Z a-z 0-9 _ . -")
    if parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path):
        raise _refusal(f"{parts.path[1:]} is no database of Redis: behind the host stands its number, as in redis://host:6379/0")
    if parts.scheme == "unix" and (parts.hostname or not parts.path.startswith("/")):
        raise _refusal("a Unix socket's URL has three slashes: unix:///path")
    try:
        where = f"{parts.hostname or 'localhost'}:{parts.port or 6379}" if parts.scheme != "unix" else ""
        url = urlunsplit(parts._replace(query=urlencode(options)))
        return RedisStore(url, name=f"{parts.scheme}://{where}{parts.path}", prefix=prefix, observer=observer)
    except ValueError as error:
        raise _refusal(str(error)) from None


def _refusal(reason: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, f"--store: {reason}", param="--store")
