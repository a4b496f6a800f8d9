"""Typed access to a model directory: config.json, tokenizer.json, templates, generation defaults and the weights beside them.

Everything is read when first asked for, so that the tokenizer service does not touch weights and the worker no templates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from libs.errors import ErrorCode, TokenloomError
from libs.models.llama_config import LlamaConfig

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Fields of generation_config.json that change sampling in Hugging Face's generate and that the mesh does not have yet.
_UNBUILT_SAMPLING = {"no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0}
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json sets where a request does not; None: it says nothing. As in vLLM, do_sample is not looked at.

    `unbuilt` names sampling fields of the file that have an effect elsewhere and none here; the worker warns about them.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    unbuilt: tuple[str, ...] = ()


class ModelDirectory:
    """One model's files. Raises TokenloomError(INVALID_REQUEST) when `path` is no model directory or a file in it is broken."""

    def __init__(self, path: Path | str, chat_template: str = "") -> None:
        """`chat_template`: the operator's, in place of the model's own: a file, or the template itself. Empty: the model's."""
        self.path = Path(path)
        self._given_template = chat_template
        for name in ("config.json", "tokenizer.json"):
            if not (self.path / name).is_file():
                raise _broken(f"{self.path} is no model directory: it has no {name}")

    @property
    def name(self) -> str:
        """The directory's name, which is the default served model name."""
        return self.path.resolve().name

    @cached_property
    def config(self) -> LlamaConfig:
        """The model's shape. Raises TokenloomError(UNSUPPORTED) when this version cannot serve it."""
        return LlamaConfig.from_json(self._json("config.json"))

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding, of any architecture: every id below it may stand in a prompt."""
        size = self._json("config.json").get("vocab_size")
        if not isinstance(size, int):
            raise _broken(f"{self.path / 'config.json'} has no vocab_size")
        return size

    @property
    def tokenizer_file(self) -> Path:
        """tokenizer.json."""
        return self.path / "tokenizer.json"

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template; None: the model has none."""
        if self._given_template:
            return _template_of(self._given_template)
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        return self._named_templates.get("default")

    @cached_property
    def tool_template(self) -> str | None:
        """The template of chats with tools, where the model has one of its own for these; None: chat_template serves for all chats."""
        if self._given_template or (self.path / "chat_template.jinja").is_file():
            return None
        return self._named_templates.get("tool_use")

    @cached_property
    def _named_templates(self) -> dict[str, str]:
        """The templates in tokenizer_config.json: one, or several by name, as transformers 4 saved them."""
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            return {entry["name"]: entry["template"] for entry in template}
        return {} if template is None else {"default": template}

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Template variables such as bos_token and eos_token, and the text of each."""
        found = {name: _token_text(self._tokenizer_config.get(name)) for name in _SPECIAL_TOKEN_NAMES}
        return {name: text for name, text in found.items() if text is not None}

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence. The first is the tokenizer's own, which ends without a stop_reason, as in vLLM."""
        ids: list[int] = []
        text = self.special_tokens.get("eos_token")
        if text is not None:
            ids.extend(self._ids_of(text))
        for source in (self._json("generation_config.json", optional=True), self._json("config.json")):
            ids.extend(_id_list(source.get("eos_token_id")))
        return tuple(dict.fromkeys(ids))

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """The sampling defaults of generation_config.json."""
        config = self._json("generation_config.json", optional=True)
        return GenerationDefaults(
            temperature=config.get("temperature"),
            top_p=config.get("top_p"),
            top_k=config.get("top_k"),
            min_p=config.get("min_p"),
            max_new_tokens=config.get("max_new_tokens"),
            repetition_penalty=config.get("repetition_penalty"),
            unbuilt=tuple(name for name, neutral in _UNBUILT_SAMPLING.items() if config.get(name) not in (None, neutral)),
        )

    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files that hold the weights, or the one GGUF file. Raises TokenloomError(INVALID_REQUEST) when there are none."""
        index = self._json("model.safetensors.index.json", optional=True)
        if index:
            names = index.get("weight_map")
            if not isinstance(names, dict):
                raise _broken(f"{self.path / 'model.safetensors.index.json'} has no weight_map")
            files = sorted({self.path / name for name in names.values()})
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise _broken(f"{self.path} lacks the weight files {', '.join(missing)}")
            return tuple(files)
        safetensors = tuple(file for file in sorted(self.path.glob("*.safetensors")) if not file.name.startswith("consolidated"))
        if safetensors:
            return safetensors
        ggufs = tuple(sorted(self.path.glob("*.gguf")))
        if len(ggufs) != 1:
            raise _broken(
                f"{self.path} has {len(ggufs) or 'no'} GGUF files and no safetensors; weights must be safetensors or exactly one GGUF"
            )
        return ggufs

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """SHA-256 (hex) over tokenizer.json and chat templates: equal means the same ids for the same text."""
        digest = hashlib.sha256(self.tokenizer_file.read_bytes())
        digest.update(b"\0" + (self.chat_template or "").encode())
        if self.tool_template is not None:
            digest.update(b"\0" + self.tool_template.encode())
        return digest.hexdigest()

    @cached_property
    def model_fingerprint(self) -> str:
        """SHA-256 (hex) over config.json and the weights' identity: names, sizes and samples spread over each file, not every byte."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in self.weight_files():
            size = file.stat().st_size
            digest.update(f"\0{file.name}\0{size}\0".encode())
            with file.open("rb") as stream:
                for index in range(_SAMPLES):
                    stream.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return self._json("tokenizer_config.json", optional=True)

    def _ids_of(self, text: str) -> Iterable[int]:
        tokenizer = self._json("tokenizer.json")
        added = [entry["id"] for entry in tokenizer.get("added_tokens") or () if entry["content"] == text]
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        return added or ([vocabulary[text]] if isinstance(vocabulary, dict) and text in vocabulary else [])

    def _json(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        file = self.path / name
        if optional and not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _broken(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise _broken(f"{file} does not hold a JSON object")
        return content


def _template_of(given: str) -> str:
    """A template that was given as the name of a file or as itself, in one line in which `\\n` stands for a line break (as vLLM reads it).

    Raises TokenloomError(INVALID_REQUEST) for what is neither.
    """
    if "{{" in given or "{%" in given:
        return given.replace("\\n", "\n")
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        message = f"chat_template: {given[:256]!r} has no {{{{ or {{% in it, as a template would, and cannot be read: {error}"
        raise TokenloomError(ErrorCode.INVALID_REQUEST, message, param="chat_template") from error


def _broken(message: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message)


def _token_text(token: Any) -> str | None:
    """A token of tokenizer_config.json: its text, or an object that holds the text."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _id_list(value: Any) -> list[int]:
    """The ids of an `eos_token_id`: absent, one, or several. Raises TokenloomError(INVALID_REQUEST) when one is no token id."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < 2**32:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"eos_token_id {item!r} is no token id", param="eos_token_id")
    return ids
