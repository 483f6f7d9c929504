"""The formats in which model families write tool calls, and the one that a chat template writes.

A format is data: the text of a call, with places for its name and its arguments, and the text around calls. What reads,
forces and writes calls is made of it (`tool_calls.py`, `tool_grammars.py`, `write_calls` here). Names are vLLM's where
vLLM has the format.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.text.schema_logic import target_of

Message = Mapping[str, Any]
_OBJECT = '{"name": "{name}", "arguments": {arguments}}'
_PLACE = re.compile(r"\{(name|arguments|parameters|index|number|id|key|value|string|type)\}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The tool calls of a model family.

    - `call`: a call with the places `{name}` and `{arguments}`, a JSON object, or `{parameters}`; `{index}` is the number
      of the call, counted from 0, `{number}` from 1, `{id}` its id.
    - `parameter`: a parameter with the places `{key}` and `{value}`; `{type}` is its type in JSON, and `{string}` is
      "true" for a text. With two places `{key}` it is an element, and so are the members and items of its value.
    - `forced`: text before, between and after calls.
    - `starts`: further markers after which calls are read.
    - `also`: further forms of a call that are read.
    - `is_bare`: a text that begins with `{` or `[` is calls, if the first names a tool.
    - `reads_objects`: calls may be JSON objects that have their names.
    - `is_pythonic`: parameters are `key=value`, separated by commas.
    - `around`: the text before an answer, which a prompt may begin, and texts after it; none of them is content.
    - `quote`: parameters are `key:value`, separated by commas, with bare keys and this text around strings.
    - `is_single`: a text has one call at most.
    - `short_ids`: ids have 9 letters and digits, as Mistral's templates demand.
    """

    name: str
    call: str = _OBJECT
    forced: tuple[str, str, str] = ("", "", "")
    parameter: str = ""
    starts: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    is_bare: bool = False
    reads_objects: bool = False
    is_pythonic: bool = False
    quote: str = ""
    is_single: bool = False
    short_ids: bool = False
    around: tuple[str, ...] = ()

    @property
    def is_harmony(self) -> bool:
        """True if a text is messages, which `harmony.py` reads."""
        return self.name == "openai"

    @property
    def head(self) -> str:
        """The text before the name of a call; empty where calls are objects that are read as JSON."""
        return "" if self.reads_objects else _PLACE.split(self.call)[0].rstrip(_NAME_LETTERS)

    @property
    def opening(self) -> tuple[str, ...]:
        """All markers after which calls are read."""
        found = (*self.starts, "" if self.starts and self.around else self.forced[0].removesuffix("["), self.head)
        return tuple(dict.fromkeys(one for text in found if len(one := text.strip()) > 2))

    @property
    def end(self) -> str:
        """The marker after calls; empty if they end with the text."""
        return self.forced[2].strip().removeprefix("]" if self.forced[0].endswith("[") else "")

    @property
    def answer(self) -> str:
        return self.around[0] if self.around else ""

    @property
    def element(self) -> str:
        """The text before a tag, if parameters are elements in one another; empty if they are not."""
        return self.parameter.partition("<{key}>")[0] if self.parameter.count("{key}") > 1 else ""

    @property
    def ignored(self) -> tuple[str, ...]:
        if self.reads_objects or self.parameter or self.is_pythonic:
            return ()
        return words(_PLACE.split(self.call)[-1])

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that may be special tokens."""
        texts = (self.call, *self.also, self.parameter, *self.forced, *self.starts, *self.around, self.quote)
        parts = (part for text in texts for part in words(_PLACE.sub(" ", text)))
        return tuple(dict.fromkeys((*self.opening, self.end, *parts)))


_NAME_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ."


def words(text: str) -> tuple[str, ...]:
    """Return the parts of a text without white space, each marker in angle or square brackets on its own."""
    parts = (one for part in text.split() for one in _MARKERS.split(part))
    return tuple(filter(None, (one if _MARKERS.fullmatch(one) else one.strip("[],;") for one in parts)))


_MARKERS = re.compile(r"(\]<\]\w+\[>\[|<[^<>]+>|\[[A-Z_]+\])")


def _in_list(start: str, end: str) -> tuple[str, str, str]:
    return f"{start}[", ", ", f"]{end}"


def _wrapped(start: str, end: str) -> tuple[str, str, str]:
    return f"{start}\n", f"\n{end}\n{start}\n", f"\n{end}"


_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DSML = "｜DSML｜"
_MINIMAX, _RESPONSE = "]<]minimax[>[", "<|open|>response<|sep|>"
_ARGS, _MORE_ARGS = "{name}[ARGS]{arguments}", ("{name}[CALL_ID]{id}[ARGS]{arguments}", "{name}{arguments}")

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        ToolFormat("hermes", forced=_wrapped("<tool_call>", "</tool_call>"), reads_objects=True),
        ToolFormat(
            *("llama3_json", '{"name": "{name}", "parameters": {arguments}}', ("", "; ", "")),
            starts=("<|python_tag|>",), is_bare=True, reads_objects=True,
        ),
        ToolFormat(
            *("mistral", _OBJECT, _in_list("[TOOL_CALLS] ", "")), also=(_ARGS, *_MORE_ARGS),
            reads_objects=True, short_ids=True,
        ),
        ToolFormat(
            *("mistral_v11", _ARGS, ("[TOOL_CALLS]", "[TOOL_CALLS]", "")), also=_MORE_ARGS,
            reads_objects=True, short_ids=True,
        ),
        ToolFormat(
            "phi4_mini_json", forced=_in_list("<|tool_call|>", "<|/tool_call|>"), starts=("functools",), reads_objects=True
        ),
        ToolFormat("firefunction", forced=_in_list("functools", ""), starts=("functools",), reads_objects=True),
        ToolFormat("granite", forced=_in_list("<|tool_call|>", ""), starts=("<tool_call>",), reads_objects=True),
        ToolFormat("apriel", forced=_in_list("<tool_calls>", "</tool_calls>"), reads_objects=True),
        ToolFormat("minimax", forced=("<tool_calls>\n", "\n", "\n</tool_calls>"), reads_objects=True),
        ToolFormat("nemotron", forced=_in_list("<TOOLCALL>", "</TOOLCALL>"), reads_objects=True),
        ToolFormat(
            *("gigachat3", _OBJECT, ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "", "")),
            starts=("function call<|role_sep|>",), around=("", "<|message_sep|>"), is_single=True, reads_objects=True,
        ),
        ToolFormat("gigachat", forced=("<|function_call|>", "<|function_call|>", ""), reads_objects=True),
        ToolFormat(
            *("command_a", '{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}'),
            _in_list("<|START_ACTION|>", "<|END_ACTION|>"), reads_objects=True,
        ),
        ToolFormat("json", forced=("[", ", ", "]"), is_bare=True, reads_objects=True),
        ToolFormat("apertus", '{"{name}": {arguments}}', _in_list("<|tools_prefix|>", "<|tools_suffix|>")),
        ToolFormat("functionary", "{name}\n{arguments}", (">>>", ">>>", ""), around=(">>>all\n",)),
        ToolFormat("llama_function", "<function={name}>{arguments}</function>"),
        ToolFormat(
            *("deepseek_v3", _BEGIN + "function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```" + _END),
            (_ALL_BEGIN, "\n", _ALL_END),
        ),
        ToolFormat("deepseek_v31", _BEGIN + "{name}<｜tool▁sep｜>{arguments}" + _END, (_ALL_BEGIN, "", _ALL_END)),
        ToolFormat(
            *("kimi_k2", "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"),
            ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        ),
        ToolFormat(
            *("solar", "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"),
            ("<|tool_calls|>", "", ""),
        ),
        ToolFormat(
            *("qwen3_coder", "<function={name}>\n{parameters}</function>", _wrapped("<tool_call>", "</tool_call>")),
            "<parameter={key}>\n{value}\n</parameter>\n",
        ),
        ToolFormat(
            *("seed_oss", "<function={name}>\n{parameters}</function>", _wrapped("<seed:tool_call>", "</seed:tool_call>")),
            "<parameter={key}>{value}</parameter>\n",
        ),
        ToolFormat(
            *("glm45", "<tool_call>{name}\n{parameters}</tool_call>", ("", "\n", "")),
            "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ),
        ToolFormat(
            "hunyuan", "<tool_call:opensource>{name}<tool_sep:opensource>\n{parameters}</tool_call:opensource>",
            ("<tool_calls:opensource>\n", "\n", "\n</tool_calls:opensource>"),
            "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n",
        ),
        ToolFormat(
            *("minimax_m2", '<invoke name="{name}">\n{parameters}</invoke>'),
            ("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"), '<parameter name="{key}">{value}</parameter>\n',
        ),
        ToolFormat(
            *("minimax_m3", f'{_MINIMAX}<invoke name="{{name}}">{{parameters}}{_MINIMAX}</invoke>'),
            (f"{_MINIMAX}<tool_call>\n", "\n", f"\n{_MINIMAX}</tool_call>"),
            f"{_MINIMAX}<{{key}}>{{value}}{_MINIMAX}</{{key}}>",
        ),
        ToolFormat(
            "kimi_k3", '<|open|>call tool="{name}" index="{number}"<|sep|>{parameters}<|close|>call<|sep|>',
            (f"{_RESPONSE}<|close|>response<|sep|><|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
            '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
            starts=("<|open|>tools<|sep|>",),
            around=(_RESPONSE, "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        ),
        *(
            ToolFormat(
                *(name, f'<{_DSML}invoke name="{{name}}">\n{{parameters}}</{_DSML}invoke>'),
                (f"<{_DSML}{word}>\n", "\n", f"\n</{_DSML}{word}>"),
                f'<{_DSML}parameter name="{{key}}" string="{{string}}">{{value}}</{_DSML}parameter>\n',
            )
            for name, word in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
        ),
        ToolFormat(
            *("minicpm5", '<function name="{name}">{parameters}</function>', ("", "\n", "")),
            '<param name="{key}">{value}</param>',
        ),
        ToolFormat(
            *("pythonic", "{name}({parameters})", ("[", ", ", "]")),
            starts=("<|python_start|>",), is_bare=True, is_pythonic=True,
        ),
        ToolFormat(
            *("lfm2", "{name}({parameters})", _in_list("<|tool_call_start|>", "<|tool_call_end|>")), is_pythonic=True
        ),
        ToolFormat("gemma4", "<|tool_call>call:{name}{{parameters}}<tool_call|>", quote='<|"|>'),
        # Harmony (github.com/openai/harmony), which `harmony.py` reads.
        ToolFormat(
            "openai", "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
            also=(" to=functions.{name}<|channel|>commentary json<|message|>{arguments}",), is_single=True,
        ),
    )
}  # fmt: skip


def write_calls(form: ToolFormat, calls: Sequence[tuple[str, Any]]) -> str:
    """Return calls, names with arguments, as the text that a model writes."""
    before, between, after = form.forced
    written = [_written(form, form.call, index, name, arguments) for index, (name, arguments) in enumerate(calls)]
    return before + between.join(written) + after


def _written(form: ToolFormat, pattern: str, index: int, name: str, arguments: Any) -> str:
    """Return a call. Arguments that are no object, since a model wrote them so, are written as they are."""
    if not isinstance(arguments, Mapping):
        parameters = str(arguments)
    elif form.quote:
        parameters = write_value(arguments, form.quote)[1:-1]
    elif form.element:
        parameters = _elements(arguments, form.element)
    elif form.is_pythonic:
        parameters = ", ".join(f"{key}={_json(value)}" for key, value in arguments.items())
    else:
        parameters = "".join(
            fill(form.parameter, key=key, value=value if isinstance(value, str) else _json(value),
                 string="true" if isinstance(value, str) else "false", type=_type_of(value).replace("integer", "number"))
            for key, value in arguments.items()
        )  # fmt: skip
    whole = arguments if isinstance(arguments, str) else _json(arguments)
    values = {"name": name, "arguments": whole, "index": str(index), "number": str(index + 1), "id": f"call{index:05}"}
    return fill(pattern, **values, parameters=parameters)


def _elements(value: Any, before: str) -> str:
    """Return a value as elements in one another. A member that is null is left out, as there is no form for it."""
    if isinstance(value, Mapping):
        members = [(key, one) for key, one in value.items() if one is not None]
    elif isinstance(value, list | tuple):
        members = [("item", one) for one in value]
    else:
        return value if isinstance(value, str) else "" if value is None else _json(value)
    return "".join(f"{before}<{key}>{_elements(one, before)}{before}</{key}>" for key, one in members)


def begun_answer(form: ToolFormat, prompt_end: str) -> str:
    """Return the beginning of the text before an answer with which a prompt ends."""
    beginnings = (form.answer[:size] for size in range(len(form.answer), 2, -1))
    return next(filter(prompt_end.endswith, beginnings), "")


def write_value(value: Any, quote: str) -> str:
    """Return a value with bare keys and another text than `"` around strings."""
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{write_value(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(write_value(one, quote) for one in value) + "]"
    return _json(value)


def fill(pattern: str, **values: str) -> str:
    return _PLACE.sub(lambda place: values[place[1]], pattern)


def split_pattern(pattern: str) -> list[str]:
    return _PLACE.split(pattern)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---- the format of a template --------------------------------------------------------------------------------------

_TRIAL_NAME, _TRIAL_ID = "trial_tool", "call00000"
# In alphabetical order, in which some templates write them.
_TRIAL_ARGUMENTS: Mapping[str, Any] = {"trial_number": 3, "trial_text": "trial value"}
TRIAL_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TRIAL_NAME,
        "description": "A trial.",
        "parameters": {
            "type": "object",
            "properties": {
                "trial_text": {"type": "string", "description": "A text."},
                "trial_number": {"type": "integer", "description": "A number."},
            },
            "required": ["trial_text"],
        },
    },
}
TRIAL_CALL: Sequence[Message] = (
    {"role": "user", "content": "trial question"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": _TRIAL_ID, "type": "function", "function": {"name": _TRIAL_NAME, "arguments": _TRIAL_ARGUMENTS}}
        ],
    },
    {"role": "tool", "content": "trial result", "tool_call_id": _TRIAL_ID, "name": _TRIAL_NAME},
)


def find_tool_format(text: str) -> ToolFormat | None:
    """Return the format in which a template wrote `TRIAL_CALL`: of several with the same text, the longest one.

    None if it wrote no call, or in a way that is not known.
    """
    compact = _compact(text)
    found = [
        (len(own), form)
        for form in TOOL_FORMATS.values()
        for pattern in (form.call, *form.also)
        if (own := _compact(form.forced[0] + _written(form, pattern, 0, _TRIAL_NAME, _TRIAL_ARGUMENTS))) in compact
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


_ID_KEY = re.compile(r',"id":"[^"]*"')


def _compact(text: str) -> str:
    """Drop what differs between templates of one format: white space, quotes and ids of calls."""
    return _ID_KEY.sub("", "".join(text.split()).replace("'", '"'))


def choose_tool_format(template: str | None, model_type: str) -> ToolFormat:
    """Return the format for a template that writes no calls, from what it says about them."""
    source = template or ""
    for name, marks in _MARKS_OF_FORMATS.items():
        if any(mark in source for mark in marks):
            return TOOL_FORMATS[name]
    if model_type.startswith("granite") and "<tool_call>" not in source:
        return TOOL_FORMATS["granite"]
    if "<tool_call>" not in source and ("<|python_tag|>" in source or '"parameters"' in source):
        return TOOL_FORMATS["llama3_json"]
    return TOOL_FORMATS["hermes"]


_MARKS_OF_FORMATS: Mapping[str, tuple[str, ...]] = {
    "mistral": ("[TOOL_CALLS]",),
    "phi4_mini_json": ("<|/tool_call|>", "functools["),
    "granite": ("<|tool_call|>",),
    "lfm2": ("<|tool_call_start|>", "<|tool_list_start|>"),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "command_a": ("<|START_ACTION|>",),
    "pythonic": ("<|python_start|>",),
}


_ANY = frozenset({"any"})
_MAX_REFERENCES = 16  # from one schema to another


def parameter_types(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """Return the types of JSON that a parameter may have; `any` if its schema does not say."""
    if not isinstance(schema, Mapping):
        return _ANY
    properties = schema.get("properties")
    more = schema.get("additionalProperties")
    found = properties.get(key, more) if isinstance(properties, Mapping) else more
    return value_types(found, schema)


def value_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of JSON that a value may have; `any` if its schema does not say."""
    return _types(schema, root, _MAX_REFERENCES)


def member_schema(schema: Any, key: str | None, root: Mapping[str, Any], depth: int = _MAX_REFERENCES) -> Any:
    """Return the schema of a member of an object, or of an array's items (None); None if the schema does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return member_schema(target_of(root, reference), key, root, depth - 1)
    options = next((schema[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)), ())
    properties = schema.get("properties")
    found = schema.get("items") if key is None else schema.get("additionalProperties")
    if key is not None and isinstance(properties, Mapping):
        found = properties.get(key, found)
    return next(filter(None, (found, *(member_schema(one, key, root, depth - 1) for one in options))), None)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return _ANY
    if isinstance(reference := schema.get("$ref"), str):
        return _types(target_of(root, reference), root, depth - 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str)) or _ANY
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            return frozenset().union(*(_types(option, root, depth - 1) for option in options))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if (found := _types(part, root, depth - 1)) != _ANY:
            return found
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(map(_type_of, values))
    return frozenset({"object"} if "properties" in schema else {"array"} if "items" in schema else _ANY)


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def read_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written as plain text.

    What is none of its types becomes a string, which whoever checks the arguments sees.
    """
    bare = text.strip()
    value = json_value(bare)
    if value is NOTHING and types & {"object", "array", "any", "boolean", "null"} and bare[:1] in "{[TFN":
        value = python_value(bare)
        bare = "" if value is NOTHING else json.dumps(value, ensure_ascii=False)
    if value is not NOTHING:
        kind = _type_of(value)
        if kind in types or (kind == "integer" and "number" in types) or ("any" in types and kind != "string"):
            return bare
        if kind == "number" and "integer" in types and isinstance(value, float) and value.is_integer():
            return str(int(value))
        if kind == "string" and "string" not in types and "any" not in types:
            return bare
    return json.dumps(text, ensure_ascii=False)


NOTHING = object()


def json_value(text: str) -> Any:
    """Return a value that was written as JSON; `NOTHING` if it was not."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_not_finite)
    return NOTHING


def python_value(text: str) -> Any:
    """Return a value that was written as Python writes it, or with words of JSON; `NOTHING` if it was not."""
    with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about escapes that Python does not know
        value = ast.literal_eval(_Words().visit(ast.parse(text.strip(), mode="eval")))
        json.dumps(value, allow_nan=False)
        return value
    return NOTHING


class _Words(ast.NodeTransformer):
    """JSON's words as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


def _not_finite(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
