"""Runs the comparison: servers one after the other, interleaved over rounds, every result in a file of its own so that a run can go on.

A load is `python -m bench.load` as anybody would run it, in a process of its own; `exclusive` is a command put before it (a lock, where
several people share the machine).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from bench.executor import busy
from bench.machine import Machine
from bench.peers import gate
from bench.peers.environments import stamp
from bench.peers.places import environment
from bench.peers.plan import Load, disturbed, folder, good, missing, order, perplexity_file, read
from bench.peers.process import ServerProcess, StartError, answers
from bench.peers.servers import BOUND_BY_MEMORY, Server
from bench.peers.weights import SharedWeights
from services.worker.host import usable_cpus
from tools.ports import free_port

# Whatever a server still does when it has said that it is ready is done when its loads begin.
_SETTLE_S = 3.0
# With 3 rounds and no repeats the comparison takes some 45 minutes of the hour that it may take.
REPEATS_UNTIL_S = 50 * 60.0
_READY_S, _LOAD_S, _ATTEMPTS = 300.0, 400.0, 2
# A server whose threads wait for each other may need an hour beside a busy process: that a load does not end is the result then.
_BUSY_S = 150.0
_TOO_LONG = 124
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be run, and where its files go. `reference`: transformers' tokens, None to leave the gate out."""

    servers: Sequence[Server]
    weights: SharedWeights
    reference: Sequence[list[int]] | None
    rounds: int
    workloads: Sequence[str] | None
    out: Path
    exclusive: Sequence[str]
    say: Say
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """What quantisation costs in quality, then all rounds.

        A server that does not start, or a load that fails, is noted in its file and does not end the comparison.
        """
        for server in self.servers:
            if server.form:
                self._perplexity(server)
        gated = self.reference is not None
        for number in range(1, self.rounds + 1):
            waiting = [(server, missing(server, number, self.workloads, self.out, gated=gated)) for server in order(self.servers, number)]
            if any(rest for _, rest in waiting):
                self._ceilings(number)
            for server, rest in waiting:
                if rest:
                    self._serve(server, number, rest)

    def _ceilings(self, number: int) -> None:
        file = self.out / f"round-{number}" / "machine.json"
        if read(file) is None:
            found = self._measured()
            _write(file, found | {"load_average": round(psutil.getloadavg()[0], 2)})
            shown = (f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items())
            self.say(f"round {number}: the machine: {', '.join(shown)}")

    def _measured(self) -> dict[str, Any]:
        """The machine's ceilings; nothing where they could not be measured: the comparison goes on without them."""
        done = self._run([sys.executable, "-m", "bench.peers.ceilings"])
        if done.returncode:
            self.say(f"the machine's ceilings could not be measured: {done.stderr[-300:]}")
            return {}
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    def _perplexity(self, server: Server) -> None:
        """What a server's quantisation costs on the committed text, once for all rounds."""
        file = perplexity_file(self.out, server.name)
        if good(file) is not None:
            return
        model, target = self.words(server, [server.model_word], 0)[0], file.with_suffix(".new")
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "bench.perplexity", model, "--quantization", "none", server.form]
        done = self._run([*command, "--json", str(target)])
        if done.returncode or not target.is_file():
            _write(file, {"failed": done.stderr[-500:]})
            self.say(f"{server.name}: NO PERPLEXITY: {done.stderr[-500:]}")
            return
        found = json.loads(target.read_text())[-1]
        target.unlink()
        _write(file, found)
        self.say(f"{server.name}: perplexity {found['perplexity']:.3f}, {found['ratio']:.4f} of float32's")

    def _serve(self, server: Server, number: int, rest: list[Load]) -> None:
        """Starts a server, asks for the gate's tokens, runs its loads and ends it."""
        place, port = folder(self.out, number, server.name), free_port()
        url, command = f"http://127.0.0.1:{port}", self.words(server, server.command, port)
        variables = dict(zip(server.variables, self.words(server, tuple(server.variables.values()), port), strict=True))
        self.say(f"round {number}: {server.name}: {shlex.join(command)}")
        facts: dict[str, Any] = {"command": server.command, "variables": server.variables, "version": self._version(server)}
        try:
            with ServerProcess(command, variables, place / "server.log") as process:
                facts["ready_s"] = process.wait(lambda: answers(url + server.ready), _READY_S)
                facts["first_answer_s"] = process.wait(lambda: self._one_answer(server, url), _READY_S)
                facts["memory_ready"] = asdict(process.memory())
                if server.exact is not None and self.reference is not None:
                    facts["gate"] = self._gate(server, url)
                time.sleep(max(0.0, facts["ready_s"] + _SETTLE_S - process.age))
                for load in rest:
                    self._load(load, server, process, url)
                facts["memory_after"] = asdict(process.memory())
        except StartError as error:
            self.say(f"round {number}: {server.name} DID NOT START: {error}")
            facts["failed"] = str(error)
        _write(place / "server.json", facts)

    def words(self, server: Server, words: Sequence[str], port: int) -> list[str]:
        """Words of a command or of variables with the places in braces filled in."""
        cores = sorted(os.sched_getaffinity(0))[: usable_cpus()]
        values = {
            "port": port,
            "model": self.model(server),
            "float32": self.weights.directory,
            "endless": self.weights.endless,
            "f32": self.weights.f32,
            "q8_0": self.weights.q8_0,
            "packaged": self.weights.packaged,
            "gguf_directory": self.weights.packaged.parent,
            "env": environment(server.environment) if server.environment else "",
            "python": sys.executable,
            "path": os.environ.get("PATH", os.defpath),
            "cores": len(cores),
            "core_list": ",".join(map(str, cores)),
        }
        return [word.format(**values) for word in words]

    def model(self, server: Server) -> str:
        """The name by which a server knows the model: a server that was given a path and no name takes the path."""
        return str(self.weights.endless) if "{endless}" in server.command else self.weights.model

    def _version(self, server: Server) -> dict[str, str]:
        if server.environment is None:
            return {server.version_of: Machine.here().packages.get(server.version_of, "unknown")}
        return stamp(server.environment) or {}

    def _one_answer(self, server: Server, url: str) -> bool:
        message = {"role": "user", "content": "Hello"}
        body = {"model": self.model(server), "messages": [message], "max_tokens": 1, "temperature": 0}
        return answers(f"{url}/v1/chat/completions", json.dumps(body).encode())

    def _gate(self, server: Server, url: str) -> dict[str, Any]:
        assert self.reference is not None
        tokenizer = Tokenizer.from_file(str(self.weights.directory / "tokenizer.json"))
        done = self._run([sys.executable, "-m", "bench.peers.gate", url, self.model(server), str(self.weights.directory)])
        if done.returncode:
            self.say(f"{server.name}: the gate could not be asked: {done.stderr[-500:]}")
            return {"failed": done.stderr[-500:]}
        found = gate.agreement(json.loads(done.stdout), self.reference, tokenizer)
        self.say(f"{server.name}: gate {found.equal} of {found.prompts}")
        return asdict(found)

    def _load(self, load: Load, server: Server, process: ServerProcess, url: str) -> None:
        """Runs a load, again where others disturbed it, and keeps the least disturbed result."""
        best: dict[str, Any] | None = None
        bound = load.name == BOUND_BY_MEMORY and server.exact is True
        before = self._measured() if bound else {}
        for attempt in range(_ATTEMPTS):
            result = self._once(load, server, process, url, attempt)
            if result is None:
                continue
            if "unfinished_s" in result:
                best = result
                break
            if best is None or result["cpu"]["others_cores"] < best["cpu"]["others_cores"]:
                best = result
            if load.busy or not disturbed(result) or time.monotonic() - self.began > REPEATS_UNTIL_S:
                break
        if best is not None and bound:
            best["ceilings"] = {"before": before, "after": self._measured()}
        _write(load.file(self.out), best or {"failed": "the load gave no result"})

    def _once(self, load: Load, server: Server, process: ServerProcess, url: str, attempt: int) -> dict[str, Any] | None:
        target = load.file(self.out).with_suffix(".new")
        target.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.load", "--url", url, "--model", self.model(server), "--workload", load.workload]
        command += ["--seed", str(load.seed(attempt)), "--server-pid", str(process.pid), "--json", str(target)]
        command += [] if server.ignore_eos else ["--no-ignore-eos"]
        command += ["--num-prompts", str(server.requests[load.workload])] if load.workload in server.requests else []
        with ExitStack() as company:
            if load.busy:
                company.enter_context(busy(1))
            done = self._run(command, _BUSY_S if load.busy else _LOAD_S)
        result = read(target)
        target.unlink(missing_ok=True)
        if result is None and load.busy and done.returncode == _TOO_LONG:
            result = {"failed": "it had not ended", "unfinished_s": _BUSY_S}
            self.say(f"round {load.round}: {server.name} {load.name}: HAD NOT ENDED after {_BUSY_S:.0f} s")
            return result
        if result is None:
            self.say(f"round {load.round}: {server.name} {load.name}: NO RESULT: {done.stderr[-500:]}")
            return None
        facts, others = result["statistics"], result["cpu"]["others_cores"]
        rate, failed = facts["output_tokens_per_s"], facts["failed"]
        self.say(f"round {load.round}: {server.name} {load.name}: {rate:.1f} output tok/s, {failed} failed, others {others:.2f} cores")
        return result | {"memory": asdict(process.memory()), "attempt": attempt}

    def _run(self, command: list[str], bound_s: float = _LOAD_S) -> subprocess.CompletedProcess[str]:
        whole = [*self.exclusive, *command]
        try:
            return subprocess.run(whole, capture_output=True, text=True, timeout=bound_s * (3 if self.exclusive else 1))
        except subprocess.TimeoutExpired as error:
            return subprocess.CompletedProcess(whole, _TOO_LONG, "", f"it took longer than {error.timeout:.0f} s")


def _write(file: Path, content: dict[str, Any]) -> None:
    """Writes a file whole or not at all: what an interrupted run leaves is either a result or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    scratch.replace(file)
