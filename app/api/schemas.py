"""Base classes of all request bodies: strict types, refusal of unknown fields, and the sampling fields."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, from_json

from app.api.errors import invalid_body
from app.api.json_size import LOOP_BYTES, check_num_values
from app.errors import InvalidRequest, UnsupportedParameter
from app.messages import MAX_BAD_WORDS, MAX_LOGIT_BIASES, SamplingParams

MAX_PROMPTS = 64  # prompts in one body; each becomes a separate request to the engine
MAX_MESSAGES = 4_096
MAX_PARTS = 128  # parts of one message
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 2**18

_MAX_ID_DIGITS = 10

# Python's integers have no bound; no valid value needs more than 64 bits.
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenIds = Annotated[
    Any,
    AfterValidator(lambda value: validate_token_ids(value)),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 1}),
]
BodyT = TypeVar("BodyT", bound="Body")


class Body(BaseModel):
    """A JSON object from a client. Unknown fields are refused by name, unless one of two tables lists them.

    Fields in IGNORED have no effect that a client could notice. Fields in NEUTRAL are accepted only with a value
    that requests nothing. Null requests nothing in any field. FOREIGN has fields of other dialects, each with a
    sentence that says what would be right: a body that has one is refused with it.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    FOREIGN: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema for the OpenAPI document: with the fields of both tables, and without any other."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        ignored: dict[str, Any] = {name: {} for name in sorted(cls.IGNORED)}
        neutral = {
            name: {"enum": [*(one for one in values if one is not None), None]} for name, values in cls.NEUTRAL.items()
        }
        schema["properties"] = ignored | neutral | schema.get("properties", {})
        schema["additionalProperties"] = False
        return schema

    def refuse_unknown(self, path: str = "") -> None:
        """Raise `UnsupportedParameter` for unknown fields and drop the ignored ones.

        Dropping frees memory: a list of a million empty lists would otherwise be kept as long as its request.
        """
        extra = self.model_extra or {}
        for name, value in extra.items():
            if value is None or name in self.IGNORED or value in self.NEUTRAL.get(name, ()):
                continue
            field = path + name
            if name not in self.NEUTRAL:
                advice = self.FOREIGN.get(name)
                sentence = f"{field} is not a parameter of this route" + (f": {advice}" if advice else ".")
                raise UnsupportedParameter(sentence, field=field)
            neutral = " or ".join(repr(accepted) for accepted in self.NEUTRAL[name] if accepted is not None)
            advice = f"leave it out, or send {neutral}" if neutral else "leave it out"
            raise UnsupportedParameter(f"{field} is not supported: {advice}.", field=field)
        extra.clear()
        for name in type(self).model_fields:
            _refuse_unknown_below(getattr(self, name), path + name)


def _refuse_unknown_below(value: Any, path: str) -> None:
    if isinstance(value, Body):
        value.refuse_unknown(f"{path}.")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            if isinstance(item, Body):
                item.refuse_unknown(f"{path}[{index}].")


class SamplingFields(Body):
    """Sampling parameters of all generating dialects. Absent and null mean the neutral value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[tuple[Int64, ...], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    seed: Int64 | None = None
    n: Int64 | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    min_tokens: Int64 | None = None
    bad_words: Annotated[tuple[str, ...], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[tuple[Int64, ...], Field(fail_fast=True, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = (
        None
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int64 | None = None

    def params(self, defaults: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> SamplingParams:
        """Return the sampling parameters; a None in `more` also means that the client gave no value.

        Args:
            defaults: Values of parameters that the client did not give.
            more: Further parameters.

        Raises:
            InvalidRequest: a value is out of range.
        """
        given = {name: getattr(self, name) for name in SamplingFields.model_fields} | more
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        given["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's value for all tokens
        given["include_stop"] = given.pop("include_stop_str_in_output")
        given["logit_bias"] = tuple(_token_biases(self.logit_bias or {}))
        return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def _token_biases(biases: Mapping[str, float]) -> Iterator[tuple[int, float]]:
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) < _MAX_ID_DIGITS):
            raise InvalidRequest(f"logit_bias must have token ids as its keys, not {name[:40]!r}.", field="logit_bias")
        yield int(name), bias


def parse_body(model: type[BodyT], body: bytes) -> BodyT:
    """Parse a body as `model`. Raises an `InvalidRequest` about the first error, or if it has too many values."""
    if len(body) > LOOP_BYTES:
        check_num_values(body)
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise _foreign_body(model, body) or invalid_body(error) from error
    parsed.refuse_unknown()
    return parsed


def _foreign_body(model: type[Body], body: bytes) -> UnsupportedParameter | None:
    """Return the error of a body of another dialect, whose missing fields would mislead; None if it is not one."""
    if not any(b'"%b"' % name.encode() in body for name in model.FOREIGN):
        return None
    try:
        given = from_json(body)
    except ValueError:
        return None
    names = given if isinstance(given, dict) else {}
    name = next((name for name in model.FOREIGN if names.get(name) is not None), None)
    if name is None:
        return None
    return UnsupportedParameter(f"{name} is not a parameter of this route: {model.FOREIGN[name]}", field=name)


def make_body(model: type[BodyT], **fields: Any) -> BodyT:
    """Return a body that another dialect's body was translated to. Raises an `InvalidRequest` about the first error."""
    try:
        return model(**fields)
    except ValidationError as error:
        raise invalid_body(error) from error


def validate_token_ids(value: Any) -> tuple[int, ...]:
    """Validate a list of token ids.

    The types are checked as a set. A million ids are checked in milliseconds, and wrong ones do not produce a
    million error messages.
    """
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        raise ValueError("Input should be a list of token ids, not empty")
    return tuple(value)


def validate_prompts(value: Any, max_prompts: int = MAX_PROMPTS) -> tuple[str | tuple[int, ...], ...]:
    """Convert OpenAI's four forms of a prompt to a tuple whose elements are texts or tuples of token ids."""
    if isinstance(value, str):
        return (value,)
    types = set(map(type, value)) if isinstance(value, list) else set()
    if types == {int}:
        return (tuple(value),)
    if types in ({str}, {list}):
        if len(value) > max_prompts:
            raise ValueError(f"Input should have at most {max_prompts} prompts, not {len(value)}")
        return tuple(text if isinstance(text, str) else validate_token_ids(text) for text in value)
    raise ValueError(
        "Input should be a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"
    )


_TEXTS_OR_IDS = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "integer"}},
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        ]
    }
)
Prompts = Annotated[Any, AfterValidator(validate_prompts), _TEXTS_OR_IDS]
# Prompts of an encoder, which takes more texts and checks their number itself.
Texts = Annotated[Any, AfterValidator(lambda value: validate_prompts(value, sys.maxsize)), _TEXTS_OR_IDS]
