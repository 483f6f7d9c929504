"""Base classes of all request bodies: strict types, fields that are refused or ignored, and the sampling fields."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, from_json

from app.api.errors import invalid_body
from app.errors import InvalidRequest, UnsupportedParameter
from app.messages import MAX_BAD_WORDS, MAX_LOGIT_BIASES, SamplingParams
from app.metrics.instruments import Api

MAX_PROMPTS = 64  # prompts in one body; each becomes a separate request to the engine
MAX_MESSAGES = 4_096
MAX_PARTS = 128  # parts of one message
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_CACHE_SALT = 1_024  # characters; every slot of the KV cache may keep one

_MAX_ID_DIGITS = 10
_MAX_NAMED_KEYS = 10  # wrong keys that an error names
_MAX_IGNORED_NAMES = 1_000  # of one body that are counted
_MAX_LOGGED = 256  # names of one kind that get a line in the log
_MAX_LOGGED_CHARACTERS = 100
_PLACE = re.compile(r"\[[0-9]+\]")

# Bodies up to this size are parsed on the event loop: in 0.2 ms, in 5 ms with as many values as fit.
LOOP_BYTES = 16 * 1024
# Values separated by commas: as many token ids as the longest contexts have, or 6 images of 3 × 224 × 224. Each takes 54 ns.
MAX_VALUES = 2**20
# Strings (also names of fields), lists and objects: 4,096 messages of a role and a text are 20,480. They take 170 ns each.
MAX_STRINGS_AND_LISTS = 65_536
_STEP_BYTES = 64 * 1024
# The rest of a string; possessive, so that nothing is remembered for another try.
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)

# Python's integers have no bound; no valid value needs more than 64 bits.
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)]
TokenIds = Annotated[
    Any,
    AfterValidator(lambda value: validate_token_ids(value)),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 1}),
]
BodyT = TypeVar("BodyT", bound="Body")
# Called with the API and the names of the ignored fields of a body that has any.
ReportIgnored = Callable[[Api, Collection[str]], None]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused, as advice to the client, and the values that are accepted because they request nothing."""

    advice: str
    neutral: tuple[Any, ...] = ()


def refused(advice: str, **neutral: Any) -> dict[str, Refusal]:
    """Return refusals with one advice. The names are given with the one value that requests nothing, or a tuple of these."""
    return {
        name: Refusal(advice, values if isinstance(values, tuple) else (values,)) for name, values in neutral.items()
    }


class Body(BaseModel):
    """A JSON object from a client. Unknown fields are ignored, unless one of two tables refuses them by name.

    Fields in REFUSED would change the answer. Each has the values that request nothing, which are accepted. FOREIGN has
    fields of other dialects that hold the prompt there, each with a sentence that says what would be right. Null
    requests nothing in any field. Ignored fields are counted for API.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    API: ClassVar[Api] = "native"
    REFUSED: ClassVar[Mapping[str, Refusal]] = {}
    FOREIGN: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema for the OpenAPI document: with the values that refused fields may have."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        named = {
            name: {"enum": [*(one for one in refusal.neutral if one is not None), None]}
            for name, refusal in cls.REFUSED.items()
        }
        schema["properties"] = named | {name: {"enum": [None]} for name in cls.FOREIGN} | schema.get("properties", {})
        schema["additionalProperties"] = True
        return schema

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Raise `UnsupportedParameter` for refused fields, and drop unknown ones, whose names go to `ignored`.

        Dropping frees memory: a list of a million empty lists would otherwise be kept as long as its request.

        Args:
            path: Where this object is in the body, such as `messages[0].`.
            ignored: Gets the paths of unknown fields, without the numbers of places in lists: `messages[].id`.
        """
        extra = self.model_extra or {}
        for name, value in extra.items():
            if value is None:
                continue
            if name in self.REFUSED or name in self.FOREIGN:
                self._check_refused(name, value, path)
            elif len(ignored) < _MAX_IGNORED_NAMES:
                ignored[_PLACE.sub("[]", path) + name] = None
        extra.clear()
        for name in self.model_fields_set:  # no other field has an object
            _check_fields_below(self.__dict__.get(name), path + name, ignored)

    def leave_out(self, path: str, kind: str | None, ignored: dict[str, None]) -> None:
        """Drop the fields of an object of a type that is left out, and count it: `tools[].type=web_search`."""
        if len(ignored) < _MAX_IGNORED_NAMES:
            ignored[f"{_PLACE.sub('[]', path)}type={kind}"] = None
        (self.model_extra or {}).clear()

    def _check_refused(self, name: str, value: Any, path: str) -> None:
        field = path + name
        if name in self.FOREIGN:
            raise UnsupportedParameter(f"{field} is not a parameter of this route: {self.FOREIGN[name]}", field=field)
        refusal = self.REFUSED[name]
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in refusal.neutral):
            return  # False is 0 to Python, and not to JSON
        neutral = " or ".join(repr(accepted) for accepted in refusal.neutral if accepted is not None)
        way = f"{refusal.advice}, or send {neutral}" if neutral else refusal.advice
        raise UnsupportedParameter(f"{field} is not supported: {way}.", field=field)


def _check_fields_below(value: Any, path: str, ignored: dict[str, None]) -> None:
    if isinstance(value, Body):
        value.check_fields(f"{path}.", ignored)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            if isinstance(item, Body):
                item.check_fields(f"{path}[{index}].", ignored)


LEAVE_OUT = "leave it out"
# Samplers of llama.cpp and of servers around it that this server does not have, with the values that turn them off.
OTHER_SAMPLERS: Mapping[str, Refusal] = refused(
    LEAVE_OUT,
    typical_p=1.0,
    typical=1.0,
    tfs_z=1.0,
    tfs=1.0,
    mirostat=0,
    mirostat_mode=0,
    dynatemp_range=0.0,
    xtc_probability=0.0,
    dry_multiplier=0.0,
    top_n_sigma=(-1.0, 0),
    top_a=0.0,
    epsilon_cutoff=0.0,
    eta_cutoff=0.0,
    penalty_alpha=0.0,
    smoothing_factor=0.0,
)


class KnownOrOther(Discriminator):
    """The choice, by `type`, between the objects of a list that are read (tag Known) and all others (tag Other).

    The types stand in the OpenAPI document, since a `oneOf` allows no value that fits both.
    """

    types: tuple[str, ...]

    def __init__(self, types: Iterable[str]) -> None:
        known = tuple(types)

        def tag(value: Any) -> str:
            kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
            return "Other" if isinstance(kind, str) and kind not in known else "Known"

        super().__init__(tag)
        object.__setattr__(self, "types", known)  # the base class is frozen

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the choice between both schemas, each with its types."""
        types = {"enum": [*self.types, None]}  # null only where the known object allows it
        pairs = zip(handler(core_schema)["oneOf"], (types, {"not": types}), strict=True)
        return {"oneOf": [{"allOf": [schema, {"properties": {"type": of}}]} for schema, of in pairs]}


def grammars_refused(advice: str) -> dict[str, Refusal]:
    """Return refusals of the fields with which OpenAI's routes, vLLM and SGLang make an answer follow a grammar."""
    names = "structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf".split()
    return refused(advice, response_format=({"type": "text"},), grammar="", **dict.fromkeys(names, ()))


_OPENAIS_ROUTES = "use /v1/completions or /v1/chat/completions"
# Fields of OpenAI's routes, vLLM and SGLang that change the answer and that the plainer routes do not have.
OPENAI_ONLY: Mapping[str, Refusal] = (
    grammars_refused(_OPENAIS_ROUTES)
    | refused(
        _OPENAIS_ROUTES,
        tools=([],),
        suffix="",
        echo=False,
        best_of=1,
        use_beam_search=False,
        prompt_logprobs=(),
        truncate_prompt_tokens=(),
    )
    | refused("use max_tokens", max_new_tokens=(), max_output_tokens=())
)


class SamplingFields(Body):
    """Sampling parameters of all generating dialects. Absent and null mean the neutral value.

    Only prompts with the same `cache_salt` share keys and values of a prefix.
    """

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
    cache_salt: CacheSalt | None = None

    def params(self, defaults: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> SamplingParams:
        """Return the sampling parameters; a None in `more` also means that the client gave no value.

        Args:
            defaults: Values of parameters that the client did not give.
            more: Further parameters.

        Raises:
            InvalidRequest: a value is out of range.
        """
        own = {name: self.__dict__[name] for name in self.model_fields_set & _SAMPLING_NAMES}
        given = {name: value for name, value in (own | more).items() if value is not None}
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        if self.top_k == -1:
            given["top_k"] = 0  # vLLM's value for all tokens
        if "include_stop_str_in_output" in given:
            given["include_stop"] = given.pop("include_stop_str_in_output")
        if self.logit_bias is not None:
            given["logit_bias"] = tuple(_token_biases(self.logit_bias))
        return SamplingParams(**{**_fitting(defaults, given), **given})


_SAMPLING_NAMES = SamplingFields.model_fields.keys() - {"cache_salt"}  # which is of the request


def _fitting(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that agree with what is given: beams only without sampling, a least length below the most."""
    fitting = dict(defaults)
    if given.get("temperature") or given.get("n", 1) > 1 or given.get("logprob_token_ids"):
        fitting.pop("beam_width", None)
    if "min_tokens" in fitting:
        fitting["min_tokens"] = min(fitting["min_tokens"], given.get("max_tokens", fitting["min_tokens"]))
    return fitting


def _token_biases(biases: Mapping[str, float]) -> Iterator[tuple[int, float]]:
    wrong = [name for name in biases if not (name.isascii() and name.isdigit() and len(name) < _MAX_ID_DIGITS)]
    if wrong:
        names = ", ".join(repr(name[:40]) for name in wrong[:_MAX_NAMED_KEYS])
        more = f" and {len(wrong) - _MAX_NAMED_KEYS} more" if len(wrong) > _MAX_NAMED_KEYS else ""
        raise InvalidRequest(f"logit_bias must have token ids as its keys, not {names}{more}.", field="logit_bias")
    for name, bias in biases.items():
        yield int(name), bias


class NewNames:
    """Names from requests that were seen before: of each kind the first ones only, since clients may invent names.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def find(self, kind: str, names: Collection[str]) -> list[str]:
        """Return the new names, cut to a bounded length; none once there are too many of the kind."""
        with self._lock:
            seen = self._seen.setdefault(kind, set())
            new = []
            for name in names:
                short = name[:_MAX_LOGGED_CHARACTERS]
                if len(seen) < _MAX_LOGGED and short not in seen:
                    seen.add(short)
                    new.append(short)
            return new


def check_num_values(body: bytes | bytearray) -> None:
    """Count the values of a JSON text, valid or not.

    A parser holds the interpreter until it has built every object: 14 s for a body of 16 MiB with four million lists.
    Values are counted before, in steps of some microseconds between which other threads run.

    Raises:
        InvalidRequest: There are more than this server parses.
    """
    position, num_values, num_objects = 0, 0, 0
    while position < len(body):
        end = min(position + _STEP_BYTES, len(body))
        quote = body.find(b'"', position, end)
        stop = end if quote < 0 else quote
        num_values += body.count(b",", position, stop)
        num_objects += body.count(b"[", position, stop) + body.count(b"{", position, stop) + (quote >= 0)
        if num_values > MAX_VALUES or num_objects > MAX_STRINGS_AND_LISTS:
            raise InvalidRequest(
                f"The body has too many values: this server parses at most {MAX_VALUES} in one body, and "
                f"{MAX_STRINGS_AND_LISTS} strings, lists and objects. Send tensors as binary data, or several requests."
            )
        position = stop if quote < 0 else _end_of_string(body, quote + 1)


def _end_of_string(body: bytes | bytearray, position: int) -> int:
    """Return the position after the string's closing quote, or the body's length if there is none."""
    while position < len(body):
        found = _STRING.match(body, position, position + _STEP_BYTES)
        assert found is not None, "the pattern matches the empty text"
        position = found.end()
        if body[position : position + 1] == b'"':
            return position + 1
        if body[position : position + 1] == b"\\":  # the window or the body ends within an escape
            position += 2
    return len(body)


def parse_body(model: type[BodyT], body: bytes | bytearray, report: ReportIgnored | None = None) -> BodyT:
    """Parse a body as `model`. Raises an `InvalidRequest` about the first error, or if it has too many values."""
    if len(body) > LOOP_BYTES:
        check_num_values(body)
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise _foreign_body(model, body) or invalid_body(error) from error
    ignored: dict[str, None] = {}
    parsed.check_fields("", ignored)
    if ignored and report is not None:
        report(model.API, ignored)
    return parsed


def _foreign_body(model: type[Body], body: bytes | bytearray) -> UnsupportedParameter | None:
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
