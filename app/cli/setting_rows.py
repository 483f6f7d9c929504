"""Text of the settings for the command line and the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from app.settings import SETTING_GROUPS, Settings, flag_of, variable_of


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as text. `values` is the accepted form; `default` is empty if there is none.

    `group` is a key of `SETTING_GROUPS`.
    `is_list`: the flag takes several values, and the environment variable has them separated by commas.
    """

    name: str
    flag: str
    variable: str
    values: str
    default: str
    description: str
    group: str
    is_list: bool = False

    @property
    def off_flag(self) -> str:
        """Flag without a value that turns off what is on by default; empty for other settings."""
        return f"--no-{self.flag.removeprefix('--')}" if self.values == "on|off" and self.default == "on" else ""


def setting_rows() -> list[SettingRow]:
    """Return every setting, by group and in the order of `SETTING_GROUPS`.

    Flags, help texts and `docs/settings.md` are generated from these rows.
    """
    return [
        _setting_row(name, group, Settings.model_fields[name])
        for group, names in SETTING_GROUPS.items()
        for name in names
    ]


def _setting_row(name: str, group: str, field: FieldInfo) -> SettingRow:
    return SettingRow(
        name=name,
        flag=flag_of(name),
        variable=variable_of(name),
        values="LIST" if NoDecode in field.metadata else "|".join(dict.fromkeys(_accepted_forms(field.annotation))),
        default=_shown_default(field.default),
        description=field.description or "",
        group=group,
        is_list=NoDecode in field.metadata,
    )


def _shown_default(default: Any) -> str:
    if default in (None, ()):
        return ""
    return ",".join(default) if isinstance(default, tuple) else str(default)


_TYPE_NAMES: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def _accepted_forms(annotation: Any) -> list[str]:
    """Return the accepted forms of a type, such as `auto` and `INTEGER`."""
    if get_origin(annotation) is Annotated:
        return _accepted_forms(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return sorted((word for part in parts for word in _accepted_forms(part)), key=str.isupper)
    if get_origin(annotation) is tuple:
        return ["LIST"]
    return [_TYPE_NAMES[annotation]]
