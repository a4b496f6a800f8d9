"""Structural tags: free text in which triggers begin constrained pieces, in vLLM's shapes.

    older   {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}
    newer   {"format": {"type": ..., ...}}, formats within formats

Both backends take the formats below; any other is refused by name, so that a tag means the same with each of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.worker.constraints.base import refused
from services.worker.constraints.ebnf import read_ebnf
from services.worker.constraints.expressions import RuleSet, check, literal
from services.worker.constraints.regexes import read_regex
from services.worker.constraints.schemas import check_schema
from services.worker.constraints.spelling import lark_rules

MAX_DEPTH = 32

# Fields of each format that is taken: required ones, then those that may be left out with their defaults.
_FORMATS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "const_string": (("value",), {}),
    "json_schema": (("json_schema",), {}),
    "regex": (("pattern",), {}),
    "grammar": (("grammar",), {}),
    "sequence": (("elements",), {}),
    "or": (("elements",), {}),
    "optional": (("content",), {}),
    "star": (("content",), {}),
    "plus": (("content",), {}),
    "tag": (("begin", "content", "end"), {}),
    "triggered_tags": (("triggers", "tags"), {"at_least_one": False, "stop_after_first": False}),
    "tags_with_separator": (("tags", "separator"), {"at_least_one": False, "stop_after_first": False}),
}


def read_tag(text: str) -> dict[str, Any]:
    """The format of a structural tag, in the newer shape, checked. Raises TokenloomError(INVALID_CONSTRAINT)."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"the structural tag is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("type", "structural_tag") != "structural_tag":
        raise refused("a structural tag is an object of the type structural_tag")
    if "structures" in content:
        return _format("structures", _older(content), 0, last=True)
    if "format" not in content:
        raise refused("a structural tag has a format, or structures and triggers")
    return _format("format", content["format"], 0, last=True)


def _older(content: Mapping[str, Any]) -> dict[str, Any]:
    tags = []
    for index, item in enumerate(_list("structures", content["structures"])):
        if not isinstance(item, dict) or not {"begin", "schema", "end"} <= item.keys():
            raise refused(f"structures[{index}] has begin, schema and end")
        schema = json.loads(item["schema"]) if isinstance(item["schema"], str) else item["schema"]
        inner = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": item["begin"], "content": inner, "end": item["end"]})
    return {"type": "triggered_tags", "triggers": content.get("triggers"), "tags": tags}


def _format(place: str, node: Any, depth: int, *, last: bool) -> dict[str, Any]:
    """A checked format with all its fields. `last`: nothing follows it, so that free text may stand in it."""
    if depth > MAX_DEPTH:
        raise refused(f"{place}: formats are nested more than {MAX_DEPTH} deep")
    kind = str(node.get("type")) if isinstance(node, dict) else ""
    if kind not in _FORMATS:
        raise refused(f"{place}: the format {kind!r} is not supported; supported are {', '.join(_FORMATS)}")
    required, optional = _FORMATS[kind]
    missing, unknown = [name for name in required if name not in node], sorted(node.keys() - {"type", *required, *optional})
    if missing or unknown:
        raise refused(f"{place}: a format {kind} {f'needs {missing[0]}' if missing else f'has no {unknown[0]}'}")
    found = {"type": kind, **optional, **{name: value for name, value in node.items() if name != "type"}}
    _check_texts(place, found)
    if kind == "json_schema":
        found["json_schema"] = check_schema(found["json_schema"])
    if "content" in found:
        found["content"] = _format(f"{place}.content", found["content"], depth + 1, last=False)
    for name in ("elements", "tags"):
        if name in found:
            items = _list(f"{place}.{name}", found[name])
            ends = [last and kind != "triggered_tags" and (kind == "or" or index == len(items) - 1) for index in range(len(items))]
            pairs = zip(items, ends, strict=True)
            found[name] = [_format(f"{place}.{name}[{index}]", item, depth + 1, last=end) for index, (item, end) in enumerate(pairs)]
    if kind == "triggered_tags" and not last:
        raise refused(f"{place}: triggered_tags stand where nothing follows them, since free text has no end")
    return found


def _check_texts(place: str, found: Mapping[str, Any]) -> None:
    for name in ("value", "pattern", "grammar", "begin", "end", "separator"):
        if not isinstance(found.get(name, ""), str):
            raise refused(f"{place}.{name} is a text")
    for trigger in _list(f"{place}.triggers", found["triggers"]) if "triggers" in found else ():
        if not isinstance(trigger, str) or not trigger:
            raise refused(f"{place}.triggers are texts, none of them empty")
    if "pattern" in found:
        check(read_regex(found["pattern"]))
    if "grammar" in found:
        check(read_ebnf(found["grammar"]))
    if found["type"] == "triggered_tags":
        for tag in _list(f"{place}.tags", found["tags"]):
            if not isinstance(tag, dict) or tag.get("type") != "tag" or not str(tag.get("begin", "")).startswith(tuple(found["triggers"])):
                raise refused(f"{place}.tags are tags whose begin starts with one of the triggers")


def _list(place: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise refused(f"{place} is a list of at least one")
    return value


def with_leaves(node: dict[str, Any], spell: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The same format with what `spell` makes of its formats json_schema, regex and grammar."""
    if node["type"] in ("json_schema", "regex", "grammar"):
        return spell(node)
    changed = dict(node)
    if "content" in node:
        changed["content"] = with_leaves(node["content"], spell)
    for name in ("elements", "tags"):
        if name in node:
            changed[name] = [with_leaves(item, spell) for item in node[name]]
    return changed


@dataclass(slots=True)
class _Lark:
    """Rules of a Lark grammar as they are written."""

    lines: list[str]
    count: int = 0

    def name(self) -> str:
        """A new rule's name."""
        self.count += 1
        return f"f{self.count}"

    def rules(self, rules: RuleSet) -> str:
        """The name of a rule for some rules of expressions."""
        name = self.name()
        self.lines.extend(lark_rules(rules, name))
        return name

    def text(self, text: str) -> str:
        """What stands for a fixed text; nothing for none."""
        return self.rules(RuleSet({"root": literal(text)})) if text else ""


def lark_of_tag(node: dict[str, Any], json_rule: Callable[[dict[str, Any]], str]) -> str:
    """A checked format in llguidance's Lark; `json_rule` writes what a schema is within it."""
    lark = _Lark(["TEXT: /(?s:.)*/"])
    top = _spell(lark, node, json_rule)
    return "\n".join((f"start: {top}", *lark.lines))


def _spell(lark: _Lark, node: dict[str, Any], json_rule: Callable[[dict[str, Any]], str]) -> str:
    def inner(item: dict[str, Any]) -> str:
        return _spell(lark, item, json_rule)

    match node["type"]:
        case "const_string":
            return lark.text(node["value"]) or '""'
        case "json_schema":
            return json_rule(node["json_schema"])
        case "regex":
            return lark.rules(read_regex(node["pattern"]))
        case "grammar":
            return lark.rules(read_ebnf(node["grammar"]))
        case "sequence":
            return f"({' '.join(map(inner, node['elements']))})"
        case "or":
            return f"({' | '.join(map(inner, node['elements']))})"
        case "optional" | "star" | "plus" as kind:
            return f"({inner(node['content'])}){ {'optional': '?', 'star': '*', 'plus': '+'}[kind] }"
        case "tag":
            return f"({lark.text(node['begin'])} {inner(node['content'])} {lark.text(node['end'])})"
        case "tags_with_separator":
            return _separated(node, f"({' | '.join(map(inner, node['tags']))})", lark.text(node["separator"]))
        case _:
            return _triggered(lark, node, json_rule)


def _separated(node: dict[str, Any], tag: str, separator: str) -> str:
    several = tag if node["stop_after_first"] else f"{tag} ({separator} {tag})*"
    return f"({several})" if node["at_least_one"] else f"({several})?"


def _triggered(lark: _Lark, node: dict[str, Any], json_rule: Callable[[dict[str, Any]], str]) -> str:
    """Text up to the first trigger is a lazy lexeme: as soon as one stands there, what follows is constrained.

    With `at_least_one` the first tag begins at once, as xgrammar has it.
    """

    def rest_of(tag: dict[str, Any], written: int) -> str:
        return f"({lark.text(tag['begin'][written:])} {_spell(lark, tag['content'], json_rule)} {lark.text(tag['end'])})"

    branches = []
    for trigger in node["triggers"]:
        tags = [tag for tag in node["tags"] if tag["begin"].startswith(trigger)]
        if tags:
            head = lark.name()
            lark.lines.append(f"{head}[lazy]: TEXT {json.dumps(trigger, ensure_ascii=False)}")
            branches.append(f"({head} ({' | '.join(rest_of(tag, len(trigger)) for tag in tags)}))")
    later = f"({' | '.join(branches)})"
    if not node["at_least_one"]:
        return f"({later} | TEXT)" if node["stop_after_first"] else f"({later}* TEXT)"
    first = f"({' | '.join(rest_of(tag, 0) for tag in node['tags'])})"
    return first if node["stop_after_first"] else f"({first} {later}* TEXT)"
