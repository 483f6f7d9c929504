"""Capacity of a model: weights, KV cache, context length, sequences and tokens of a step.

Each value is limited by the memory. A setting that does not fit is refused with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.errors import PlanImpossible
from app.hardware.decision import ALL_KINDS, Decided, Decision, PlanPart, format_bytes, format_count
from app.hardware.facts import Facts, Needs
from app.hardware.plan.memory_budget import (
    KV_PAGE_TOKENS,
    MIN_BATCH_TOKENS,
    MIN_CONTEXT_TOKENS,
    STATE_ROWS,
    MemoryBudget,
    MemoryDemand,
    activation_bytes_per_token,
    does_not_fit_message,
    memory_budget,
    useful_kv_cache_bytes,
)
from app.hardware.plan.speed import TrialTiming, format_rate
from app.hardware.step_times import TABLE_TEXT_TOKENS
from app.settings import Settings, settings_with

_TARGET_TOKENS = 512  # products reach their best rate on a CPU at this size
_TARGET_ROWS = 32  # rows of an exported program, if their cost was not measured
# Share of the best measured rate that a smaller step must reach, for short and for long steps. A new request waits for
# the running step, so shorter steps are preferred. (FP32 on two Cascade Lake cores: steps of 1,024 tokens of
# all-MiniLM-L6-v2 take 0.31 s and have a rate 6% above that of 128 tokens in 0.04 s.)
_TEXT_RATE_SHARE, _TEXT_RATE_SHARE_IF_LONG = 0.9, 0.8
_LONG_SECONDS = 0.05  # a step that takes longer is long
# A step is divided between threads at the ends of texts. With few texts for each thread, one thread waits for another.
# Calibration does not show that, since its texts have one length. (int8 all-MiniLM-L6-v2 on two Cascade Lake cores, 32
# clients: 6,000, 8,100 and 9,200 tokens/s in steps of 128, 256 and 512, while calibration measured 10,100, 11,000 and
# 11,600. The longest steps had the lowest p99.)
_TOKENS_PER_THREAD, _MAX_SHARED_STEP_SECONDS = 256, 0.1  # tokens for each thread, if the step then takes at most 0.1 s
_MAX_TEXTS = 256  # texts of a step
# A GPU's products need thousands of rows, and the host's work for a step does not grow with them. A Mac's GPU has
# about a tenth of that speed. Not measured yet.
_TEXT_STEPS = {"cpu": (_TARGET_TOKENS, _MAX_TEXTS), "cuda": (16_384, 1024), "mps": (4096, 256)}
_DEVICE_WAITING_REQUESTS = 4096
_NARROW_HIDDEN_SIZE = 384  # up to this hidden size, a GPU's products need twice the tokens
_WAITING_SECONDS = 10.0  # if the speed is known, the short texts of this many seconds may wait
_WAITING_REQUESTS = 256
_MAX_WAITING_REQUESTS = 4096  # requests at any speed, because each is an open connection
_MIN_RATE_SHARE = 0.95  # share of the best measured rate that a shorter step must reach to be preferred
_CHECKPOINTS_DIVISOR = 64  # of the memory, for states that are kept for prefixes, if that is more of them
_NO_STATE = Decision(0, "This model has no recurrent state.")
_WAITING_PER_RUNNING = 4  # waiting requests for each running sequence


@dataclass(frozen=True, slots=True)
class DefaultStepSizes:
    """Step sizes that are used if nothing is set and nothing was measured, with their reasons."""

    running_seqs: int
    running_reason: str
    batch_tokens: int
    batch_reason: str


# Beyond 64 rows the rate of products grows little (BF16 on two Zen 5 cores: 19.7 thousand rows a second at 64, 23 at
# 128, 25 at 512), while each sequence waits for all the others.
_ON_PROCESSOR = DefaultStepSizes(
    64, "With more rows, products gain little speed, and each sequence waits for the others.",
    512, "Products reach their best rate at this size; a longer step would only make the other sequences wait.",
)  # fmt: skip
# A GPU reads every weight once in each step, for any number of sequences. It needs hundreds of rows before its
# products are the limit, and the host's work for a step is the same for any number of rows. Not measured on a GPU yet;
# calibration will replace this.
_ON_GPU = DefaultStepSizes(
    256, "A step reads every weight once for all of them; with more, products are the limit.",
    8192, "Large parts of prompts: the device's products reach their best rate, and the host's work for a step is paid once.",
)  # fmt: skip
# A Mac's GPU has about a tenth of that speed, so the values are between the two. A step of many seconds would also
# delay the release of requests whose clients have left.
_ON_MAC = DefaultStepSizes(
    64, "A step reads every weight once for all of them; each sequence waits for the others.",
    1024, "Products reach their best rate at this size; a longer step would only make the other sequences wait.",
)  # fmt: skip
_DEFAULT_SIZES: Mapping[str, DefaultStepSizes] = {"cpu": _ON_PROCESSOR, "cuda": _ON_GPU, "mps": _ON_MAC}


@dataclass(frozen=True)
class MemoryCapacity(PlanPart):
    """Decisions about memory and step sizes; beyond `batch_target_tokens` a step has only a single text."""

    weight_bytes: Decided[int] = Decided(ALL_KINDS, unit="bytes", zero_is_unknown=True)
    kv_cache_bytes: Decided[int] = Decided(("decoder",), unit="bytes")
    state_bytes: Decided[int] = Decided(("decoder",), unit="bytes", zero_is_unknown=True)
    max_model_len: Decided[int] = Decided(("decoder", "encoder"), zero_is_unknown=True)
    max_running_seqs: Decided[int] = Decided(ALL_KINDS)
    max_batch_tokens: Decided[int] = Decided(ALL_KINDS)
    batch_target_tokens: Decided[int] = Decided(("encoder", "program"))
    max_waiting_requests: Decided[int] = Decided()


def decide_capacity(
    facts: Facts, settings: Settings, demand: MemoryDemand, timing: TrialTiming | None = None
) -> MemoryCapacity:
    """Decide the capacity of a model that generates. Raises `PlanImpossible` if something does not fit."""
    batch = decide_step_tokens(facts, settings, demand, timing)
    running = _running_seqs(settings, batch.value, _default_sizes(demand))
    left = _checked_budget(facts, settings, demand, batch.value, running.value)
    running, states, left = _recurrent_states(settings, demand, running, left)
    if settings.kv_cache_bytes != "auto":
        left = _forced_budget(settings.kv_cache_bytes, left)
    length = _model_len(settings, demand, left)
    if settings.max_running_seqs == "auto":
        running = _limit_by_memory(running, demand, left)
        if facts.commit_left_bytes is not None and demand.device is None:
            running = _limit_by_reservation(running, length.value * demand.kv_bytes_per_token, left)
    waiting = _WAITING_PER_RUNNING * running.value
    return MemoryCapacity(
        weight_bytes=decide_weight_bytes(demand),
        kv_cache_bytes=_kv_cache_bytes(settings, demand, left, running.value, length.value),
        state_bytes=states,
        max_model_len=length,
        max_running_seqs=running,
        max_batch_tokens=batch,
        batch_target_tokens=Decision(
            batch.value, "Prompts fill a step as far as the inter-token latency of running streams allows."
        ),
        max_waiting_requests=Decision(
            waiting,
            f"{_WAITING_PER_RUNNING} times the running sequences; further requests are refused with a Retry-After.",
        )
        if settings.max_waiting_requests == "auto"
        else Decision(settings.max_waiting_requests, "Asked for."),
    )


def decide_weight_bytes(demand: MemoryDemand) -> Decision[int]:
    if demand.needs is None:
        return Decision(0, "No model is given.")
    where = "" if demand.device is None else f" on the device. {demand.device.host_note}"
    return Decision(demand.weight_bytes, f"Resident in {demand.weights_name}{where or '.'}")


def decide_step_tokens(
    facts: Facts, settings: Settings, demand: MemoryDemand, timing: TrialTiming | None
) -> Decision[int]:
    """Decide the tokens of a step: the smallest size with nearly the best measured rate, or a default."""
    if settings.max_batch_tokens != "auto":
        return Decision(settings.max_batch_tokens, "Asked for.")
    usual = _default_sizes(demand)
    running = usual.running_seqs if settings.max_running_seqs == "auto" else settings.max_running_seqs
    best = _measured_step_tokens(timing, running, usual.batch_tokens)
    wanted = best or Decision(usual.batch_tokens, usual.batch_reason)
    if wanted.value < running:
        return Decision(running, "One token for each of the sequences that may run.")
    least = max(running, MIN_BATCH_TOKENS)
    tokens = wanted.value
    while tokens // 2 >= least and not _has_useful_budget(facts, settings, demand, tokens, running):
        tokens //= 2
    if tokens == wanted.value:
        return wanted
    return Decision(tokens, f"Memory is short, and each token of a step takes some; otherwise {wanted.value}.")


def _default_sizes(demand: MemoryDemand) -> DefaultStepSizes:
    return _DEFAULT_SIZES[demand.kind]


def _measured_step_tokens(timing: TrialTiming | None, running: int, usual: int) -> Decision[int] | None:
    """Return the smallest measured size within 5% of the best rate that leaves room beside all decodes."""
    sizes = [size for size in timing.trial.prefill_seconds if size >= running + MIN_BATCH_TOKENS] if timing else []
    if timing is None or not sizes:
        return None
    rates = {size: timing.prefill_rate(size) for size in sorted(sizes)}
    best = max(rates, key=lambda size: rates[size])
    found = next(size for size, each in rates.items() if each >= _MIN_RATE_SHARE * rates[best])
    if found == max(sizes) < usual:
        return None  # the rate still rises at the largest measured size
    if found == best:
        return Decision(
            found, f"Measured: prompts are quickest in steps of {found} tokens, {format_rate(rates[found])} tokens/s."
        )
    return Decision(
        found,
        f"Measured {format_rate(rates[found])} tokens/s of a prompt in steps of {found} tokens, "
        f"within 5% of the best ({format_rate(rates[best])} in "
        f"steps of {best}); a longer step would only make the other sequences wait.",
    )


def _has_useful_budget(facts: Facts, settings: Settings, demand: MemoryDemand, batch_tokens: int, running: int) -> bool:
    return memory_budget(facts, demand, batch_tokens, running).size >= useful_kv_cache_bytes(settings, demand)


def _running_seqs(settings: Settings, batch_tokens: int, usual: DefaultStepSizes) -> Decision[int]:
    if settings.max_running_seqs == "auto":
        return Decision(min(usual.running_seqs, batch_tokens), usual.running_reason)
    if settings.max_running_seqs > batch_tokens:
        raise PlanImpossible(
            f"max_running_seqs is {settings.max_running_seqs}, but a step has at most max_batch_tokens = {batch_tokens} tokens, "
            "and each running sequence needs one of them."
        )
    return Decision(settings.max_running_seqs, "Asked for.")


def _checked_budget(
    facts: Facts, settings: Settings, demand: MemoryDemand, batch_tokens: int, running: int
) -> MemoryBudget:
    """Return the memory that is left for keys and values. Raises `PlanImpossible` if nothing is left."""
    left = memory_budget(facts, demand, batch_tokens, running)
    if demand.needs and left.size < MIN_CONTEXT_TOKENS * demand.kv_bytes_per_token:
        raise PlanImpossible(does_not_fit_message(settings, demand, left))
    return replace(left, size=max(0, left.size))


def _forced_budget(asked: int, left: MemoryBudget) -> MemoryBudget:
    if asked > left.size:
        raise PlanImpossible(
            f"kv_cache_bytes is {format_bytes(asked)}, but only {format_bytes(left.size)} are available: {left.explanation}."
        )
    return replace(left, size=asked, explanation=f"kv_cache_bytes is {format_bytes(asked)}")


def _model_len(settings: Settings, demand: MemoryDemand, room: MemoryBudget) -> Decision[int]:
    needs, asked = demand.needs, settings.max_model_len
    if needs is None:
        return Decision(
            0 if asked == "auto" else asked, "Known when a model is given." if asked == "auto" else "Asked for."
        )
    if asked != "auto" and asked > needs.max_model_len:
        raise PlanImpossible(f"max_model_len is {asked}, but the model supports at most {needs.max_model_len} tokens.")
    wanted = needs.max_model_len if asked == "auto" else asked
    fits = demand.kv_tokens(room.size) if demand.kv_bytes_per_token else wanted
    if fits >= wanted:
        return Decision(wanted, "The longest context that the model supports." if asked == "auto" else "Asked for.")
    if asked != "auto" or fits < MIN_CONTEXT_TOKENS:
        raise PlanImpossible(
            f"A context of {wanted if asked != 'auto' else MIN_CONTEXT_TOKENS} tokens needs "
            f"{format_bytes((wanted if asked != 'auto' else MIN_CONTEXT_TOKENS) * demand.kv_bytes_per_token)} of keys and values, "
            f"but only {format_bytes(room.size)} are available: {room.explanation}."
        )
    return Decision(
        fits,
        f"The model supports {wanted} tokens, but the memory holds the keys and values of {fits}: {room.explanation}.",
    )


def _limit_by_memory(running: Decision[int], demand: MemoryDemand, room: MemoryBudget) -> Decision[int]:
    if not demand.kv_bytes_per_token:
        return running
    least = MIN_CONTEXT_TOKENS if demand.device is None else KV_PAGE_TOKENS
    fits = max(1, demand.kv_tokens(room.size) // least)
    if fits >= running.value:
        return running
    return Decision(
        fits, f"The memory holds the keys and values of {format_count(fits, 'short sequence')}: {room.explanation}."
    )


def _limit_by_reservation(running: Decision[int], sequence_bytes: int, left: MemoryBudget) -> Decision[int]:
    """Reduce the sequences so that two slots for each can be reserved at once under strict overcommit."""
    fits = left.size // (2 * sequence_bytes) if sequence_bytes else running.value
    if fits >= running.value:
        return running
    return Decision(
        max(1, fits),
        f"With vm.overcommit_memory=2 the whole reservation counts at once, and each sequence reserves {format_bytes(2 * sequence_bytes)}: "
        f"{left.explanation}. A smaller max_model_len allows more sequences.",
    )


def _recurrent_states(
    settings: Settings, demand: MemoryDemand, running: Decision[int], left: MemoryBudget
) -> tuple[Decision[int], Decision[int], MemoryBudget]:
    """Return the sequences that run, the bytes of their recurrent states, and what these leave for keys and values.

    Raises `PlanImpossible` if they do not fit. States take at most half of the memory, unless the number of sequences was
    asked for: those of running sequences, of as many finished ones, and checkpoints, from which prefixes go on; of small
    states there are more checkpoints, in `_CHECKPOINTS_DIVISOR` of the memory. One more is held than run, for the prompt that
    beams share.
    """
    each = demand.state_bytes
    if not each:
        return running, _NO_STATE, left
    asked, rows = settings.max_running_seqs != "auto", STATE_ROWS[demand.kind]
    half = left.size // 2 // each
    fits = left.size // each // rows - 1 if asked else half // 2 // rows
    if left.size < 2 * rows * each or (asked and fits < running.value):
        raise PlanImpossible(
            f"The recurrent state of one sequence takes {format_bytes(each)}, but only {format_bytes(left.size)} are available for"
            f" those of {format_count(running.value, 'sequence')} and their keys and values: {left.explanation}."
        )
    if fits < running.value:
        reason = f"Half of the memory holds the recurrent states, {format_bytes(each)} for each: {left.explanation}."
        running = Decision(max(1, fits), reason)
    useful = max((2 * rows + 1) * running.value, left.size // _CHECKPOINTS_DIVISOR // each)
    size = max(rows * (running.value + 1), min(useful, half)) * each
    held = f"{format_bytes(size)} for recurrent states"
    states = Decision(
        size,
        f"{format_bytes(each)} for each sequence at a time, however long, and as much for each of {size // each - running.value} prefixes.",
    )
    return running, states, replace(left, size=left.size - size, explanation=f"{left.explanation} less {held}")


def _kv_cache_bytes(
    settings: Settings, demand: MemoryDemand, room: MemoryBudget, running: int, length: int
) -> Decision[int]:
    """Decide the size of the KV cache: at most twice what running sequences can use, for cached prefixes."""
    useful = demand.kv_bytes(2 * running, length)
    if settings.kv_cache_bytes != "auto":
        return Decision(settings.kv_cache_bytes, "Asked for.")
    if demand.needs is None:
        return Decision(room.size, f"{room.explanation}; the weights of a model will be subtracted from that.")
    if not demand.kv_bytes_per_token:
        return Decision(0, "This model keeps no keys and values.")
    if useful <= room.size:
        return Decision(useful, "Every running sequence at its longest, and the same amount again for cached prefixes.")
    return Decision(room.size, f"{room.explanation}. Pages are allocated when they are first written.")


def decide_encoder_capacity(
    facts: Facts,
    settings: Settings,
    demand: MemoryDemand,
    timing: TrialTiming | None,
    expected: TrialTiming | None = None,
) -> MemoryCapacity:
    """Decide the capacity of an encoder or an exported program. Raises `PlanImpossible` if something does not fit.

    `expected` is the timing, or an estimate: it decides how many requests may wait, not the steps.
    """
    needs = demand.needs
    assert needs is not None, "a model that does not generate has needs"
    refuse_generation_settings(settings)
    left = memory_budget(facts, demand, 0, 0)
    fits = _max_step_tokens(settings, needs, demand, left)
    length = _text_len(settings, needs, left, fits)
    usual, most_texts = _TEXT_STEPS[demand.kind]
    if demand.device is not None and needs.hidden_size <= _NARROW_HIDDEN_SIZE:
        usual *= 2
    target = _target(settings, needs, timing, fits, usual)
    batch = _max_batch_tokens(settings, needs, target, length, fits, left)
    running = _texts_per_step(settings, batch.value, needs, most_texts)
    return MemoryCapacity(
        weight_bytes=decide_weight_bytes(demand),
        kv_cache_bytes=Decision(0, "This model keeps no keys and values."),
        state_bytes=_NO_STATE,
        max_model_len=length,
        max_running_seqs=running,
        max_batch_tokens=batch,
        batch_target_tokens=target,
        max_waiting_requests=_max_waiting(settings, needs, timing or expected, target.value)
        if timing is not None or demand.device is None or settings.max_waiting_requests != "auto"
        else Decision(
            _DEVICE_WAITING_REQUESTS,
            "The texts of a few steps of a GPU; the time that they would wait was not measured.",
        ),
    )


def refuse_generation_settings(settings: Settings) -> None:
    """Raise `PlanImpossible` for settings that have no effect for a model that does not generate."""
    for name in settings_with(generates_only=True):
        value, default = getattr(settings, name), Settings.model_fields[name].default
        if value != default:
            remedy = f"leave it at {default}" if default else "leave it out"
            raise PlanImpossible(f"{name} is {value}, but this model generates no text: {remedy}.")


def _max_step_tokens(settings: Settings, needs: Needs, demand: MemoryDemand, left: MemoryBudget) -> int:
    each = activation_bytes_per_token(needs)
    if left.size < MIN_CONTEXT_TOKENS * each:
        raise PlanImpossible(does_not_fit_message(settings, demand, left))
    return left.size // each if each else max(needs.max_model_len, 2**20)


def _text_len(settings: Settings, needs: Needs, left: MemoryBudget, fits: int) -> Decision[int]:
    asked, step = settings.max_model_len, settings.max_batch_tokens
    if asked != "auto" and asked > needs.max_model_len:
        raise PlanImpossible(f"max_model_len is {asked}, but the model supports at most {needs.max_model_len} tokens.")
    if asked != "auto" and step != "auto" and asked > step:
        raise PlanImpossible(
            f"max_model_len is {asked}, but a text is never divided, and a step has at most max_batch_tokens = {step} tokens."
        )
    if asked != "auto" and asked > fits:
        raise PlanImpossible(
            f"A text of {asked} tokens does not fit in one step: there is memory for {fits} tokens ({left.explanation})."
        )
    if asked != "auto":
        return Decision(asked, "Asked for.")
    most = needs.max_model_len
    if step != "auto" and step < most:
        return Decision(
            step, f"The model supports {most} tokens, but a text is never divided, and max_batch_tokens is {step}."
        )
    if fits < most:
        return Decision(
            fits, f"The model supports {most} tokens, but a step has memory for {fits}: {left.explanation}."
        )
    return Decision(most, "The longest text that the model supports.")


def _target(settings: Settings, needs: Needs, timing: TrialTiming | None, fits: int, usual: int) -> Decision[int]:
    """Decide the tokens up to which texts are batched: the smallest with nearly the best rate, or a default."""
    if settings.max_batch_tokens != "auto":
        return Decision(settings.max_batch_tokens, "Asked for.")
    if needs.kind == "program":
        return _measured_target(timing, 1, _TARGET_ROWS, "rows") or Decision(
            _TARGET_ROWS, "Rows of a step; the cost of a row was not measured. Set max_batch_tokens to change it."
        )
    texts = 1 if settings.max_running_seqs == "auto" else settings.max_running_seqs
    found = _measured_target(timing, max(texts, MIN_BATCH_TOKENS), usual, "tokens")
    wanted = Decision(usual, "Products reach their best rate at this size; a longer step would only make others wait.")
    if timing is not None and found is not None:
        wanted = _enough_for_threads(timing, found)
    if wanted.value < texts:
        return Decision(texts, "One token for each text that a step may have.")
    if wanted.value <= fits:
        return wanted
    return Decision(fits, f"Memory is short, and each token of a step takes some; otherwise {wanted.value}.")


def _measured_target(timing: TrialTiming | None, least: int, usual: int, unit: str) -> Decision[int] | None:
    """Return the smallest measured size of at least `least` with nearly the best rate.

    None if nothing was measured, or if the rate still rises at the largest measured size and that is below `usual`.
    """
    sizes = sorted(size for size in timing.trial.encode_seconds if size >= least) if timing else []
    if timing is None or not sizes:
        return None
    rates = {size: timing.encode_rate(size) for size in sizes}
    best = max(rates, key=lambda size: rates[size])
    found = _smallest_size(rates, _TEXT_RATE_SHARE)
    if found / rates[found] > _LONG_SECONDS:
        found = _smallest_size(rates, _TEXT_RATE_SHARE_IF_LONG)
    if found == max(rates) < usual:
        return None  # the rate may rise beyond the largest measured size
    near = "the best" if found == best else f"close to the best ({format_rate(rates[best])} in steps of {best})"
    return Decision(
        found,
        f"Measured {format_rate(rates[found])} {unit}/s in steps of {found}, {near}; a longer step makes others wait.",
    )


def _enough_for_threads(timing: TrialTiming, found: Decision[int]) -> Decision[int]:
    """Return a larger size if it gives each thread enough texts and the step stays short; else `found`."""
    trial = timing.trial
    enough = min((size for size in trial.encode_seconds if size >= _TOKENS_PER_THREAD * trial.threads), default=0)
    if trial.threads == 1 or enough <= found.value or trial.encode_seconds[enough] > _MAX_SHARED_STEP_SECONDS:
        return found
    measured = format_rate(timing.encode_rate(enough))
    return Decision(
        enough,
        f"Measured {measured} tokens/s in steps of {enough}: enough texts for {trial.threads} threads to share evenly.",
    )


def _smallest_size(rates: Mapping[int, float], share: float) -> int:
    return next(size for size, each in rates.items() if each >= share * max(rates.values()))


def _max_batch_tokens(
    settings: Settings, needs: Needs, target: Decision[int], length: Decision[int], fits: int, left: MemoryBudget
) -> Decision[int]:
    if settings.max_batch_tokens != "auto":
        if settings.max_batch_tokens > fits:
            raise PlanImpossible(
                f"max_batch_tokens is {settings.max_batch_tokens}, but there is memory for a step of {fits} tokens: "
                f"{left.explanation}."
            )
        return Decision(settings.max_batch_tokens, "Asked for.")
    if length.value > target.value:
        return Decision(length.value, "The longest text, which is computed alone: a text is never divided.")
    if needs.kind == "program":
        return Decision(target.value, "The rows that are batched together; a larger request spans several steps.")
    return Decision(target.value, "The tokens that are batched together; the longest text is shorter.")


def _texts_per_step(settings: Settings, batch_tokens: int, needs: Needs, most: int) -> Decision[int]:
    if settings.max_running_seqs == "auto":
        what = "Requests" if needs.kind == "program" else "Texts"
        return Decision(
            min(most, batch_tokens), f"{what} of one step; the tokens of a step are used up before there are more."
        )
    if settings.max_running_seqs > batch_tokens:
        what = "row" if needs.kind == "program" else "token"
        raise PlanImpossible(
            f"max_running_seqs is {settings.max_running_seqs}, but a step has at most max_batch_tokens = {batch_tokens}, "
            f"and each text needs one {what} of it."
        )
    return Decision(settings.max_running_seqs, "Asked for.")


def _max_waiting(settings: Settings, needs: Needs, timing: TrialTiming | None, target: int) -> Decision[int]:
    if settings.max_waiting_requests != "auto":
        return Decision(settings.max_waiting_requests, "Asked for.")
    if timing is None or not timing.trial.encode_seconds:
        return Decision(_WAITING_REQUESTS, "A default: the time that they would wait was not measured.")
    tokens, what = (
        (1, "rows") if needs.kind == "program" else (TABLE_TEXT_TOKENS, f"texts of {TABLE_TEXT_TOKENS} tokens")
    )
    requests = timing.encode_rate(target) / tokens * _WAITING_SECONDS
    estimated = ""
    if timing.source != "measured":  # estimates are low: no request is refused for them
        estimated, requests = ", estimated from bytes and operations", max(requests, _WAITING_REQUESTS)
    return Decision(
        round(min(max(requests, 64), _MAX_WAITING_REQUESTS)),
        f"About {_WAITING_SECONDS:.0f} s of {what}, one for each request{estimated}; further requests are refused with a Retry-After.",
    )
