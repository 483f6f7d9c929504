"""llama.cpp's forms of a prompt: texts, token ids, both in one sequence, and objects with a text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from app.api.schemas import MAX_PARTS, MAX_PROMPTS
from app.service.service import Service

# A prompt is a text, token ids, or texts and ids in one sequence.
PromptParts = str | tuple[str | int, ...]


def _validate_prompts(value: Any, max_prompts: int = MAX_PROMPTS) -> tuple[PromptParts, ...]:
    """Return the prompts. A list with an id in it is one prompt; any other list has one prompt in each place."""
    if isinstance(value, str | dict):
        return (_validate_prompt(value),)
    if isinstance(value, list) and value and int in set(map(type, value)):
        return (_validate_parts(value),)
    if isinstance(value, list) and 0 < len(value) <= max_prompts:
        return tuple(_validate_prompt(one) for one in value)
    number = "" if max_prompts == sys.maxsize else f"1 to {max_prompts} of "
    raise ValueError(
        f"Input should be a string, a list of strings and token ids, or a list of {number}these, not empty"
    )


def _validate_inputs(value: Any) -> tuple[PromptParts, ...]:
    """Return the inputs of an encoder, which checks their number itself."""
    inputs = _validate_prompts(value, sys.maxsize)
    mixed = [one for one in inputs if not isinstance(one, str) and str in set(map(type, one))]
    if sum(isinstance(part, str) for one in mixed for part in one) > MAX_PARTS:  # each is tokenized apart
        raise ValueError(f"Input should have at most {MAX_PARTS} strings next to token ids")
    return inputs


def _validate_prompt(value: Any) -> PromptParts:
    """Return one prompt. An object has it as `prompt_string` or as parts of `content`; images are not read."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        return _validate_parts(value)
    if not value.get("multimodal_data") and isinstance(value.get("prompt_string"), str):
        return str(value["prompt_string"])
    content = value.get("content")
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    raise ValueError(
        'Input objects should be {"prompt_string": "…"} or {"content": [{"type": "text", "text": "…"}]}, without images'
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _validate_parts(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, list) or not value or not set(map(type, value)) <= {str, int}:
        raise ValueError("Input should be a list of strings and token ids, not empty")
    if sum(isinstance(part, str) for part in value) > MAX_PARTS:  # each is tokenized apart
        raise ValueError(f"Input should have at most {MAX_PARTS} strings in one prompt")
    return tuple(value)


_PARTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
_ONE = [{"type": "string"}, {"type": "object"}, _PARTS]
_SCHEMA = WithJsonSchema({"anyOf": [*_ONE, {"type": "array", "items": {"anyOf": _ONE}}]})
LlamaCppPrompts = Annotated[Any, AfterValidator(_validate_prompts), _SCHEMA]
LlamaCppInputs = Annotated[Any, AfterValidator(_validate_inputs), _SCHEMA]


async def joined_ids(service: Service, parts: Sequence[str | int]) -> tuple[int, ...]:
    """Return the token ids of texts and ids in one sequence. Special tokens are added at its beginning only."""
    if str not in set(map(type, parts)):
        return tuple(part for part in parts if isinstance(part, int))
    ids: list[int] = []
    for place, part in enumerate(parts):
        ids += [part] if isinstance(part, int) else await service.tokenize(part, place == 0)
    return tuple(ids)
