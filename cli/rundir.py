"""The run directory of a mesh: where its sockets, its store and its traces live while it runs on one port.

One directory per port, private to the user, held by one supervisor at a time (a lock that the kernel releases when it dies):

    $TOKENLOOM_RUN_DIR or $XDG_RUNTIME_DIR/tokenloom or /tmp/tokenloom-<uid>
        8000/  lock  gateway.sock ...  store.db  traces.db
"""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from libs.errors import ErrorCode, TokenloomError

BASE_VARIABLE = "TOKENLOOM_RUN_DIR"
# sockaddr_un.sun_path holds 108 bytes with its closing zero; gRPC refuses longer paths at bind time with less clear words.
MAX_SOCKET_PATH_BYTES = 107
_LONGEST_NAME = "tokenizer-00.sock"


def locate(port: int) -> Path:
    """The run directory of the mesh on `port`, whether it exists or not.

    XDG_RUNTIME_DIR is passed over when it is too long for a socket's path. Raises TokenloomError when TOKENLOOM_RUN_DIR is.
    """
    return candidates(port)[0]


def candidates(port: int) -> list[Path]:
    """Where the mesh on `port` may have its directory, most likely first: a shell elsewhere may lack serve's XDG_RUNTIME_DIR.

    Raises TokenloomError when TOKENLOOM_RUN_DIR is too long for a socket's path.
    """
    chosen = os.environ.get(BASE_VARIABLE)
    if chosen:
        path = Path(chosen).absolute() / str(port)
        if not _fits(path):
            message = f"{BASE_VARIABLE}={chosen} is too long: a Unix socket's path is at most {MAX_SOCKET_PATH_BYTES} bytes"
            raise TokenloomError(ErrorCode.INVALID_REQUEST, message)
        return [path]
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    bases = [Path(runtime).absolute() / "tokenloom"] if os.access(runtime, os.W_OK) else []
    bases.append(Path("/tmp") / f"tokenloom-{os.getuid()}")
    return [base / str(port) for base in bases if _fits(base / str(port))]


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory / _LONGEST_NAME)) <= MAX_SOCKET_PATH_BYTES


@dataclass(slots=True)
class RunDirectory:
    """A run directory that this process holds until `release`."""

    path: Path
    _lock: int

    @classmethod
    def claim(cls, port: int) -> RunDirectory:
        """Makes the directory (mode 0700), takes its lock and removes the sockets that a mesh that died has left.

        Traces and the store, with its API keys, stay: leases in it end by themselves.
        Raises TokenloomError when another mesh holds it or when it belongs to someone else.
        """
        path = locate(port)
        for directory in (path.parent, path):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (path.parent, path):
            _check_private(directory)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            raise TokenloomError(
                ErrorCode.UNAVAILABLE, f"a mesh is already serving on port {port} (tokenloom serve, pid {holder or 'unknown'})"
            ) from None
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        for stale in path.glob("*.sock"):
            stale.unlink(missing_ok=True)
        return cls(path, lock)

    def socket(self, name: str) -> str:
        """The gRPC address of the service `name`: a Unix socket here."""
        return f"unix:{self.path / name}.sock"

    def release(self) -> None:
        """Lets the next mesh have the directory; sockets go, traces stay for `tokenloom trace`."""
        for stale in self.path.glob("*.sock"):
            stale.unlink(missing_ok=True)
        os.close(self._lock)


def _check_private(directory: Path) -> None:
    """Under /tmp anyone could have made the directory first, and would then own the sockets."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise TokenloomError(ErrorCode.UNAUTHORIZED, f"{directory} is not a directory of this user; set {BASE_VARIABLE} to one that is")
    if directory.name.isdigit() and stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)
