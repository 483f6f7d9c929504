"""Our recorded series and alerts, and what their queries ask for."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import yaml

from tools.monitoring.plain_rules import plain_rules

Rule = dict[str, Any]
_WORDS = {"and", "or", "unless", "bool"}
_GROUPED = r"\b(?:by|on|group_left) *\(([^)]*)\)"
_SELECTOR = r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()(\{[^}]*\})?"


@cache
def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(plain_rules())["groups"]
    return found


def rules() -> list[Rule]:
    return [rule for group in groups() for rule in group["rules"]]


def alerts() -> list[Rule]:
    return [rule for rule in rules() if "alert" in rule]


def selectors(query: str) -> set[str]:
    """Each metric with the labels that it is asked for: a query of its own."""
    bare = re.sub(r"\[[^]]*\]", "", re.sub(_GROUPED, "", query))
    return {name + braces for name, braces in re.findall(_SELECTOR, bare) if name not in _WORDS}


def grouped_by(query: str) -> set[str]:
    """The labels that it groups or joins by."""
    return {label.strip() for listed in re.findall(_GROUPED, query) for label in listed.split(",") if label.strip()}
