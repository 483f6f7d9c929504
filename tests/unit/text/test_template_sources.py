"""Where chat templates come from, and which of several a conversation gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import CheckpointInvalid
from app.text.chat import ChatOptions, open_chat_template

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
