"""The comparison's command line.

    python -m bench.peers install [NAME...]      the peers' environments (once; some minutes, llama.cpp compiles)
    python -m bench.peers run                    3 rounds, every server and load; goes on where it was interrupted
    python -m bench.peers report                 the tables of what there is so far

Exit code 0 when everything asked for was measured and every server passed its gate, 1 otherwise, 2 for wrong flags. Targets that were
not reached and doubtful runs are on the page and do not change the exit code: they are results.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bench.command import run as run_command
from bench.command import whole
from bench.machine import Machine
from bench.peers import gate
from bench.peers.environments import InstallError, install, stamp
from bench.peers.places import run_folder
from bench.peers.report import markdown, write
from bench.peers.results import Results
from bench.peers.run import Comparison
from bench.peers.servers import Server, named
from bench.peers.weights import SharedWeights, prepare
from bench.workload import NAMED
from libs.models.catalog import resolve

_COMMITTED = Path(__file__).resolve().parent.parent / "results"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Compares servers on the same weights and machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    install_ = commands.add_parser("install", help="the peers' virtual environments")
    install_.add_argument("names", nargs="*", help="only these (default: all)")
    for name, text in (("run", "run what is missing, then report"), ("report", "the tables of what there is")):
        sub = commands.add_parser(name, help=text)
        sub.add_argument("--rounds", type=whole(1), default=3, help="how often each server runs (default 3)")
        sub.add_argument("--servers", nargs="+", metavar="NAME", help="only these servers (bench/peers/servers.py; default: all)")
        sub.add_argument("--out", type=Path, help="where results lie until they are reported (default: by tree and machine, in the cache)")
        sub.add_argument("--model", help="directory with one GGUF, as for `tokenloom serve` (default: the packaged model)")
        sub.add_argument("--workloads", nargs="+", choices=sorted(NAMED), help="only these workloads (default: all)")
    run = commands.choices["run"]
    run.add_argument("--results", type=Path, default=_COMMITTED, help="where the report is written (default bench/results)")
    run.add_argument("--no-gate", action="store_true", help="leave out the accuracy gate; the figures then do not count")
    run.add_argument("--exclusive", default="", metavar="COMMAND", help="put before every measurement: a lock of a shared machine")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Does what was asked for; the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)  # ends servers as Ctrl-C does
    try:
        if args.command == "install":
            install(args.names or None, _say)
            return 0
        servers = named(args.servers)
    except ValueError as error:
        parser.error(str(error))
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    machine = Machine.here()
    weights = prepare(resolve(args.model, progress=_say))
    out = args.out or run_folder(machine)
    if args.command == "report" and not any(out.glob("round-*")):
        print(f"nothing has been measured under {out}: `make bench` does; reports that were committed are in {_COMMITTED}", file=sys.stderr)
        return 1
    if args.command == "run" and not _run(args, servers, weights, out):
        return 1
    results = Results(out, servers, args.rounds, weights.bytes_float32, args.workloads)
    print(markdown(results, machine, weights))
    if args.command == "run":
        print(f"written: {write(results, machine, weights, args.results)}", file=sys.stderr)
    passed = all(results.gate(server)[1] for server in servers if server.exact)
    return int(bool(results.absent()) or not passed)


def _run(args: argparse.Namespace, servers: Sequence[Server], weights: SharedWeights, out: Path) -> bool:
    """Installs what is missing and runs; false when an environment cannot be made or the run was interrupted."""
    needed = {server.environment for server in servers if server.environment} | (set() if args.no_gate else {"transformers"})
    started = time.monotonic()
    try:
        install(sorted(name for name in needed if stamp(name) is None), _say)
        reference = None if args.no_gate else gate.reference(weights.directory, weights.checksums[_safetensors(weights)])
        _say(f"results go to {out}")
        Comparison(servers, weights, reference, args.rounds, args.workloads, out, shlex.split(args.exclusive), _say).run()
    except InstallError as error:
        print(error, file=sys.stderr)
        return False
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from here")
        return False
    _say(f"done after {(time.monotonic() - started) / 60:.0f} minutes")
    return True


def _safetensors(weights: SharedWeights) -> str:
    return next(name for name in weights.checksums if name.startswith("float32/") and name.endswith(".safetensors"))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
