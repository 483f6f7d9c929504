"""What is decided otherwise for models that do not generate, encoders and exported programs: a step does all of a text, and keeps nothing.

A text is never divided, so the longest bounds a step's memory; up to how many tokens texts are put together is another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.capacity import Capacity, weight_bytes
from app.hardware.decision import Decision
from app.hardware.facts import Facts, Needs
from app.hardware.room import LEAST_BATCH_TOKENS, MIN_TOKENS, Demand, Room, arithmetic, room, token_bytes
from app.hardware.step_seconds import TABLE_TEXT_TOKENS
from app.hardware.trials import Timing, rate
from app.settings import Settings

_TARGET_TOKENS = 512  # where products reach their best rate on a CPU
_TARGET_ROWS = 32  # of an exported program, while nobody knows what one of them costs
# Of the best measured rate, where steps are short and where they are long: who arrives waits for the one under way, so that shorter ones
# are worth something. (FP32 on two Cascade Lake cores: 1,024 tokens of all-MiniLM-L6-v2 in 0.31 s, 6% ahead of 128 in 0.04 s.)
_NEARLY_BEST, _NEARLY_BEST_IF_LONG = 0.9, 0.8
_LONG_SECONDS = 0.05  # of a step
# A step is cut where texts end, a part for each thread. With few texts a thread one of them waits for another, which texts of one length,
# as they are timed, do not show. (int8 all-MiniLM-L6-v2 on two Cascade Lake cores, 32 clients: 6,000, 8,100 and 9,200 tokens/s in steps of
# 128, 256 and 512, timed at 10,100, 11,000 and 11,600, and the longest steps had the least p99.)
_SHARE_TOKENS, _SHARES_SECONDS = 256, 0.1  # of a thread; while a step takes no longer
_MOST_TEXTS = 256  # of a step
# On a GPU products ask for thousands of rows, and what a step costs the host is paid once; a Mac's is a tenth of that. Not measured yet.
_SIZES = {"cpu": (_TARGET_TOKENS, _MOST_TEXTS), "cuda": (16_384, 1024), "mps": (4096, 256)}
_DEVICE_WAITING_REQUESTS = 4096
_NARROW_HIDDEN_SIZE = 384  # a model so narrow wants twice the tokens for a GPU's products
_WAITING_SECONDS = 10.0  # worth of short texts may wait, as many as that is where speeds are known
_WAITING_REQUESTS = 256
_MOST_WAITING = 4096  # requests, whatever the speed: each is a connection
_GENERATING = ("kv_cache_bytes", "kv_precision", "itl_target_ms")  # settings that mean nothing here


def decide(facts: Facts, settings: Settings, demand: Demand, timing: Timing | None) -> Capacity:
    """Raises `PlanImpossible` where the model does not fit, or what was asked for does not."""
    needs = demand.needs
    assert needs is not None, "what generates nothing is known by its needs"
    refuse_what_generating_asks(settings)
    left = room(facts, demand, 0, 0)
    fits = _most_tokens(settings, needs, demand, left)
    length = _model_len(settings, needs, left, fits)
    usual, most_texts = _SIZES[demand.kind]
    if demand.device is not None and needs.hidden_size <= _NARROW_HIDDEN_SIZE:
        usual *= 2
    target = _target(settings, needs, timing, fits, usual)
    batch = _batch(settings, needs, Fitting(target, length, fits), left)
    running = _texts(settings, batch.value, needs, most_texts)
    return Capacity(
        weight_bytes=weight_bytes(demand),
        kv_cache_bytes=Decision(0, "This model keeps no keys and values."),
        max_model_len=length,
        max_running_seqs=running,
        max_batch_tokens=batch,
        batch_target_tokens=target,
        max_waiting_requests=_waiting(settings, needs, timing, target.value)
        if timing is not None or demand.device is None or settings.max_waiting_requests != "auto"
        else Decision(_DEVICE_WAITING_REQUESTS, "Texts of a few of a device's steps; nobody knows yet how long they would wait."),
    )


def refuse_what_generating_asks(settings: Settings) -> None:
    """A setting that could change nothing is a mistake that its author should hear of."""
    asked = next((name for name in _GENERATING if getattr(settings, name) != "auto"), None)
    if asked is not None:
        raise PlanImpossible(f"{asked} is {getattr(settings, asked)}, but this model generates no text: leave it at auto.")


def _most_tokens(settings: Settings, needs: Needs, demand: Demand, left: Room) -> int:
    """Tokens of a step that there is memory for."""
    each = token_bytes(needs)
    if left.size < MIN_TOKENS * each:
        raise PlanImpossible(arithmetic(settings, demand, left))
    return left.size // each if each else max(needs.max_model_len, 2**20)


def _model_len(settings: Settings, needs: Needs, left: Room, fits: int) -> Decision[int]:
    """A text goes through a step as a whole."""
    asked, step = settings.max_model_len, settings.max_batch_tokens
    if asked != "auto" and asked > needs.max_model_len:
        raise PlanImpossible(f"max_model_len is {asked}, but the model was made for {needs.max_model_len} tokens at the most.")
    if asked != "auto" and step != "auto" and asked > step:
        raise PlanImpossible(f"max_model_len is {asked}, but a text is never divided, and a step has max_batch_tokens = {step}.")
    if asked != "auto" and asked > fits:
        raise PlanImpossible(f"A text of {asked} tokens has no room in one step: there is memory for {fits} ({left.story}).")
    if asked != "auto":
        return Decision(asked, "Asked for.")
    most = needs.max_model_len
    if step != "auto" and step < most:
        return Decision(
            step, f"The model was made for {most} tokens; a text is never divided, and steps of {step} were asked for."
        )
    if fits < most:
        return Decision(fits, f"The model was made for {most} tokens; a step has memory for {fits}: {left.story}.")
    return Decision(most, "As long as the model was made for.")


def _target(settings: Settings, needs: Needs, timing: Timing | None, fits: int, usual: int) -> Decision[int]:
    """The fewest tokens with which texts are as quick as they get, where that was measured."""
    if settings.max_batch_tokens != "auto":
        return Decision(settings.max_batch_tokens, "Asked for.")
    if needs.kind == "program":
        return _measured(timing, 1, _TARGET_ROWS, "rows") or Decision(
            _TARGET_ROWS, "Rows of a step: nobody knows yet what one costs; max_batch_tokens says it."
        )
    texts = 1 if settings.max_running_seqs == "auto" else settings.max_running_seqs
    found = _measured(timing, max(texts, LEAST_BATCH_TOKENS), usual, "tokens")
    wanted = Decision(usual, "Products reach their best rate there; a longer step would only make others wait.")
    if timing is not None and found is not None:
        wanted = _shared_out(timing, found)
    if wanted.value < texts:
        return Decision(texts, "One token for each of the texts that a step may have.")
    if wanted.value <= fits:
        return wanted
    return Decision(fits, f"Memory is short, and each token of a step takes some; otherwise {wanted.value}.")


def _measured(timing: Timing | None, least: int, usual: int, unit: str) -> Decision[int] | None:
    """Of at least so many; None where it is still rising at fewer than are usual."""
    sizes = sorted(size for size in timing.trial.encode_seconds if size >= least) if timing else []
    if timing is None or not sizes:
        return None
    rates = {size: timing.encode_rate(size) for size in sizes}
    best = max(rates, key=lambda size: rates[size])
    found = _fewest(rates, _NEARLY_BEST)
    if found / rates[found] > _LONG_SECONDS:
        found = _fewest(rates, _NEARLY_BEST_IF_LONG)
    if found == max(rates) < usual:
        return None  # measuring ended there
    near = "the best" if found == best else f"not far from the best ({rate(rates[best])} in steps of {best})"
    return Decision(
        found, f"Measured {rate(rates[found])} {unit}/s in steps of {found}, {near}; a longer step makes others wait."
    )


def _shared_out(timing: Timing, found: Decision[int]) -> Decision[int]:
    """More where that gives each thread texts enough, and a step stays short."""
    trial = timing.trial
    enough = min((size for size in trial.encode_seconds if size >= _SHARE_TOKENS * trial.threads), default=0)
    if trial.threads == 1 or enough <= found.value or trial.encode_seconds[enough] > _SHARES_SECONDS:
        return found
    measured = rate(timing.encode_rate(enough))
    return Decision(
        enough, f"Measured {measured} tokens/s in steps of {enough}: texts enough for {trial.threads} threads to share evenly."
    )


def _fewest(rates: Mapping[int, float], share: float) -> int:
    """Tokens of the smallest step with so much of the best rate."""
    return next(size for size, each in rates.items() if each >= share * max(rates.values()))


@dataclass(frozen=True, slots=True)
class Fitting:
    """Up to how many tokens are put together, how long a text may be, and how many of a step there is memory for."""

    target: Decision[int]
    length: Decision[int]
    fits: int


def _batch(settings: Settings, needs: Needs, fitting: Fitting, left: Room) -> Decision[int]:
    target, length = fitting.target, fitting.length
    if settings.max_batch_tokens != "auto":
        if settings.max_batch_tokens > fitting.fits:
            raise PlanImpossible(
                f"max_batch_tokens is {settings.max_batch_tokens}, but there is memory for {fitting.fits} tokens of a step: "
                f"{left.story}."
            )
        return Decision(settings.max_batch_tokens, "Asked for.")
    if length.value > target.value:
        return Decision(length.value, "The longest text, which goes alone: none is ever divided.")
    if needs.kind == "program":
        return Decision(target.value, "As many rows as are put together; those of a larger request span steps.")
    return Decision(target.value, "As many tokens as are put together; the longest text is shorter.")


def _texts(settings: Settings, batch_tokens: int, needs: Needs, most: int) -> Decision[int]:
    """`max_running_seqs` of what does not generate: texts of one step."""
    if settings.max_running_seqs == "auto":
        what = "Requests" if needs.kind == "program" else "Texts"
        return Decision(min(most, batch_tokens), f"{what} of one step: it is full before there are more.")
    if settings.max_running_seqs > batch_tokens:
        what = "row" if needs.kind == "program" else "token"
        raise PlanImpossible(
            f"max_running_seqs is {settings.max_running_seqs}, but a step has room for max_batch_tokens = {batch_tokens}, "
            f"and each text needs one {what} of it."
        )
    return Decision(settings.max_running_seqs, "Asked for.")


def _waiting(settings: Settings, needs: Needs, timing: Timing | None, target: int) -> Decision[int]:
    if settings.max_waiting_requests != "auto":
        return Decision(settings.max_waiting_requests, "Asked for.")
    if timing is None or not timing.trial.encode_seconds:
        return Decision(_WAITING_REQUESTS, "Nobody knows yet how long they would wait.")
    tokens, what = (1, "rows") if needs.kind == "program" else (TABLE_TEXT_TOKENS, f"texts of {TABLE_TEXT_TOKENS} tokens")
    requests = timing.encode_rate(target) / tokens * _WAITING_SECONDS
    return Decision(
        round(min(max(requests, 64), _MOST_WAITING)),
        f"About {_WAITING_SECONDS:.0f} s worth of {what}, one a request: who would wait longer is told when to return.",
    )
