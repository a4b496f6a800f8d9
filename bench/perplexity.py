"""What rounding weights and activations costs in quality: perplexity of a text on the worker's own engine, without any service.

    python -m bench.perplexity MODEL_DIR [--quantization none int8 int4] [--text FILE] [--window 512] [--stride 256] [--json FILE]

The model reads the text in windows and tells each token's log-probability behind the true tokens before it (prompt_logprobs). Every token
but the text's first is counted once, in the first window that holds it, so that all but the first window's have at least `window - stride`
tokens before them. Perplexity is e to the mean negative log-probability (Jelinek et al. 1977). Beside it stand its ratio to the first
form's, and at how many places the likeliest token is that of the first form, which is what greedy decoding would notice.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.command import readable, run, whole, writable
from libs.blocks import blocks_for
from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import TokenLogprobs
from libs.sampling import SamplingParams
from services.worker.batch import Batch, Opening, Row
from services.worker.config import WorkerConfig
from services.worker.engine import Engine, load
from services.worker.slots import SlotTable

SAMPLE = Path(__file__).parent / "texts" / "sample.txt"
FORMS = ("none", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each token of a text but its first: the log-probability it had (natural logarithm), and the id that was likeliest in its place."""

    logprobs: list[float]
    likeliest: list[int]

    @property
    def perplexity(self) -> float:
        """e to the mean negative log-probability."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Scores) -> float:
        """At which share of the places the likeliest token is that of `other`."""
        return sum(mine == theirs for mine, theirs in zip(self.likeliest, other.likeliest, strict=True)) / len(self.likeliest)


@dataclass(frozen=True, slots=True)
class Report:
    """A line of the table. `ratio` and `agreement`: to the first line's."""

    quantization: str
    numerics: str
    perplexity: float
    ratio: float
    agreement: float
    load_seconds: float
    seconds: float


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Start, end and first counted position of each window over `length` tokens; position 0 is never counted."""
    counted = 1
    for start in range(0, length, stride):
        end = min(start + window, length)
        if end > counted:
            yield start, end, counted
        counted = max(counted, end)


def score(engine: Engine, tokens: Sequence[int], window: int, stride: int) -> Scores:
    """Reads `tokens` in windows, each as one step's prompt. Raises TokenloomError for windows that the engine cannot take."""
    if not 2 <= window <= engine.facts.max_model_len or not 1 <= stride < window:
        limits = f"windows of 2 to {engine.facts.max_model_len} tokens are read, at a stride below that"
        raise TokenloomError(ErrorCode.INVALID_REQUEST, limits)
    scores = Scores([], [])
    for start, end, counted in windows(len(tokens), window, stride):
        told = _told(engine, tokens[start:end])[counted - start :]
        scores.logprobs.extend(entry.logprob for entry in told)
        scores.likeliest.extend(entry.top_ids[0] for entry in told)
    return scores


def _told(engine: Engine, tokens: Sequence[int]) -> Sequence[TokenLogprobs]:
    """What each position of a prompt tells, its likeliest token among it; the first position tells nothing of use."""
    none, blocks = np.empty(0, np.int32), np.arange(blocks_for(len(tokens)), dtype=np.int32)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    opening = Opening(0, "perplexity", np.asarray(tokens, np.int32), none, 0, blocks, params, None, 0)
    batch = Batch(0, 0, 0, 1, (), (opening,), (Row(0, len(tokens), True, none),))
    return engine.execute(SlotTable(engine.limits, ()).stage(batch).rows).told[0].logprobs.unpack()


def read(model: Path, text: Path) -> list[int]:
    """The tokens of a text, without special ones. Raises OSError where the model has no tokenizer.json."""
    tokenizer = Tokenizer.from_str((model / "tokenizer.json").read_text(encoding="utf-8"))
    ids: list[int] = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    return ids


def measure(args: argparse.Namespace) -> Iterator[Report]:
    """A report for each form, one model in memory at a time."""
    tokens, first = read(args.model, args.text), None
    for form in args.quantization:
        options = {"model": args.model, "kernels": args.kernels, "threads": args.threads, "kv_cache_memory_bytes": 256 << 20}
        began = time.monotonic()
        engine = load(WorkerConfig.model_validate(options | {"quantization": None if form == "none" else form}))
        loaded = time.monotonic()
        scores = score(engine, tokens, args.window, args.stride)
        first = first or scores
        yield Report(
            quantization=form,
            numerics=engine.facts.fingerprints.numerics,
            perplexity=scores.perplexity,
            ratio=scores.perplexity / first.perplexity,
            agreement=scores.agreement(first),
            load_seconds=round(loaded - began, 2),
            seconds=round(time.monotonic() - loaded, 2),
        )


def main(argv: list[str] | None = None) -> int:
    """Loads, reads, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--text", type=readable, default=SAMPLE)
    parser.add_argument("--window", type=whole(2), default=512)
    parser.add_argument("--stride", type=whole(1), default=256)
    parser.add_argument("--kernels", choices=["auto", "cpu", "reference"], default="auto")
    parser.add_argument("--threads", type=whole(1), default=None)
    parser.add_argument("--json", type=writable, help="write the reports there too")
    args = parser.parse_args(argv)
    if args.stride >= args.window:
        parser.error(f"argument --stride: {args.stride} is not less than the window of {args.window}")
    reports = []
    for report in measure(args):
        reports.append(report)
        print(
            f"{report.quantization:<6} perplexity {report.perplexity:8.4f}   x {report.ratio:.4f}   same likeliest {report.agreement:.2%}  "
            f" loaded in {report.load_seconds:.1f} s, read in {report.seconds:.1f} s   {report.numerics}",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
