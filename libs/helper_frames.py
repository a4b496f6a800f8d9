"""The helper's side of a helper process: frames on stdin and stdout, one question and one answer at a time.

A frame is a little-endian uint32 length, one byte of kind and the payload:

    to it      ASK       a question
    from it    READY     empty, once, when it has loaded what it needs
               ANSWER    the answer
               REFUSED   a common.v1.Error
It ends when its stdin closes, and with its parent.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

from libs.errors import ErrorCode, TokenloomError
from libs.process import die_with_parent

HEADER = struct.Struct("<IB")
ASK, READY, ANSWER, REFUSED = range(4)

# Answers one question; a TokenloomError becomes a refusal.
Answerer = Callable[[bytes], bytes]


def frame(kind: int, payload: bytes = b"") -> bytes:
    """A frame as it travels."""
    return HEADER.pack(len(payload), kind) + payload


def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """The next frame's kind and payload; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, kind = HEADER.unpack(header)
    payload = stream.read(length)
    return (kind, payload) if len(payload) == length else None


def limit_memory(budget: int) -> None:
    """Lets this process grow by `budget` bytes of private memory and no further (Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/status", encoding="ascii") as status:
        now = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + budget, now + budget))


def serve_frames(load: Callable[[], Answerer]) -> int:
    """Loads, then answers until stdin closes. Returns the exit code."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent drains first, then closes stdin
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not break the frames
    answer = load()
    sink.write(frame(READY))
    sink.flush()
    while (question := read_frame(source)) is not None:
        sink.write(answered(answer, question[1]))
        sink.flush()
    return 0


def answered(answer: Answerer, payload: bytes) -> bytes:
    """The frame that answers an ASK frame. What breaks on a question ends neither the process nor the questions behind it."""
    try:
        return frame(ANSWER, answer(payload))
    except TokenloomError as error:
        refusal = error
    except Exception as error:
        traceback.print_exc()
        refusal = TokenloomError(ErrorCode.INTERNAL, f"{type(error).__name__}; the log has the details")
    return frame(REFUSED, refusal.to_proto().SerializeToString())
