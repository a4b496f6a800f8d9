"""The encoder process: `python -m services.tokenizer.encoder_process MODEL_DIR MEMORY_BYTES [CHAT_TEMPLATE]`, frames on stdin and stdout.

A frame is a little-endian uint32 length, one byte of kind and the payload:

    to it      ENCODE    an EncodeRequest
    from it    READY     empty, once, when tokenizer and template are loaded
               ENCODED   an EncodeResponse
               REFUSED   a common.v1.Error
It ends when its stdin closes, and with its parent.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.process import die_with_parent
from services.tokenizer.encoder import Encoder, load_tokenizer
from tokenloom.tokenizer.v1 import tokenizer_pb2

HEADER = struct.Struct("<IB")
ENCODE, READY, ENCODED, REFUSED = range(4)


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


def answer(encoder: Encoder, payload: bytes) -> bytes:
    """The frame that answers an ENCODE frame; every error becomes a REFUSED one."""
    try:
        return frame(ENCODED, encoder.encode(tokenizer_pb2.EncodeRequest.FromString(payload)).SerializeToString())
    except TokenloomError as error:
        return frame(REFUSED, error.to_proto().SerializeToString())
    except MemoryError:
        problem = TokenloomError(ErrorCode.INVALID_REQUEST, "encoding the prompt took too much memory")
        return frame(REFUSED, problem.to_proto().SerializeToString())


def limit_memory(budget: int) -> None:
    """Lets this process grow by `budget` bytes of private memory and no further (Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/status", encoding="ascii") as status:
        now = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + budget, now + budget))


def main() -> int:
    """Serves frames until stdin closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent drains first, then closes stdin
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not break the frames
    model = ModelDirectory(sys.argv[1], *sys.argv[3:])
    tokenizer = load_tokenizer(model)
    # Before the template: Jinja computes its constant expressions while it compiles.
    limit_memory(int(sys.argv[2]))
    encoder = Encoder(model, tokenizer)
    sink.write(frame(READY))
    sink.flush()
    while (request := read_frame(source)) is not None:
        sink.write(answer(encoder, request[1]))
        sink.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
