"""The accuracy gate: a server's greedy tokens against transformers' in float32, in the same run as its figures.

    python -m bench.peers.gate URL MODEL DIRECTORY

prints a server's continuations of the gate's prompts as JSON; DIRECTORY has the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.peers.environments import InstallError, stamp
from bench.peers.places import environment
from libs.models.cache import ensure_entry

TOKENS = 48
_FILE = "continuations.json"
_IN_FLIGHT = 8
_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_TEXTS = (
    "The loom is one of the oldest machines, and it",
    "On the morning of the third day the river had fallen, so we",
    "def mean(values):\n    ",
    "Water boils at a lower temperature in the mountains because",
    "Dear Ms. Ogawa,\n\nThank you for your letter of",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three branches of government are",
    '{"name": "Ada", "born": 1815, "field":',
    "Once the bread has risen,",
    "SELECT name, price FROM products WHERE",
)
_QUESTIONS = (
    "What is a loom?",
    "Name three rivers in Europe.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "How do I boil an egg?",
    "What is the capital of Peru, and what is it known for?",
    "Explain what a hash table is to a child.",
    "List the planets of the solar system in order.",
    "Translate 'good morning' into Spanish and French.",
    "A train leaves at 9:40 and arrives at 11:15. How long does it take?",
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a server's tokens are the reference's: prompts with all tokens equal, of `prompts`; `first` differing token of the others.

    `texts` answers came as text alone, which proves less than ids do.
    """

    equal: int
    prompts: int
    first: dict[str, int]
    texts: int

    @property
    def passed(self) -> bool:
        """Whether every token is the reference's, by its id."""
        return self.equal == self.prompts and not self.texts


def prompts(directory: Path) -> list[list[int]]:
    """The gate's prompts as token ids: ten texts to go on with, ten questions in the chat form of the model."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [*_TEXTS, *(_CHAT.format(question) for question in _QUESTIONS)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def reference(directory: Path, weights: str) -> list[list[int]]:
    """What transformers says, computed once per checksum of the weights, set of prompts and versions, and kept beside them.

    Raises InstallError when transformers fails.
    """
    asked = prompts(directory)
    script = Path(__file__).with_name("reference.py").read_text()
    identity = hashlib.sha256(json.dumps([weights, asked, TOKENS, script, stamp("transformers")]).encode())
    entry = directory.parent.parent / f"reference-{identity.hexdigest()[:16]}"
    ensure_entry(entry, lambda staging: _compute(directory, asked, staging / _FILE))
    content: list[list[int]] = json.loads((entry / _FILE).read_text())["continuations"]
    return content


def _compute(directory: Path, asked: list[list[int]], target: Path) -> None:
    script = Path(__file__).with_name("reference.py")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, target.open("wb") as output:
        json.dump(asked, file)
        file.flush()
        python = environment("transformers") / "bin" / "python"
        done = subprocess.run([python, script, directory, file.name, str(TOKENS)], stdout=output, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise InstallError(f"transformers did not compute the gate's reference: {done.stderr[-2000:]}")


def ask(url: str, model: str, asked: Sequence[Sequence[int]]) -> list[list[int] | str]:
    """A server's greedy continuations, several in flight: token ids where it returns them, else text."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def one(prompt: Sequence[int]) -> list[int] | str:
        body = {"model": model, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with opener.open(request, timeout=300) as response:
            choice = json.load(response)["choices"][0]
        ids: list[int] | None = choice.get("token_ids")
        return ids if ids else str(choice["text"])

    with ThreadPoolExecutor(_IN_FLIGHT) as threads:
        return list(threads.map(one, asked))


def agreement(given: Sequence[list[int] | str], expected: Sequence[list[int]], tokenizer: Tokenizer) -> Agreement:
    """Compares answers with the reference. Texts are compared with the reference's tokens as text, which may hide a difference in ids."""
    first: dict[str, int] = {}
    for index, (answer, tokens) in enumerate(zip(given, expected, strict=True)):
        wanted: Sequence[object] = tokens if isinstance(answer, list) else tokenizer.decode(tokens, skip_special_tokens=False)
        if isinstance(answer, str) and _bare(answer) == _bare(str(wanted)):
            continue
        if list(answer) != list(wanted):
            pairs = enumerate(zip(answer, wanted, strict=False))
            first[str(index)] = next((at for at, (a, b) in pairs if a != b), min(len(answer), len(wanted)))
    return Agreement(len(expected) - len(first), len(expected), first, sum(isinstance(answer, str) for answer in given))


def _bare(text: str) -> str:
    """A text without what servers leave out of it: special tokens, and the space before a first word."""
    for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        text = text.replace(special, "")
    return text.strip()


if __name__ == "__main__":
    json.dump(ask(sys.argv[1], sys.argv[2], prompts(Path(sys.argv[3]))), sys.stdout)
