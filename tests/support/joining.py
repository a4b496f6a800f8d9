"""The choices that a client puts together from the chunks of a stream, and those of a whole response, in one form to compare."""

from __future__ import annotations

from typing import Any


def joined_choices(chunks: list[dict[str, Any]], api: str, n: int) -> list[dict[str, Any]]:
    """The choices that a client of a stream puts together."""
    found: list[dict[str, Any]] = [{"index": index, "ended": False} for index in range(n)]
    for chunk in chunks[:-1]:
        (part,) = chunk["choices"]
        choice = found[part["index"]]
        assert not choice["ended"], "nothing of a choice comes after its finish_reason"
        choice["ended"] = part["finish_reason"] is not None
        if choice["ended"]:
            choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
        for name in ("token_ids", "prompt_token_ids"):
            if name in part:
                choice[name] = choice.get(name, []) + part[name]
        for name, values in (part["logprobs"] or {}).items():
            if values is not None:
                choice[f"of {name}"] = choice.get(f"of {name}", []) + values
        _add_text(choice, part, api)
    return found


def _add_text(choice: dict[str, Any], part: dict[str, Any], api: str) -> None:
    if api == "completion":
        choice["text"] = choice.get("text", "") + part["text"]
        return
    delta = part["delta"]
    for name in ("role", "content", "reasoning_content", "reasoning"):
        choice[name] = choice.get(name, "") + delta.get(name, "")
    calls = choice.setdefault("tool_calls", [])
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(calls):
            assert call["type"] == "function"
            assert call["id"].startswith("chatcmpl-tool-")
            calls.append({"name": call["function"]["name"], "arguments": ""})
        else:
            assert set(call) == {"index", "function"}, "id, type and name come once"
            assert set(call["function"]) == {"arguments"}
        calls[call["index"]]["arguments"] += call["function"]["arguments"]


def flat_choice(choice: dict[str, Any], api: str) -> dict[str, Any]:
    """A choice of a whole response in the same form."""
    flat = {name: choice[name] for name in ("index", "finish_reason", "stop_reason")} | {"ended": True}
    flat |= {name: choice[name] for name in ("token_ids", "prompt_token_ids") if name in choice}
    flat |= {f"of {name}": values for name, values in (choice["logprobs"] or {}).items() if values is not None}
    if api == "completion":
        return flat | {"text": choice["text"]}
    message = choice["message"]
    flat |= {name: message.get(name) or "" for name in ("role", "content", "reasoning_content", "reasoning")}
    return flat | {"tool_calls": [call["function"] for call in message.get("tool_calls", ())]}
