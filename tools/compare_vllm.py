"""Decode ×16 of vLLM's CPU build and of ours, turn by turn in one run: `python tools/compare_vllm.py --model DIR --peer PYTHON`.

PYTHON is the interpreter of an environment that has vLLM; ours is the one that runs this. Each side is a process of its own that has
loaded the model and is halted while the other works. Both are given token ids, pick greedily, write no text and may prefill as they like.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = 16
PROMPT_TOKENS = 128
SHORT_TOKENS = 16
MARK = "TURN "  # before a line that is meant for us; whatever else a library prints is not

Generate = Callable[[list[list[int]], int], None]  # prompts and how many tokens of each


def main() -> int:
    """Prints each turn, the medians and their ratio; the last line is JSON."""
    arguments = _arguments()
    if arguments.side is not None:
        return _serve_turns(SIDES[arguments.side](arguments.model, arguments.threads))
    sides = {"ours": _start(sys.executable, "ours", arguments), "vllm": _start(arguments.peer, "vllm", arguments)}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for name, side in sides.items():
            for tokens in (1, SHORT_TOKENS + arguments.tokens):  # whatever is compiled or allocated once
                _turn(side, tokens, seed=0)
            print(f"{name} is ready", file=sys.stderr)
        for number in range(arguments.rounds):
            for name, side in sides.items():
                rates[name].append(_decode_rate(side, arguments.tokens, seed=number + 1))
                print(f"round {number + 1}: {name} {rates[name][-1]:.1f} tok/s", file=sys.stderr)
    finally:
        for side in sides.values():
            os.killpg(side.pid, signal.SIGKILL)
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    ratio = statistics.median(ours / peer for ours, peer in zip(rates["ours"], rates["vllm"], strict=True))
    print(json.dumps({"rows": ROWS, "tokens_per_second": medians, "rounds": rates, "ours_over_vllm": ratio}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--peer", default=sys.executable, help="interpreter of an environment with vLLM")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="compute threads of each side: one a physical core"
    )
    parser.add_argument("--tokens", type=int, default=64, help="completion tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the one who gives turns ---------------------------------------------------------------------------------------


def _start(python: str, side: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    command = [python, __file__, "--side", side, "--model", str(arguments.model), "--threads", str(arguments.threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _decode_rate(side: subprocess.Popen[str], tokens: int, seed: int) -> float:
    """Between a short and a longer generation lie steps in which all rows decode; by the short one's end prefill is over."""
    short = _turn(side, SHORT_TOKENS, 2 * seed)
    whole = _turn(side, SHORT_TOKENS + tokens, 2 * seed + 1)
    if whole <= short:
        raise SystemExit(f"{tokens} more tokens took no time: take more of them, on an idle machine")
    return ROWS * tokens / (whole - short)


def _turn(side: subprocess.Popen[str], tokens: int, seed: int) -> float:
    """Seconds that one side takes for all rows. The other is halted meanwhile: one that polls would take a core."""
    os.killpg(side.pid, signal.SIGCONT)
    try:
        return _taken(side, tokens, seed)
    finally:
        os.killpg(side.pid, signal.SIGSTOP)


def _taken(side: subprocess.Popen[str], tokens: int, seed: int) -> float:
    assert side.stdin is not None, "it was started with a pipe"
    assert side.stdout is not None, "it was started with a pipe"
    side.stdin.write(f"{tokens} {seed}\n")
    side.stdin.flush()
    for line in side.stdout:
        if line.startswith(MARK):
            return float(line.removeprefix(MARK))
    raise SystemExit(f"{' '.join(side.args)} ended: its reason stands above")  # type: ignore[arg-type]


# ---- those who take them -------------------------------------------------------------------------------------------


def _serve_turns(generate: Generate) -> int:
    for line in sys.stdin:
        tokens, seed = map(int, line.split())
        deal = random.Random(seed)  # never the same prompt twice: nothing is found in a cache
        prompts = [[deal.randrange(100, 2000) for _ in range(PROMPT_TOKENS)] for _ in range(ROWS)]
        start = time.perf_counter()
        generate(prompts, tokens)
        print(f"{MARK}{time.perf_counter() - start}", flush=True)
    return 0


def _vllm(model: Path, threads: int) -> Generate:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(model), dtype="bfloat16", max_model_len=1024, max_num_seqs=ROWS, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == tokens for answer in answers), "the peer stopped early"

    return generate


def _ours(model: Path, threads: int) -> Generate:
    sys.path.insert(0, str(ROOT))
    from app.settings import load_settings
    from app.startup import prepare

    prepared = prepare(load_settings(model=str(model), threads=threads, precision="bf16", itl_target_ms=60_000)[0])
    os.environ.update(prepared.plan.environment())
    from app.engine.build import build_engine
    from app.messages import Generate as Request
    from app.messages import SamplingParams

    engine = build_engine(prepared.checkpoint, prepared.plan, (), lambda stage: None).engine

    def generate(prompts: list[list[int]], tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for row, prompt in enumerate(prompts):
            refused = engine.add(Request(f"row-{row}", tuple(prompt), params, time.monotonic()))
            assert not refused, f"the engine refused a row: {refused}"
        while engine.has_work:
            engine.step()

    return generate


SIDES: dict[str, Callable[[Path, int], Generate]] = {"ours": _ours, "vllm": _vllm}

if __name__ == "__main__":
    sys.exit(main())
