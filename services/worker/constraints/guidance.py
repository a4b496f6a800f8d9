"""The backend `llguidance` (vLLM's `guidance`): an Earley parser over lexemes that are matched by derivatives of regular expressions.

What crosses from the compiler's process is the grammar's text, checked: building its parser takes about a millisecond, within the limits
below, and lets go of the interpreter's lock.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from libs.constraints import Constraint, ConstraintKind
from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from services.worker.constraints.base import MatcherBroken, Words, refused
from services.worker.constraints.ebnf import is_ebnf, read_ebnf
from services.worker.constraints.expressions import MAX_SIZE, Expression, RuleSet, check, expanded, expanded_size, one_of
from services.worker.constraints.lark import check_lark
from services.worker.constraints.numbers import for_llguidance
from services.worker.constraints.regexes import read_regex, read_search
from services.worker.constraints.schemas import read_schema, rewritten
from services.worker.constraints.spelling import lark_of, regex_of
from services.worker.constraints.tags import lark_of_tag, read_tag

# What a mask may cost in the worst case is what the rows beside it wait for. An object takes four items for each property that may come
# next: 1,200 optional ones fit, with masks of 3 ms on average and 35 ms at worst. Of the lexer's fuel a fifth of the library's default.
LIMITS = LLParserLimits(
    max_items_in_row=5000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=200_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=True,
    verbose_errors=False,
)
# White space between JSON tokens, as people write it: a few blanks, or a new line and what it is indented by.
WHITE_SPACE = r"[ \t]{0,4}|\r?\n[ \t]{0,16}"


class GuidanceMatcher:
    """See Matcher."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, words: Words) -> None:
        """See Matcher."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        """See Matcher."""
        if not self._matcher.consume_token(token):
            self._check()
            raise MatcherBroken(f"token {token} is not allowed")

    @property
    def may_end(self) -> bool:
        """See Matcher."""
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MatcherBroken(_reason(self._matcher.get_error()))


class GuidanceGrammar:
    """See Grammar. Keeps a matcher that has seen nothing and hands out copies: they share its lexer's states."""

    def __init__(self, pristine: LLMatcher, size: int) -> None:
        self._pristine = pristine
        self.size = size

    def matcher(self) -> GuidanceMatcher:
        """See Grammar."""
        return GuidanceMatcher(self._pristine.deep_copy())


class GuidanceBackend:
    """See Backend."""

    name = "llguidance"

    def __init__(self, model: ModelDirectory) -> None:
        """Raises TokenloomError(UNSUPPORTED) when the model's tokenizer cannot be read.

        The library reads tokenizer.json by itself, without a call into Python.
        """
        if not model.eos_token_ids:
            raise TokenloomError(ErrorCode.UNSUPPORTED, "the model names no end of sequence, so that constrained outputs could not end")
        try:
            self._tokenizer = _tokenizer_of(model)
            self.endings = tuple(model.eos_token_ids)
            self.vocab_size: int = self._tokenizer.vocab_size
        except Exception as error:  # the library has no class of its own for this
            raise TokenloomError(ErrorCode.UNSUPPORTED, f"llguidance cannot read {model.tokenizer_file}: {error}") from error

    def compile(self, constraint: Constraint) -> bytes:
        """See Backend."""
        text = _grammar_text(constraint)
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, self._tokenizer, limits=LIMITS)
        if failed or messages:
            raise refused(_reason(messages[0]))
        return text.encode()

    def load(self, compiled: bytes) -> GuidanceGrammar:
        """See Backend."""
        pristine = LLMatcher(self._tokenizer, compiled.decode(), log_level=0, limits=LIMITS)
        if pristine.is_error():
            raise refused(_reason(pristine.get_error()))
        return GuidanceGrammar(pristine, _BYTES_PER_GRAMMAR + 20 * len(compiled))


class _Texts:
    """A tokenizer as the library takes it from Python: the bytes of each id, and which ids are no text."""

    bos_token_id = None

    def __init__(self, tokenizer: LLTokenizer, texts: Collection[int]) -> None:
        """`texts`: ids that `tokenizer` counts as no text, and that are."""
        self.eos_token_id = tokenizer.eos_token
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [token for token in ids if tokenizer.is_special_token(token) and token not in texts]
        # The library spells an id that is not in the vocabulary by its number.
        self.tokens = [b"" if (found := tokenizer.decode_bytes([token])) == b"<[%d]>" % token else found for token in ids]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text. The library asks where it forces one spelling, which no grammar of ours lets it do."""
        return self._tokenizer.tokenize_bytes(text)


def _tokenizer_of(model: ModelDirectory) -> LLTokenizer:
    """The model's vocabulary. An added token that tokenizer.json does not call special is text (`<tool_call>` in some models), and the
    library, which goes by the look of it, is told so: else the model could not write the very token that it learned.
    """
    path, ending = model.tokenizer_file, model.eos_token_ids[0]
    tokenizer = LLTokenizer(str(path), eos_token=ending)
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", ())
    texts = {token["id"] for token in added if not token["special"] and token["id"] not in model.eos_token_ids}
    texts = {token for token in texts if token < tokenizer.vocab_size and tokenizer.is_special_token(token)}
    return LLTokenizer(TokenizerWrapper(_Texts(tokenizer, texts)), eos_token=ending) if texts else tokenizer


# A fresh matcher takes some 10 KiB (measured over 200 schemas); the states of its lexer come with use, and grow with the grammar's text.
_BYTES_PER_GRAMMAR = 64 * 1024
# Where only one text may follow, the library would allow its one spelling by the tokenizer. That spelling has added tokens in it, which no
# text matches: "<think>" could not be written. Last in the text, since a later directive wins over a client's own.
_ANY_SPELLING = '%llguidance {"no_forcing": true}'


def _grammar_text(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_lark(f"{_lark(constraint)}\n{_ANY_SPELLING}\n")


def _lark(constraint: Constraint) -> str:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return f"start: {_json(read_schema(constraint.text), constraint.compact)}"
        case ConstraintKind.JSON_OBJECT:
            return f"start: {_json({'type': 'object'}, constraint.compact)}"
        case ConstraintKind.REGEX:
            return _rules(read_regex(constraint.text))
        case ConstraintKind.CHOICE:
            return _lexeme(one_of(constraint.texts))
        case ConstraintKind.GRAMMAR if is_ebnf(constraint.text):
            return _rules(read_ebnf(constraint.text))
        case ConstraintKind.GRAMMAR:
            check_lark(constraint.text)
            return constraint.text
        case ConstraintKind.STRUCTURAL_TAG:
            return lark_of_tag(read_tag(constraint.text), lambda schema: _json(schema, constraint.compact))


def _spelled(schema: dict[str, Any]) -> dict[str, Any]:
    """A checked schema with the patterns and the bounds of numbers that the library keeps to."""

    def change(place: str, node: dict[str, Any]) -> dict[str, Any]:
        bounded = for_llguidance(place, node)
        return {**bounded, "pattern": _pattern(node["pattern"])} if "pattern" in node else bounded

    return rewritten(schema, change, keys=_pattern)


def _pattern(pattern: str) -> str:
    """A schema's pattern, spelled so that the library means by it what Python does."""
    return f"^(?:{regex_of(read_search(pattern))})$"


def _rules(rules: RuleSet) -> str:
    """Rules without recursion are one lexeme, which is matched fastest; others are read character by character."""
    check(rules)
    size = expanded_size(rules)
    return _lexeme(expanded(rules)) if size is not None and size <= MAX_SIZE else lark_of(rules)


def _lexeme(expression: Expression) -> str:
    """`regex_of` spells whatever is no letter or digit by its number, so that no slash ends it early."""
    return f"start: /{regex_of(expression)}/"


def _json(schema: dict[str, Any], compact: bool) -> str:
    """A schema within Lark. A schema may bring options of its own under `x-guidance`: the client's wishes, which ours replace."""
    options = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not compact,
        "whitespace_pattern": None if compact else WHITE_SPACE,
        "coerce_one_of": False,
        "lenient": False,
    }
    return f"%json {json.dumps({**_spelled(schema), 'x-guidance': options})}"


# What stands in the library's own words, and ours for it.
_REASONS = {
    "items; max is": "too many alternatives may come next at one place (an object with over 1,200 optional properties?)",
    "Too many items": "too many alternatives may come next at one place",
    "coerce_one_of": "oneOf is kept to only where its alternatives exclude each other by their types or by a const of the same property",
    "symbols.len()": "the grammar has too many parts",
    "memory allocation": "it takes too much memory",
}


def _reason(message: str) -> str:
    line = message.strip().partition("\n")[0]
    line = line.rpartition("failed to compile JSON schema: ")[2]
    return next((ours for theirs, ours in _REASONS.items() if theirs in line), line)
