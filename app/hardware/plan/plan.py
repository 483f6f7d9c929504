"""The serving plan: pure `make_plan` decides everything about one process on one machine, with reasons."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import ALL_KINDS, Decided, Decision, Measurements, PlanPart, RecipeKey
from app.hardware.facts import CudaDevice, Facts, Needs, to_json_value
from app.hardware.plan import capacity, devices, memory_budget, speed
from app.hardware.plan import threads as parallel
from app.hardware.plan.capacity import MemoryCapacity
from app.hardware.plan.devices import DEVICE_KERNELS, DeviceChoice, DevicePlan, needs_of_rank
from app.hardware.plan.engine import BY_TRANSFORMERS, decide_engine
from app.hardware.plan.memory_budget import MemoryDemand
from app.hardware.plan.precision import (
    QUANTIZED_PRECISIONS,
    PrecisionCandidates,
    available_precisions,
    is_batch_invariant,
)
from app.hardware.plan.speed import (
    NO_TRIALS,
    SEVERAL_SEQS,
    TYPICAL_CONTEXT,
    EstimateInputs,
    SpeedEstimate,
    TrialTiming,
    TrialTimings,
    known_timing,
)
from app.hardware.plan.threads import ThreadPlan
from app.hardware.plan.weights import WeightsAndKv, check_torch_can_run, decide_weights_and_kv
from app.hardware.probe import software
from app.hardware.probe.software import TORCH_KERNELS, WIDENING_LEVELS
from app.hardware.step_times import MIN_TARGET_SECONDS, MIXED_TO_DECODE_RATIO
from app.settings import Settings
from armature_kernels.linear.torchao_config import is_torchao


@dataclass(frozen=True)
class StepOptions(PlanPart):
    """Decisions about steps.

    `itl_target_seconds` None: relative to the decode steps measured while serving. `compile`: steps are recorded and
    replayed. `prompt_cache` is the folder in which prefixes are kept.
    """

    itl_target_seconds: Decided[float | None] = Decided(("decoder",))
    compile: Decided[bool] = Decided(ALL_KINDS)
    calibrate: Decided[bool] = Decided()
    speculation: Decided[bool] = Decided(("decoder",))
    draft_model: Decided[str | None] = Decided(("decoder",))
    prompt_cache: Decided[str | None] = Decided(("decoder",))
    prompt_cache_bytes: Decided[int] = Decided((), "bytes")
    deterministic: Decided[bool] = Decided()
    engine_process: Decided[bool] = Decided()
    api_processes: Decided[int] = Decided()
    data_parallel: Decided[int] = Decided()


HOST_MEMORY = "memory"  # as `prompt_cache`, in place of a folder
API_PROCESS_REASON = (
    "One process writes more tokens per second than most engines make; each further one takes a core and has a tokenizer of"
    " its own."
)


@dataclass(frozen=True, slots=True)
class StepOptionInputs:
    needs: Needs | None
    device: str
    level: str
    precision: str
    int8_copy: bool = False
    timing: TrialTiming | None = None


def decide_api_processes(settings: Settings) -> Decision[int]:
    """Decide the number of processes that serve HTTP. It is the same for all models."""
    if settings.api_processes != "auto":
        return Decision(settings.api_processes, "Asked for.")
    return Decision(1, API_PROCESS_REASON)


def _data_parallel(settings: Settings, device: str) -> Decision[int]:
    """Decide the number of engines. Raises `PlanImpossible` for what several engines cannot have in common."""
    number = settings.data_parallel
    if number == 1:
        return Decision(1, "Not asked for: one engine serves the model.")
    if decide_api_processes(settings).value > 1:
        raise PlanImpossible(f"data_parallel is {number}, and several API processes are not offered with it yet.")
    if settings.lora_root is not None:
        raise PlanImpossible(
            f"data_parallel is {number}, but lora_root is set: adapters that clients load reach one engine only. List them with lora."
        )
    if settings.tensor_parallel > 1:
        raise PlanImpossible(f"data_parallel is {number}, and tensor_parallel is not offered with it yet.")
    if settings.cuda_device != "auto":
        raise PlanImpossible(f"data_parallel is {number}, but cuda_device names one GPU: leave it at auto.")
    each = "a part of the processor's cores and memory" if device == "cpu" else "a GPU"
    return Decision(
        number,
        f"Asked for: so many engines have {each} each. A request goes to the engine with the least to do, where the tokens of its"
        " prompt that an engine has computed count as done.",
    )


def _engine_process(settings: Settings, device: str) -> Decision[bool]:
    if settings.data_parallel > 1 and settings.engine_process == "off":
        raise PlanImpossible(
            f"engine_process must not be off with data_parallel={settings.data_parallel}: each engine computes in a process."
        )
    if settings.data_parallel > 1:
        return Decision(True, "Each of several engines computes in a process of its own.")
    if decide_api_processes(settings).value > 1:
        if settings.engine_process == "off":
            raise PlanImpossible(
                "engine_process must not be off with several API processes (api_processes): they share an engine that"
                " computes in a process."
            )
        return Decision(True, "Several API processes share the engine.")
    if settings.engine_process == "on":
        return Decision(
            True, "Asked for, or one of several models: the kernels' threads serve one engine in a process."
        )
    if settings.engine_process == "off":
        return Decision(False, "Asked for.")
    if device != "cpu":
        return Decision(True, "A GPU's steps are shorter than what the server does for their tokens in Python.")
    return Decision(
        False, "The engine computes in a thread: a second process would hold its libraries and tokenizer twice."
    )


def decide_step_options(settings: Settings, measurements: Measurements | None, served: StepOptionInputs) -> StepOptions:
    return StepOptions(
        itl_target_seconds=_itl_target(settings, served),
        compile=_decide_recording(settings, served),
        calibrate=_calibrate(settings, measurements, served),
        speculation=_speculation(settings, served),
        draft_model=_draft_model(settings, served),
        prompt_cache=_prompt_cache(settings, served),
        prompt_cache_bytes=Decision(
            settings.prompt_cache_bytes, "Bound of the files of the prompt cache; the least recently used are removed."
        ),
        deterministic=decide_deterministic(
            settings, served.precision, served.int8_copy, served.level, served.needs is None or served.needs.generates
        ),
        engine_process=_engine_process(settings, served.device),
        api_processes=decide_api_processes(settings),
        data_parallel=_data_parallel(settings, served.device),
    )


def _itl_target(settings: Settings, served: StepOptionInputs) -> Decision[float | None]:
    """Decide the target of the inter-token latency; None: relative to decode steps, so that all can meet it."""
    if settings.itl_target_ms != "auto":
        return Decision(settings.itl_target_ms / 1000, "Asked for.")
    if served.needs is not None and not served.needs.generates:
        return Decision(None, "This model does not generate.")
    timing = served.timing
    rule = f"A step with a prompt chunk may take {MIXED_TO_DECODE_RATIO:g} times as long as one of decodes alone, as measured while serving"
    least = f"and at least {MIN_TARGET_SECONDS * 1000:.0f} ms"
    if timing is None:
        return Decision(None, f"{rule}, {least}.")
    alone = timing.steps.decode(SEVERAL_SEQS, SEVERAL_SEQS * TYPICAL_CONTEXT)
    target = max(MIXED_TO_DECODE_RATIO * alone, MIN_TARGET_SECONDS)
    return Decision(
        None,
        f"{rule}, {least}: about {target * 1000:.0f} ms with {SEVERAL_SEQS} sequences, whose steps take {alone * 1000:.1f} ms.",
    )


def _decide_recording(settings: Settings, served: StepOptionInputs) -> Decision[bool]:
    if served.needs is not None and served.needs.engine == "transformers":
        return Decision(False, f"{BY_TRANSFORMERS.capitalize()}; only native operations can be recorded.")
    if settings.compile == "off":
        return Decision(False, "Asked for: every step runs in Python.")
    if served.needs is not None and served.needs.kind == "program":
        return _program_recording(settings)
    if served.device != "cpu":
        return _decide_capture(settings, served)
    if is_torchao(served.precision):
        if settings.compile == "on":
            raise PlanImpossible(
                "compile is on, but torchao multiplies, and only native kernels can be recorded: leave it at auto."
            )
        return Decision(False, "torchao multiplies; only operations of the native kernels can be recorded.")
    if served.level != TORCH_KERNELS:
        asked = "Asked for: a" if settings.compile == "on" else "A"
        return Decision(
            True,
            f"{asked} step's operations, which are all native in {served.precision}, are recorded once and replayed by one native call, "
            "without a compiler and without a longer start.",
        )
    if settings.compile == "on":
        raise PlanImpossible(
            "compile is on, but the native kernels cannot run here, and only their operations can be recorded and replayed: "
            "leave it at auto."
        )
    return Decision(False, "Only operations of the native kernels can be recorded, and they cannot run here.")


def _decide_capture(settings: Settings, served: StepOptionInputs) -> Decision[bool]:
    kind = served.device
    if kind == "cuda":
        asked = "Asked for: s" if settings.compile == "on" else "S"
        which = "that only decode" if served.needs is None or served.needs.generates else "of few short texts"
        return Decision(
            True, f"{asked}teps {which} are captured once for each size of batch, and replayed (CUDA graphs)."
        )
    if settings.compile == "on":
        raise PlanImpossible(f"compile is on, but on {kind} nothing can be captured and replayed: leave it at auto.")
    return Decision(False, "On an Apple GPU nothing can be captured and replayed.")


def _program_recording(settings: Settings) -> Decision[bool]:
    if settings.compile == "on":
        raise PlanImpossible(
            "compile is on, but an exported program has its own operations, and only native kernels can be recorded: leave it at auto."
        )
    return Decision(False, "An exported program has its own operations; only native kernels can be recorded.")


def _calibrate(settings: Settings, measurements: Measurements | None, served: StepOptionInputs) -> Decision[bool]:
    if served.needs is not None and served.needs.engine == "transformers":
        return Decision(False, f"{BY_TRANSFORMERS.capitalize()}; only native engines are measured.")
    if settings.calibrate == "off":
        return Decision(False, "Asked for: decided from facts alone.")
    if served.needs is not None and served.needs.rows_vary:
        return Decision(False, "The cost of a row of this program depends on dimensions that each request chooses.")
    if measurements is None:
        return Decision(
            True,
            "This machine will be measured with this model's shapes before weights are read; later starts reuse the results.",
        )
    same = [trial.noise for trial in measurements.trials if trial.precision == served.precision]
    if same and all(same):
        return Decision(
            True, f"Measured in {measurements.seconds:.1f} s, but {same[0]}: the server measures again while idle."
        )
    if measurements.fallback:
        return Decision(True, f"Measured, but decided from facts alone, since {measurements.fallback}.")
    if measurements.is_partial:
        return Decision(
            True,
            "Measured while the server was idle, since no start could: armature calibrate measures all precisions.",
        )
    return Decision(True, f"Measured on this machine with this model's shapes, in {measurements.seconds:.1f} s.")


def _speculation(settings: Settings, served: StepOptionInputs) -> Decision[bool]:
    if settings.speculation == "off":
        return Decision(False, "Asked for.")
    if served.needs is not None and served.needs.engine == "transformers":
        return Decision(False, f"{BY_TRANSFORMERS.capitalize()}, which verifies no drafts here.")
    if served.needs is not None and not served.needs.generates:
        return Decision(False, "Only for models that generate.")
    if settings.draft_model is not None or _has_head(served):
        return Decision(
            True,
            "Tokens after a repeated phrase (n-gram speculation) or of the draft model are verified in one step: for each sequence those "
            "that were measured to gain more, and none while neither gains anything.",
        )
    return Decision(
        True,
        "Tokens after a repeated phrase are drafted and verified in one step (n-gram speculation); it pauses while it gains nothing.",
    )


def _has_head(served: StepOptionInputs) -> bool:
    return served.needs is not None and served.needs.draft is not None and served.device == "cpu"


def _draft_model(settings: Settings, served: StepOptionInputs) -> Decision[str | None]:
    """Decide which model drafts beside n-gram lookup. Raises `PlanImpossible` where nothing is drafted."""
    if settings.speculation == "mtp" and served.device != "cpu":
        raise PlanImpossible(
            f"speculation is mtp, but heads draft on processors only, and the device is {served.device}: use auto, or serve on the "
            "processor (device=cpu)."
        )
    if settings.draft_model is None and _has_head(served):
        return Decision("mtp", "The checkpoint has a head that drafts, with the precision of the model's weights.")
    if settings.draft_model is None:
        return Decision(None, "Not asked for: only n-gram lookup drafts.")
    if settings.speculation == "off":
        raise PlanImpossible("draft_model is set, but speculation is off: set it to auto, or leave draft_model out.")
    if served.device != "cpu":
        raise PlanImpossible(
            f"draft_model is set, but models draft on processors only, and the device is {served.device}: leave it out, or serve on "
            "the processor (device=cpu)."
        )
    draft = None if served.needs is None else served.needs.draft
    size = "" if draft is None else f" with {draft.num_parameters:,} parameters"
    return Decision(
        str(settings.draft_model),
        f"Asked for: a model{size}, whose drafts decide the speed and not the text; its weights have the precision of the model's.",
    )


def _prompt_cache(settings: Settings, served: StepOptionInputs) -> Decision[str | None]:
    if settings.prompt_cache is None:
        return Decision(None, "Not asked for: prefixes are cached in memory only.")
    in_memory = str(settings.prompt_cache) == HOST_MEMORY
    if in_memory and served.needs is not None and served.needs.state_bytes:
        raise PlanImpossible(
            f"prompt_cache is {HOST_MEMORY}, but recurrent states are not kept there: leave it out, or give a folder."
        )
    if in_memory and served.device == "cuda" and settings.tensor_parallel == 1:
        return Decision(
            HOST_MEMORY,
            "Asked for: keys and values that leave the GPU's memory are kept in the host's, and copied back where that is faster than"
            " computing.",
        )
    if in_memory:
        raise PlanImpossible(
            f"prompt_cache is {HOST_MEMORY}, which is for one NVIDIA GPU: give a folder, or leave it out, since prefixes are in"
            " memory anyway."
        )
    if served.device != "cpu":
        raise PlanImpossible(
            f"prompt_cache is a folder, but keys and values of a GPU are kept in the host's memory only: set it to {HOST_MEMORY},"
            " leave it out, or serve on the processor (device=cpu)."
        )
    return Decision(
        str(settings.prompt_cache.expanduser()),
        "Asked for: keys and values of prompts are written to this folder while nothing is computed, and read where that is "
        "faster than computing. Prompts can be recovered from it.",
    )


def decide_deterministic(
    settings: Settings, chosen: str, copy: bool, level: str, generates: bool = True
) -> Decision[bool]:
    """Decide if results are independent of other rows, bit for bit. Raises `PlanImpossible` if they cannot be."""
    if settings.deterministic == "off":
        what = ", and so occasionally a token" if generates else ""
        widens = chosen in QUANTIZED_PRECISIONS and level in WIDENING_LEVELS
        widened = " (with many rows it is multiplied in BF16)" if widens else ""
        return Decision(False, f"Not asked for: what else is in the batch may change a result slightly{what}{widened}.")
    if level in DEVICE_KERNELS.values():
        raise PlanImpossible(
            "deterministic is on, but on a GPU the order of sums depends on what else is in the batch: leave it off, or "
            "serve on the processor (device=cpu)."
        )
    if level == TORCH_KERNELS:
        raise PlanImpossible(
            "deterministic is on, but the native kernels cannot run here, and the order of sums in torch's products depends on "
            "what else is in the batch: leave it off."
        )
    if not is_batch_invariant(chosen, level):
        raise PlanImpossible(
            f"deterministic is on, but precision is {chosen}: set it to fp32, bf16, int8 or int4, whose products sum in one order "
            "for any number of rows."
        )
    if copy:
        raise PlanImpossible(
            "deterministic and int8_copy are both on, but the weights used for a row then depend on the batch: turn one of them off."
        )
    if not generates:
        return Decision(
            True,
            f"Asked for: products in {chosen} sum in one order for any number of rows, and attention covers each text alone.",
        )
    return Decision(
        True,
        f"Asked for: products in {chosen} sum in one order for any number of rows, and prompts use the attention of decodes; "
        "attention of prompts is slower, and all logits are written for each sampled token.",
    )


DECLARED: Mapping[str, Decided[Any]] = {
    name: field
    for part in (DevicePlan, WeightsAndKv, ThreadPlan, MemoryCapacity, StepOptions, SpeedEstimate)
    for name, field in vars(part).items()
    if isinstance(field, Decided)
}


@dataclass(frozen=True)
class ServingPlan:
    """Every choice for one process, in parts: `plan.memory.max_model_len`, `plan.decisions["..."].reason`."""

    placement: DevicePlan
    weights: WeightsAndKv
    cpu: ThreadPlan
    memory: MemoryCapacity
    steps: StepOptions
    speed: SpeedEstimate

    @property
    def decisions(self) -> Mapping[str, Decision[Any]]:
        return {name: decision for part in vars(self).values() for name, decision in part.decisions.items()}

    def changed(self, **values: Any) -> ServingPlan:
        unknown = values.keys() - self.decisions.keys()
        assert not unknown, f"the plan does not decide {', '.join(unknown)}"
        return ServingPlan(
            *(
                part.changed(**{name: value for name, value in values.items() if name in part.decisions})
                for part in vars(self).values()
            )
        )

    def to_json(self) -> dict[str, Any]:
        return {
            name: {"value": to_json_value(decision.value), "reason": decision.reason}
            for name, decision in self.decisions.items()
        }

    def gpu(self, facts: Facts) -> CudaDevice | None:
        """Return the GPU that `cuda_device` names; MIG instances share its index, so their UUIDs are compared too."""
        here = [gpu for gpu in facts.cuda if gpu.index == self.placement.cuda_device]
        return next((gpu for gpu in here if devices.cuda_name(gpu) == self.placement.visible_devices), None)

    def environment(self) -> dict[str, str]:
        """Return variables that thread pools read when they load; set them before torch is imported."""
        threads = str(self.cpu.threads)
        return {
            "OMP_NUM_THREADS": threads,
            "OMP_DYNAMIC": "false",
            "OMP_PROC_BIND": "false",  # the worker thread's mask is enough; binding would pin the event loop too
            "MKL_NUM_THREADS": threads,
            "VECLIB_MAXIMUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's own pool is not used
            "RAYON_NUM_THREADS": str(self.cpu.tokenizer_threads),
            "TOKENIZERS_PARALLELISM": "false",
            **parallel.WAIT_POLICY_VARIABLES[self.cpu.wait_policy],
            **self._device_environment(),
        }

    def _device_environment(self) -> dict[str, str]:
        """Return variables for torch and Triton: the GPU, and the folder of compiled kernels unless it is set."""
        if self.placement.device == "mps":
            return {
                "PYTORCH_ENABLE_MPS_FALLBACK": "0"
            }  # operations that torch lacks fail instead of running on the processor
        variables = {
            "CUDA_VISIBLE_DEVICES": self.placement.visible_devices,
            "TRITON_CACHE_DIR": self.weights.kernel_folder,
        }
        if "TRITON_CACHE_DIR" in os.environ:
            del variables["TRITON_CACHE_DIR"]
        device_order = (
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.placement.device == "cuda" else {}
        )  # makes an index mean the same as in nvidia-smi, if there is no UUID
        return {**device_order, **{name: value for name, value in variables.items() if value is not None}}


def make_plan(
    facts: Facts,
    measurements: Measurements | None,
    settings: Settings,
    needs: Needs | None,
    recipes: Collection[RecipeKey],
) -> ServingPlan:
    """Decide everything. Raises `PlanImpossible` or `NoRecipe` for what cannot be satisfied."""
    check_torch_can_run(facts)
    if settings.memory_bytes != "auto":
        facts = replace(facts, share_bytes=settings.memory_bytes)
    choice = devices.choose_device(facts, settings, needs, recipes)
    try:
        return _plan_on(choice, facts, measurements, settings, needs, recipes)
    except (PlanImpossible, NoRecipe) as refusal:
        fallback = devices.fallback_to_cpu(choice, settings, refusal.message)
        if fallback is None:
            raise
        try:
            return _plan_on(fallback, facts, measurements, settings, needs, recipes)
        except (PlanImpossible, NoRecipe):
            raise refusal from None  # the processor cannot serve it either


def _plan_on(
    choice: DeviceChoice,
    facts: Facts,
    measurements: Measurements | None,
    settings: Settings,
    needs: Needs | None,
    recipes: Collection[RecipeKey],
) -> ServingPlan:
    kind = choice.plan.device
    if needs is not None and settings.tensor_parallel > 1:
        needs = needs_of_rank(needs, settings.tensor_parallel)
    device = memory_budget.find_device_memory(facts, settings, kind, choice.gpu)
    kernels = software.decide_native_kernels(facts) if device is None else devices.decide_device_kernels(kind)
    by_library = decide_engine(settings, needs, kind).value == "transformers"
    if by_library:
        whole = Decision(TORCH_KERNELS, f"{BY_TRANSFORMERS.capitalize()} with torch's own operations.")
        layers = f"{BY_TRANSFORMERS.capitalize()}, except linear layers that are held in our forms. {kernels.reason}"
        kernels = Decision(kernels.value, layers) if device is None and kernels.value != TORCH_KERNELS else whole
    all_threads = _decide_threads(facts, settings, kind)
    node, trials = all_threads.numa_node, TrialTimings.from_measurements(measurements)
    if kind == "cuda" and needs is not None and needs.expert_weights:  # whose products there are of 16 or 32 bits
        recipes = [key for key in recipes if (key[0], key[2]) != ("cuda", "int4")]
    built = available_precisions(recipes, kind, facts.architecture, settings)
    if by_library and settings.weight_format == "auto":
        built -= set(QUANTIZED_PRECISIONS)
    candidates = PrecisionCandidates(facts, settings, needs, node, built, kernels.value, device)
    weights = decide_weights_and_kv(candidates, kernels, measurements, all_threads.threads)
    cpu = _decide_threads(facts, settings, kind, trials, weights.precision)
    timing = trials.find_served(weights.precision, cpu.threads, int8_copy=weights.int8_copy)
    demand = MemoryDemand(needs, weights.precision, weights.kv_precision, node, weights.int8_copy, device)
    inputs_of_estimate = EstimateInputs(facts, needs, kernels.value, kind, measurements)
    expected = timing or known_timing(inputs_of_estimate, weights.precision, cpu.threads)
    if needs is None or needs.generates:
        memory = capacity.decide_capacity(facts, settings, demand, timing)
    else:
        memory = capacity.decide_encoder_capacity(facts, settings, demand, timing, expected)
    limits = speed.SpeedLimits(memory.batch_target_tokens, memory.max_running_seqs, memory.weight_bytes)
    served = StepOptionInputs(needs, kind, kernels.value, weights.precision, weights.int8_copy, timing)
    return ServingPlan(
        choice.plan,
        weights,
        cpu,
        memory,
        decide_step_options(settings, measurements, served),
        speed.estimate_speed(measurements, speed.SpeedInputs(needs, weights.precision, limits, expected)),
    )


def _decide_threads(
    facts: Facts, settings: Settings, kind: str, trials: TrialTimings = NO_TRIALS, precision: str = ""
) -> ThreadPlan:
    if kind != "cpu":
        return parallel.decide_host_threads(facts, settings)
    return parallel.decide_threads(facts, settings, trials, precision)
