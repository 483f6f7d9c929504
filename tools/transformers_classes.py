"""Serve a tiny random checkpoint of each of transformers' classes that generate text: `python -m tools.transformers_classes [NAME ...]`.

tests/support must be on PYTHONPATH.

Greedy completions must equal those of the library's own `generate`, alone and in a crowd of three prompts. Without names
all classes are tried. The results are written to tools/transformers_classes.json, from which `make docs` writes
docs/families.md.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import warnings
from importlib import import_module
from multiprocessing import Pipe, get_context
from pathlib import Path

from app.models.transformers_config import CAUSAL, SEQ_TO_SEQ, class_table

RESULTS = Path(__file__).with_suffix(".json")
SECONDS = 180  # for one class
BYTES = 6 * 2**30  # that one class may allocate


def main(names: list[str]) -> int:
    import torch

    import_module("app.engine.transformers.build").import_library()
    for module in ("transformers_checkpoints", "app.engine.transformers.generation", "app.server.prepare"):
        import_module(module)  # once, for all processes
    torch.set_num_threads(1)
    results: dict[str, str] = json.loads(RESULTS.read_text(encoding="utf-8")) if names else {}
    for name in names or sorted({*names_in(CAUSAL), *names_in(SEQ_TO_SEQ)}):
        results[name] = outcome(name)
        print(f"{name}: {results[name]}", flush=True)
    print(f"{sum(map(is_served, results.values()))} of {len(results)}")
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
    return 0


def names_in(table: str) -> set[str]:
    """Return the classes of one of the library's tables."""
    return {name for listed in (class_table(table) or {}).values() for name in listed}


def is_served(result: str) -> bool:
    return result in ("batched", "batched by length", "one by one")


def outcome(name: str) -> str:
    """Return how the class is served, or why not, from a process that may run out of memory or time."""
    receiver, sender = Pipe(duplex=False)
    process = get_context("fork").Process(target=lambda: sender.send(try_class(name)))
    process.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(SECONDS) else f"took more than {SECONDS} s"
    except EOFError:
        return "its process was killed"
    finally:
        process.kill()
        process.join()


def try_class(name: str) -> str:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    from transformers_checkpoints import build_engine, differing_prompts, write_transformers_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        try:
            model = write_transformers_checkpoint(directory, name)
        except Exception as error:  # noqa: BLE001  # of whatever kind: the class cannot be made tiny this way
            return f"no tiny checkpoint: {first_line(error)}"
        try:
            engine = build_engine(directory)
            differing = differing_prompts(engine, model)
        except Exception as error:  # noqa: BLE001  # the reason is the result
            return f"not served: {first_line(error)}"
    how = {"padded": "batched", "equal": "batched by length", "alone": "one by one"}[engine.runner.batches]
    return f"differs: {', '.join(differing)}" if differing else how


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
