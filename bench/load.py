"""Loads an OpenAI-compatible server and measures what its clients see.

    python -m bench.load --model NAME --workload b --json FILE
    python -m bench.load --model NAME --input-len 256 --output-len 64 --num-prompts 100 --rate 2

Exit code 0 when every request succeeded, 1 when one failed, 2 for wrong flags. docs/benchmarks.md says what each number means.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import uvloop
from rich.console import Console

from bench.command import run
from bench.http import ConnectError, DisconnectedError, MalformedError, Target, exchange
from bench.loops import closed_loop, open_loop
from bench.machine import CpuMeter, CpuUse, Machine, server_processes
from bench.prompts import PromptShape, ordinary_ids, token_prompts, word_prompts
from bench.report import Result
from bench.stats import summarize
from bench.stream import RequestRecord, stream_request
from bench.workload import CHAT, COMPLETIONS, NAMED, PATHS, Workload, poisson_arrivals, request_body

_LOCAL = ("127.0.0.1", "localhost", "::1")
_WARMUP_SEED = 1 << 32  # added to the seed: a warm-up must not fill a prefix cache with what is measured


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, judged."""

    target: Target
    url: str
    model: str
    endpoint: str
    workload: Workload
    workload_name: str | None
    vocabulary: list[int] | None
    warmup: int
    seed: int
    timeout: float
    api_key: str | None
    server_pids: list[int]
    note: str
    json: Path | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description="Loads an OpenAI-compatible server.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server; /v1 at the end is optional")
    add("--model", required=True, help="the model's name at the server")
    add("--endpoint", choices=(CHAT, COMPLETIONS), default=CHAT)
    add("--workload", choices=sorted(NAMED), help="lengths, number of prompts and concurrency by name; the flags below override it")
    add("--input-len", type=int, help="tokens of each prompt's own")
    add("--output-len", type=int, help="max_tokens")
    add("--num-prompts", type=int, help="requests in all")
    add("--prefix-len", type=int, help="tokens before them that all prompts share (default 0)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, help="closed loop: requests always in flight")
    load.add_argument("--rate", type=float, help="open loop: requests a second, Poisson")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help="outputs of full length (default: with --workload only)")
    add("--tokenizer", type=Path, metavar="DIR", help="completions: prompts of exactly as many token ids, from DIR/tokenizer.json")
    add("--warmup", type=int, default=1, help="requests before the measurement, with prompts of their own (default 1)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default 0)")
    add("--timeout", type=float, default=600.0, help="seconds for one request (default 600)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="bearer token (default: OPENAI_API_KEY)")
    add("--server-pid", type=int, action="append", default=[], help="root process of a local server (default: whoever listens there)")
    add("--note", default="", help="kept in the JSON: what a reader must know")
    add("--json", type=Path, metavar="FILE", help="writes the result there")
    return parser


def parse(argv: Sequence[str]) -> Options:
    """The options of a command line; exits with 2 and a sentence where they do not make sense together."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.tokenizer and args.endpoint != COMPLETIONS:
        parser.error("--tokenizer needs --endpoint completions: a chat's template adds tokens of its own")
    if args.warmup < 0 or args.timeout <= 0:
        parser.error("--warmup must not be negative, and --timeout must be above 0")
    for pid in args.server_pid:
        if not psutil.pid_exists(pid):
            parser.error(f"--server-pid {pid}: there is no such process")
    try:
        target, workload = Target.parse(args.url), _workload(args)
        vocabulary = ordinary_ids(args.tokenizer) if args.tokenizer else None
    except ValueError as error:
        parser.error(str(error))
    return Options(
        target=target, url=args.url, model=args.model, endpoint=args.endpoint, workload=workload, workload_name=args.workload,
        vocabulary=vocabulary, warmup=args.warmup, seed=args.seed, timeout=args.timeout, api_key=args.api_key,
        server_pids=args.server_pid, note=args.note, json=args.json,
    )  # fmt: skip


def _workload(args: argparse.Namespace) -> Workload:
    base = NAMED.get(args.workload)
    if base is None:
        missing = [flag for flag in ("input_len", "output_len", "num_prompts") if getattr(args, flag) is None]
        if missing or (args.concurrency is None and args.rate is None):
            raise ValueError("give --workload, or --input-len, --output-len, --num-prompts and one of --concurrency and --rate")
        shape = PromptShape(args.input_len, args.prefix_len or 0)
        return Workload(shape, args.output_len, args.num_prompts, bool(args.ignore_eos), args.concurrency, args.rate)
    own = {"input_len": args.input_len, "prefix_len": args.prefix_len}
    shape = replace(base.shape, **{name: value for name, value in own.items() if value is not None})
    flags = ("output_len", "num_prompts", "ignore_eos", "concurrency", "rate")
    given = {flag: value for flag in flags if (value := getattr(args, flag)) is not None}
    if "rate" in given:
        given["concurrency"] = None
    return replace(base, shape=shape, **given)


def bodies(options: Options, count: int, seed: int) -> list[bytes]:
    """The bodies of `count` requests, made beforehand so that making them costs no time under load."""
    shape = options.workload.shape
    prompts: Sequence[str | list[int]] = (
        word_prompts(shape, count, seed) if options.vocabulary is None else token_prompts(shape, count, seed, options.vocabulary)
    )
    return [request_body(options.endpoint, options.model, prompt, options.workload) for prompt in prompts]


async def drive(options: Options) -> tuple[list[RequestRecord], CpuUse]:
    """Warms up, then measures: the records and the CPU used meanwhile."""
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    if options.api_key:
        headers["authorization"] = f"Bearer {options.api_key}"
    path = PATHS[options.endpoint]

    async def send(body: bytes, record: RequestRecord) -> None:
        await stream_request(options.target, path, headers, body, record, options.timeout)

    await closed_loop(send, bodies(options, options.warmup, options.seed + _WARMUP_SEED), concurrency=1)
    workload = options.workload
    measured = bodies(options, workload.num_prompts, options.seed)
    meter = CpuMeter(_server(options))
    if workload.rate is not None:
        records = await open_loop(send, measured, poisson_arrivals(workload.rate, workload.num_prompts, options.seed))
    else:
        records = await closed_loop(send, measured, workload.concurrency or 1)
    return records, meter.stop()


def _server(options: Options) -> list[psutil.Process]:
    if options.server_pids:
        return [psutil.Process(pid) for pid in options.server_pids]
    return server_processes(options.target.port) if options.target.host in _LOCAL else []


async def server_version(target: Target) -> str:
    """What the server answers at /version (vLLM's way, and Tokenloom's), in one line; empty where it has no such answer."""
    pieces: list[bytes] = []
    try:
        async with asyncio.timeout(5):
            status = await exchange(target, "GET", "/version", {}, b"", lambda piece, _now: pieces.append(piece))
        return json.dumps(json.loads(b"".join(pieces))) if status == 200 else ""
    except (ConnectError, DisconnectedError, MalformedError, TimeoutError, ValueError):
        return ""


async def measure(options: Options, command: str) -> Result:
    """Runs the whole measurement."""
    machine, server = Machine.here(), await server_version(options.target)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    records, cpu = await drive(options)
    examples: dict[str, str] = {}
    for record in records:
        if record.failure is not None:
            examples.setdefault(record.failure, record.detail)
    return Result(
        started_at=started_at, command=command, url=options.url, model=options.model, endpoint=options.endpoint,
        workload_name=options.workload_name, seed=options.seed, workload=options.workload, server=server, machine=machine, cpu=cpu,
        statistics=summarize(records, options.workload.output_len), failure_examples=examples, note=options.note,
    )  # fmt: skip


def _command(argv: Sequence[str]) -> str:
    """The command as it can be repeated, without the secret in it."""
    shown = list(argv)
    for index, word in enumerate(shown):
        if word.startswith("--api-key="):
            shown[index] = "--api-key=..."
        elif index and shown[index - 1] == "--api-key":
            shown[index] = "..."
    return shlex.join(["python", "-m", "bench.load", *shown])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; the exit code."""
    words = sys.argv[1:] if argv is None else argv
    options = parse(words)
    result = uvloop.run(measure(options, _command(words)))
    result.show(Console())
    if options.json is not None:
        result.write(options.json)
    return int(result.statistics.failed > 0)


if __name__ == "__main__":
    sys.exit(run(main))
