"""The documents' figures: who measured what, on which machine.

Every figure is a rate or a ratio for which more is better. `docs/published.md` names the documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PublishedMachine:
    """A machine of a document, as far as the document names it.

    `cores` are the cores that computed. `microarchitecture` is in the words of `Cpu.microarchitecture`.
    """

    name: str
    architecture: str
    microarchitecture: str
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A figure and its origin. `is_limit` is true for "up to": the best of several models."""

    value: float
    document: str
    machine: PublishedMachine
    is_limit: bool = False

    @property
    def origin(self) -> str:
        """Where the figure comes from, for tables."""
        return f"{self.document}, {self.machine.name}"


LESSON, BLOG, PAPER, TALK = "the lesson", "the blog post", "the paper", "the talk"
_GRAVITON3 = PublishedMachine("Graviton3", "arm64", "Neoverse V1")
_C7G = PublishedMachine("c7g.16xlarge (Graviton3)", "arm64", "Neoverse V1", 64)
_C6I = PublishedMachine("c6i.16xlarge (Ice Lake)", "x86_64", "Ice Lake", 32)
_M2_PRO = PublishedMachine("M2 Pro", "arm64", "Apple M2", 1)
_NEOVERSE_V2 = PublishedMachine("Neoverse V2, compiled", "arm64", "Neoverse V2", 32)

BERT_ARM = PublishedFigure(165.0, LESSON, _C7G)
BERT_X86 = PublishedFigure(120.0, LESSON, _C6I)
PAPER_SCALAR = PublishedFigure(24.0, PAPER, _M2_PRO)
PAPER_NEON = PublishedFigure(61.3, PAPER, _M2_PRO)
PAPER_COPROCESSOR = PublishedFigure(298.7, PAPER, _M2_PRO)
PAPER_SPEEDUP = PublishedFigure(2.5, PAPER, _M2_PRO)
TALK_FP32 = PublishedFigure(13.0, TALK, _NEOVERSE_V2)
TALK_INT4 = PublishedFigure(68.0, TALK, _NEOVERSE_V2)
TALK_SPEEDUP = PublishedFigure(5.2, TALK, _NEOVERSE_V2)
BLOG_GRAPH = PublishedFigure(2.0, BLOG, _GRAVITON3, is_limit=True)
BLOG_LLAMA = PublishedFigure(18.0, BLOG, _GRAVITON3, is_limit=True)
BLOG_GEMMA = PublishedFigure(14.0, BLOG, _GRAVITON3)
BLOG_PROMPT = PublishedFigure(2.5, BLOG, _GRAVITON3)
BLOG_DECODE = PublishedFigure(2.0, BLOG, _GRAVITON3)


def likeness(machine: PublishedMachine, here: Mapping[str, Any], cores: int) -> str:
    """Return in words how far this machine, with these facts and computing cores, is like the document's."""
    own = here["cpu"]["microarchitecture"] or here["cpu"]["product"]
    if own == machine.microarchitecture:
        kind = f"the same cores ({own})"
    elif here["architecture"] == machine.architecture:
        kind = f"{machine.architecture} too, other cores"
    else:
        kind = f"{machine.architecture}, not {here['architecture']}"
    return kind if machine.cores is None else f"{kind}; {_cores(machine.cores, cores)}"


def _cores(theirs: int, ours: int) -> str:
    if theirs == ours:
        return "one core each" if ours == 1 else f"{ours} cores each"
    return f"{theirs} cores, not {ours}"
