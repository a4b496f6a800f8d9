"""The encoder process: `python -m services.tokenizer.encoder_process MODEL_DIR MEMORY_BYTES [CHAT_TEMPLATE]`.

A question (libs/helper_frames.py) is an EncodeRequest, its answer an EncodeResponse.
"""

from __future__ import annotations

import sys

from libs.errors import ErrorCode, TokenloomError
from libs.helper_frames import Answerer, limit_memory, serve_frames
from libs.models.directory import ModelDirectory
from services.tokenizer.encoder import Encoder, load_tokenizer
from tokenloom.tokenizer.v1 import tokenizer_pb2


def answerer(encoder: Encoder) -> Answerer:
    """Answers with what `encoder` makes of a request; running out of memory is the request's fault."""

    def answer(payload: bytes) -> bytes:
        try:
            return encoder.encode(tokenizer_pb2.EncodeRequest.FromString(payload)).SerializeToString()
        except MemoryError as error:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, "encoding the prompt took too much memory") from error

    return answer


def _load() -> Answerer:
    model = ModelDirectory(sys.argv[1], *sys.argv[3:])
    tokenizer = load_tokenizer(model)
    # Before the template: Jinja computes its constant expressions while it compiles.
    limit_memory(int(sys.argv[2]))
    return answerer(Encoder(model, tokenizer))


if __name__ == "__main__":
    sys.exit(serve_frames(_load))
