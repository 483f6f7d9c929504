"""Chat templates render as they do in transformers, and whatever one tries fails its own request only."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.errors import CheckpointInvalid, InvalidRequest, UnsupportedParameter
from app.text.chat import ChatOptions, ChatTemplate, open_chat_template
from small_tokenizers import byte_level, write_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CONVERSATION = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "  Hello?\n"},
    {"role": "assistant", "content": "Hi é 你"},
    {"role": "user", "content": "Bye"},
]
CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are kind.<|im_end|>
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BRACKETS = """{{- bos_token }}
{%- set ns = namespace(turn=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if (message.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set ns.turn = ns.turn + 1 %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}
    {%- else %}{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}"""
EVERYTHING = "{{ messages | tojson(indent=1) }}"
EVERYTHING += "{{ tools is none }}{{ thinking | default('unset') }}{{ range(3) | list }}{{ 'ab' * 3 }}{{ 2 ** 3 }}"


@pytest.mark.parametrize("source", [CHATML, BRACKETS, EVERYTHING])
def test_rendered_as_by_transformers(source: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast", chat_template=source)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    conversation = CONVERSATION[source is BRACKETS :]  # which drops system messages, so ours folds them
    expected = reference.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, thinking=True)
    assert ChatTemplate(source, TOKENS).render(conversation, {"thinking": True}) == expected


PREFILLS = ("<", "e", "im", "|", "end|>", "user", "", " ", "The answer ", "```json\n", "def f():\n    ", "ß ", "a\n\n")


@pytest.mark.cases(test=4)
@pytest.mark.parametrize("content", PREFILLS)
@pytest.mark.parametrize("source", [CHATML, CHATML.replace("['content']", ".content | trim")])
def test_a_continued_message_is_kept_to_the_byte(source: str, content: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast", chat_template=source)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    ours = ChatTemplate(source, TOKENS).render(messages, {}, ChatOptions(continue_final_message=True))
    assert ours == reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert "trim" in source or ours.endswith(f"<|im_start|>assistant\n{content}")


@pytest.mark.parametrize("last", [{"content": "x"}, {"content": "", "tool_calls": [{"function": {"name": "f"}}]}])
def test_what_cannot_be_continued_is_refused(last: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **last}]
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("{{ messages[0].content }}", {}).render(messages, {}, ChatOptions(continue_final_message=True))
    assert refused.value.field == "continue_final_message"


def test_a_template_gets_the_time_and_a_request_may_replace_it() -> None:
    template = ChatTemplate("{{ date_string }}|{{ datetime }}|{{ strftime_now('%d %b %Y') }}|{{ messages }}", {})
    before = datetime.now()
    today, moment, called, _ = template.render(CONVERSATION).split("|")
    after = datetime.now()
    assert {today, called} <= {before.strftime("%d %b %Y"), after.strftime("%d %b %Y")}
    found = datetime.strptime(moment, "%b %d %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    assert before.astimezone(UTC).replace(microsecond=0) <= found <= after.astimezone(UTC)
    assert template.render(CONVERSATION, {"date_string": "1 May 2025"}).startswith("1 May 2025|")


def test_text_parts_are_lines_of_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": parts}]) == "one\ntwo"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}{{ messages.__init__.__globals__['os'].system('true') }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.json }}",
    "{{ range.__self__._left.x }}",
    "{{ ('{0.__class__.__base__}' | string).format(messages) }}{{ ''.format.__self__.x }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__init__=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ self.__init__.__globals__.x }}",
    "{{ lipsum(n=1) }}",
]
RUNAWAYS = [
    "{% for i in range(100000000) %}{% endfor %}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}",
    "{% set unseen = 'x' * 2000000 %}",
    "{% set unseen = 2000000 * [1] %}",
    "{{ 2 ** 100000 }}",
    "{{ 10 ** 60 ** 60 }}",
    "{% set ns = namespace(n=7) %}{% for i in range(100) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{{ 1 / 0 }}",
    "{{ messages[0]['absent']['deeper'] }}",
    "{{ 1 + 'a' }}",
    "{{ none.x() }}",
    "{{ absent() }}",
]


@pytest.mark.cases(test=4, ci=14)
@pytest.mark.parametrize("source", ESCAPES + RUNAWAYS)
def test_a_template_that_goes_wrong_fails_its_request_only(source: str) -> None:
    template, good = ChatTemplate(source, TOKENS), ChatTemplate(CHATML, TOKENS)
    with pytest.raises(InvalidRequest, match="template") as caught:
        template.render(CONVERSATION)
    assert caught.value.field == "messages"
    assert good.render(CONVERSATION).endswith("<|im_start|>assistant\n")


def test_a_formatted_text_shows_nothing_of_ours() -> None:
    assert "object" not in _outcome("{{ '{0.__class__}'.format(messages) }}")
    assert "jinja2" not in _outcome("{{ '%s' % raise_exception.__globals__ }}")


def _outcome(source: str) -> str:
    try:
        return ChatTemplate(source, TOKENS).render(CONVERSATION)
    except InvalidRequest as error:
        return error.message


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: roles must alternate"):
        ChatTemplate(BRACKETS, TOKENS).render([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize(
    ("source", "messages", "options", "lost"),
    [
        ("{{ messages[-1].content }}", CONVERSATION, ChatOptions(), "messages[0].content"),
        ("{{ messages[0].content }}", CONVERSATION[:2], ChatOptions(), "messages[1].content"),
        (CHATML, [*CONVERSATION, {"role": "critic", "content": "c"}], ChatOptions(), None),
        (
            CHATML.replace("in messages", "in messages if message.role != 'critic'"),
            [*CONVERSATION, {"role": "critic", "content": "c"}],
            ChatOptions(),
            "messages[4].content, of the role critic",
        ),
        (CHATML, CONVERSATION, ChatOptions(documents=({"title": "t", "text": "a fact"},)), "documents[0].text"),
        (
            "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls else '' }}{% endfor %}",
            [
                *CONVERSATION,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                },
            ],
            ChatOptions(),
            None,
        ),
    ],
)
def test_a_template_that_leaves_something_out_is_refused(
    source: str, messages: list[dict[str, Any]], options: ChatOptions, lost: str | None
) -> None:
    template = ChatTemplate(source, TOKENS)
    if lost is None:
        assert template.render(messages, {}, options)
        return
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=re.escape(f"leaves out {lost}")) as caught:
            template.render(messages, {}, options)
        assert caught.value.field == lost.partition("[")[0]


@pytest.mark.parametrize(
    "messages, kind, sentence",
    [
        ([], InvalidRequest, "at least one"),
        ([{"role": "user", "content": 3}], InvalidRequest, "string or a list of text parts"),
        ([{"role": "user", "content": ["a"]}], InvalidRequest, "content parts must be"),
        ([{"role": "user", "content": [{"type": "text"}]}], InvalidRequest, "content parts must be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], UnsupportedParameter, "reads text only"),
        ([{"role": "user", "content": object()}], InvalidRequest, "plain JSON"),
    ],
)
def test_messages_that_are_none(messages: list[dict[str, Any]], kind: type[InvalidRequest], sentence: str) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        ChatTemplate(CHATML, TOKENS).render(messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("name", ["messages", "bos_token", "range"])
def test_arguments_may_not_replace_what_is_given(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} cannot be an argument"):
        ChatTemplate(CHATML, TOKENS).render(CONVERSATION, {name: 1})


def test_a_deep_conversation_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="plain JSON"):
        ChatTemplate(CHATML, TOKENS).render([{"role": "user", "content": "a", "extra": deep}])


@pytest.mark.parametrize(
    "config, sentence", [(3, "must be a string"), (["a"], "must be a string"), ("{% if %}", "error in line 1")]
)
def test_templates_that_are_none(config: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=sentence):
        open_chat_template(tmp_path, json.loads(json.dumps({"chat_template": config})), TOKENS)


USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get", "description": "", "parameters": {}}}
DEFAULT, TOOLS, RAG, FILE, OTHER = (
    f"{name}:{{{{ messages | tojson }}}}{{{{ tools | tojson }}}}"
    for name in ("default", "tools", "rag", "file", "other")
)


def names(directory: Path, config: Any, file: Path | None = None) -> tuple[str, str] | None:
    """Return which templates render a conversation without and with tools."""
    template = open_chat_template(directory, {"chat_template": config}, {}, file=file)
    if template is None:
        return None
    texts = [template.render(USER), template.render(USER, {}, ChatOptions(tools=(TOOL,)))]
    template.close()
    return texts[0].partition(":")[0], texts[1].partition(":")[0]


@pytest.mark.cases(test=2)
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, None),
        (DEFAULT, ("default", "default")),
        ([{"name": "tool_use", "template": TOOLS}, {"name": "default", "template": DEFAULT}], ("default", "tools")),
        ({"default": DEFAULT, "tool_use": TOOLS, "rag": RAG}, ("default", "tools")),
        ([{"name": "rag", "template": RAG}], ("rag", "rag")),
        ([], None),
    ],
)
def test_templates_of_the_configuration(config: Any, expected: tuple[str, str] | None, tmp_path: Path) -> None:
    assert names(tmp_path, config) == expected


def test_files_precede_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(FILE, encoding="utf-8")
    assert names(tmp_path, {"default": DEFAULT, "tool_use": TOOLS}) == ("file", "file")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text(TOOLS, encoding="utf-8")
    assert names(tmp_path, DEFAULT) == ("file", "tools")


def test_the_file_of_the_operator_precedes_all(tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(OTHER, encoding="utf-8")
    assert names(tmp_path, {"default": DEFAULT, "tool_use": TOOLS}, other) == ("other", "other")
    with pytest.raises(CheckpointInvalid, match=r"chat_template: .*absent\.jinja"):
        names(tmp_path, DEFAULT, tmp_path / "absent.jinja")


@pytest.mark.parametrize("config", [3, ["a"], {"default": 3}, [{"name": "default"}]])
def test_what_is_no_template_is_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="must be a string, or several by their names"):
        names(tmp_path, config)


def test_a_gguf_file_without_a_template_gets_chatml_if_it_has_its_tokens(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert open_chat_template(file, {}, {}, tokens=("<|im_start|>",)) is None
    template = open_chat_template(file, {}, {}, tokens=("<|im_start|>", "<|im_end|>"))
    assert template is not None
    assert template.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    template.close()
    assert open_chat_template(tmp_path, {}, {}, tokens=("<|im_start|>", "<|im_end|>")) is None, "not for a directory"
