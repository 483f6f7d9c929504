"""Compare the logits of every family with transformers on tiny random checkpoints: `python -m tools.measure.families`.

Arguments are parts of names; without any, all families are compared. The exit status is 1 if one differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from loaded_models import load  # noqa: E402
from reference_attention import PlainAttend, context_of  # noqa: E402
from served_families import SERVED, expected_logits, prompt_of, write_family  # noqa: E402
from tiny_checkpoints import write_tokenizer  # noqa: E402

TOLERANCE = 2e-4


@torch.inference_mode()
def difference(architecture: str, directory: Path) -> float:
    """Return the largest difference of a logit, relative to their deviation if that is below 1."""
    write_family(directory, architecture, SERVED[architecture])
    write_tokenizer(directory)
    prompt = prompt_of(24)
    expected = expected_logits(directory, architecture, prompt)
    found = load(directory)(context_of(prompt, PlainAttend()))
    return float((found - expected).abs().max()) / min(1.0, float(expected.std()))


def main(arguments: list[str]) -> int:
    names = [name for name in SERVED if not arguments or any(part in name for part in arguments)]
    equal = 0
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            found = difference(name, Path(directory))
        equal += found <= TOLERANCE
        print(f"{name:50} {found:.1e}{'' if found <= TOLERANCE else '  DIFFERS'}", flush=True)
    print(f"{equal} of {len(names)} families have the logits of transformers.")
    return 0 if equal == len(names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
