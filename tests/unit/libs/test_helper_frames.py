"""Frames between a process and its helper."""

from __future__ import annotations

import io

from libs.helper_frames import ANSWER, ASK, READY, frame, read_frame


def test_frames_survive_the_pipe():
    stream = io.BytesIO(frame(ASK, b"abc") + frame(READY) + frame(ANSWER, b"cut short")[:-1])
    assert [read_frame(stream), read_frame(stream), read_frame(stream)] == [(ASK, b"abc"), (READY, b""), None]
