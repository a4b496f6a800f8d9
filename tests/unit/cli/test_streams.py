"""What the commands do where stdin, stdout or the reader of stdout is not what one hopes for: as processes, whose streams are their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cli.streams import READER_GONE

FORGIVING = "import sys; from cli.streams import forgive, leave_quietly; forgive(); "


def run(code: str, *, stdin: bytes = b"", **options) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", FORGIVING + code], input=stdin, stderr=subprocess.PIPE, check=False, **options)


def test_bytes_that_are_no_text_and_letters_that_stdout_lacks_are_replaced():
    done = run("print(ascii(sys.stdin.read()), '日')", stdin=b"a\xff", stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"'a\\ufffd' ?\n"


def test_streams_that_are_closed_are_empty_and_take_everything():
    code = f"{sys.executable!r}, '-c', {FORGIVING + 'print(sys.stdin.read()); sys.stderr.write(str(3))'!r}"
    done = run(f"import os; [os.close(each) for each in (0, 1, 2)]; os.execv({sys.executable!r}, [{code}])")
    assert done.returncode == 0


@pytest.mark.parametrize("written", ["print('x' * 100_000)", "print('x'); sys.stdout.flush()"])
def test_a_reader_that_has_gone_is_no_error_but_the_exit_code_of_sigpipe(written):
    code = f"""
try:
    sys.stdin.read()
    {written}
except BrokenPipeError:
    sys.exit(leave_quietly())
"""
    with subprocess.Popen(
        [sys.executable, "-c", FORGIVING + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait() == READER_GONE
