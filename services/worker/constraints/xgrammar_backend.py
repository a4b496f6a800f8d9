"""The backend `xgrammar`: a pushdown automaton whose masks are computed while compiling, which is what crosses to the worker.

The library ignores much of JSON Schema and writes some strings that are no JSON; services.worker.constraints.xgrammar_schemas refuses the
one and spells the other, so that its outputs are instances of the client's schema too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xgrammar

from libs.constraints import Constraint, ConstraintKind
from libs.models.directory import ModelDirectory
from services.worker.constraints.base import MatcherBroken, Words, refused
from services.worker.constraints.ebnf import is_ebnf, read_ebnf
from services.worker.constraints.expressions import RuleSet, check, one_of
from services.worker.constraints.lark import check_lark
from services.worker.constraints.regexes import read_regex
from services.worker.constraints.schemas import read_schema
from services.worker.constraints.spelling import ebnf_of
from services.worker.constraints.tags import read_tag, with_leaves
from services.worker.constraints.vocabulary import Vocabulary, read_vocabulary
from services.worker.constraints.xgrammar_json import json_grammar
from services.worker.constraints.xgrammar_schemas import for_xgrammar


class XgrammarMatcher:
    """See Matcher."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, outside: Words) -> None:
        """`outside`: bits of a mask that stand for no id, which the library sets."""
        self._matcher = matcher
        self._outside = outside

    def fill(self, words: Words) -> None:
        """See Matcher."""
        try:
            self._matcher.fill_next_token_bitmask(words.reshape(1, -1), 0)
        except RuntimeError as error:
            raise MatcherBroken(_reason(error)) from error
        words &= ~self._outside

    def accept(self, token: int) -> None:
        """See Matcher."""
        if not self._matcher.accept_token(token):
            raise MatcherBroken(f"token {token} is not allowed")

    @property
    def may_end(self) -> bool:
        """See Matcher."""
        return bool(self._matcher.is_completed())


class XgrammarGrammar:
    """See Grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, outside: Words) -> None:
        self._compiled, self._outside = compiled, outside
        self.size = int(compiled.memory_size_bytes)

    def matcher(self) -> XgrammarMatcher:
        """See Grammar."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._outside)


class XgrammarBackend:
    """See Backend."""

    name = "xgrammar"

    def __init__(self, model: ModelDirectory) -> None:
        """Raises TokenloomError(UNSUPPORTED) when the model's tokenizer cannot be read."""
        vocabulary = read_vocabulary(model)
        self.vocab_size, self.endings = vocabulary.size, vocabulary.endings
        self._info = _tokenizer_info(vocabulary)
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._outside = _bits_from(vocabulary.size)

    def compile(self, constraint: Constraint) -> bytes:
        """See Backend."""
        try:
            return str(self._compiled(constraint).serialize_json()).encode()
        except (RuntimeError, ValueError) as error:
            raise refused(_reason(error)) from error

    def load(self, compiled: bytes) -> XgrammarGrammar:
        """See Backend."""
        return XgrammarGrammar(xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._info), self._outside)

    def _compiled(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                return self._json(for_xgrammar(read_schema(constraint.text)), compact=constraint.compact)
            case ConstraintKind.JSON_OBJECT:
                return self._json({"type": "object"}, compact=constraint.compact)
            case ConstraintKind.REGEX:
                return self._rules(read_regex(constraint.text))
            case ConstraintKind.CHOICE:
                return self._compiler.compile_grammar(ebnf_of(RuleSet({"root": one_of(constraint.texts)})))
            case ConstraintKind.GRAMMAR if is_ebnf(constraint.text):
                return self._rules(read_ebnf(constraint.text))
            case ConstraintKind.GRAMMAR:
                check_lark(constraint.text)
                return self._compiler.compile_lark(constraint.text)
            case ConstraintKind.STRUCTURAL_TAG:
                node = with_leaves(read_tag(constraint.text), lambda leaf: _leaf(leaf, compact=constraint.compact))
                return self._compiler.compile_structural_tag({"type": "structural_tag", "format": node})

    def _rules(self, rules: RuleSet) -> xgrammar.CompiledGrammar:
        check(rules)
        return self._compiler.compile_grammar(ebnf_of(rules))

    def _json(self, schema: dict[str, Any], *, compact: bool) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_grammar(json_grammar(schema, compact=compact))


def _tokenizer_info(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """Ids without bytes are what the library takes for special ones: they match no text."""
    tokens = [b"" if index in vocabulary.special else token for index, token in enumerate(vocabulary.tokens)]
    return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.endings))


def _leaf(node: dict[str, Any], *, compact: bool) -> dict[str, Any]:
    """A format of a structural tag that holds a schema, a pattern or a grammar, as the library is to read it."""
    match node["type"]:
        case "json_schema":
            return {"type": "grammar", "grammar": json_grammar(for_xgrammar(node["json_schema"]), compact=compact)}
        case "regex":
            return {"type": "grammar", "grammar": ebnf_of(read_regex(node["pattern"]))}
        case _:
            return {"type": "grammar", "grammar": ebnf_of(read_ebnf(node["grammar"]))}


def _bits_from(size: int) -> Words:
    """A mask's bits from `size` on."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[size:] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _reason(error: Exception) -> str:
    """The library's sentence, without the place in its sources."""
    text = str(error).strip().partition("\n")[0]
    if "bad_alloc" in text:
        return "compiling the constraint took too much memory"
    return text.rpartition(".cc:")[2].partition(": ")[2] or text
