// Machine: what this machine is, what was chosen for it and why, what was measured, and what the precision costs.

import { getJson } from "./api.js";
import { bytes, count, el, errorBox, number, percent, seconds, table } from "./dom.js";

/** Decisions that most readers look for first, in plain words. The others are in the list below. */
const MAIN_DECISIONS = {
  device: "Serves on",
  precision: "Weights are held in",
  kernels: "Instructions used",
  threads: "Threads that compute",
  kv_precision: "Context is held in",
  max_model_len: "Longest context",
  max_running_seqs: "Sequences at once",
  max_batch_tokens: "Most tokens in a step",
  kv_cache_bytes: "Memory for contexts",
  speculation: "Drafts tokens ahead",
  draft_model: "Model that drafts too",
  compile: "Replays recorded steps",
};
const PHASES = {
  decode: "One answer at a time",
  decode_full: "Many answers at once",
  prefill: "Reading prompts",
  encode: "Reading many texts",
  encode_few: "Reading few texts",
};
/** Of each phase: the caption of its speeds, and what they are listed by. */
const CAPACITY = {
  decode: ["Writing, tokens a second", "Answers at once"],
  prefill: ["Reading prompts, tokens a second", "Tokens in a step"],
  encode: ["Reading texts, tokens a second", "Tokens in a step"],
};

export class MachinePage {
  constructor() {
    this.element = el("div", { class: "page" }, el("h1", {}, "Machine"));
  }

  async shown() {
    try {
      const info = await getJson("info");
      this.element.replaceChildren(el("h1", {}, "Machine"), ...describe(info));
    } catch (error) {
      this.element.replaceChildren(el("h1", {}, "Machine"), errorBox(error));
    }
  }
}

function describe(info) {
  return [
    el("p", { class: "lead" }, summary(info)),
    el("h2", {}, "This machine"),
    facts(info),
    el("h2", {}, "What was chosen, and why"),
    decisions(info.plan),
    el("h2", {}, "What to expect"),
    ...expectations(info),
    el("h2", {}, "Measured against the machine's ceilings"),
    ...ceilings(info),
    el("h2", {}, "What the precision costs"),
    ...precision(info),
    otherDecisions(info.plan),
  ];
}

function summary({ model, plan, facts: { cores, memory_bytes }, speed }) {
  const device = plan.device.value === "cpu" ? `on ${plan.threads.value} of ${cores.length} cores` : `on ${plan.device.value}`;
  const rate = speed.capacity_tokens_per_second?.decode?.[1];
  const parameters = model.num_parameters ? ` with ${count(model.num_parameters)} parameters` : "";
  const says = rate ? ` One answer should get about ${number(rate)} tokens a second${speed.estimated ? " (estimated)" : ""}.` : "";
  return `${model.name}, a ${model.kind}${parameters}, is served ${device} in ${plan.precision.value}, in a machine with ${bytes(memory_bytes)} of memory.${says}`;
}

function facts({ facts: known, place }) {
  const cpu = [known.cpu.vendor, known.cpu.name].filter((part, index, all) => part && !(index === 0 && all[1]?.includes(part)));
  const caches = known.caches.map(({ level, kind, size_bytes, shared_by }) => `L${level}${kind === "unified" ? "" : kind[0]} ${bytes(size_bytes)}${shared_by > 1 ? ` for ${shared_by}` : ""}`);
  const group = known.cgroup;
  const limits = [
    group?.quota_cores && `${number(group.quota_cores)} cores`,
    group?.memory_limit_bytes && `${bytes(group.memory_limit_bytes)} of memory`,
  ].filter(Boolean);
  const gpus = known.cuda.map(({ name, memory_bytes }) => `${name}${memory_bytes ? `, ${bytes(memory_bytes)}` : ""}`);
  const rows = [
    ["Processor", [...cpu, known.cpu.product].filter(Boolean).join(" ")],
    ["Cores", `${known.cores.length} physical; this process may use ${known.affinity.length} logical`],
    ["Memory", `${bytes(known.memory_bytes)}, ${bytes(known.available_bytes)} free at the start`],
    ["Caches", caches.join(", ")],
    ["Instructions", known.isa.join(" ")],
    ["GPUs", gpus.join("; ") || (known.mps ? "Apple GPU" : "none")],
    ["Limits of the container", limits.join(", ") || "none"],
    ["System", `${known.os} ${known.kernel ?? ""} on ${known.architecture}`],
    ["Power", place.energy_source ? `${place.energy_source}: ${place.energy_reason ?? ""}` : `not measured: ${place.energy_reason ?? ""}`],
    ["Price", place.hourly_price ? `${place.hourly_price} dollars an hour` : "not given (--hourly-price)"],
    ["PyTorch", known.torch?.version ?? "–"],
  ];
  return table("Facts about this machine", ["Fact", "Value"], rows.filter(([, value]) => value));
}

function decisions(plan) {
  const rows = Object.entries(MAIN_DECISIONS)
    .filter(([name]) => plan[name] && plan[name].value !== null)
    .map(([name, title]) => [title, format(name, plan[name].value), plan[name].reason]);
  return table("The decisions that matter most", ["Decision", "Value", "Why"], rows);
}

function otherDecisions(plan) {
  const rows = Object.entries(plan)
    .filter(([name]) => !(name in MAIN_DECISIONS))
    .map(([name, { value, reason }]) => [el("code", {}, name), format(name, value), reason]);
  return el("details", {}, el("summary", {}, `All other decisions (${rows.length})`), table("The rest of the plan", ["Setting", "Value", "Why"], rows));
}

/** Return a decision's value in words. */
export function format(name, value) {
  if (value === null || (Array.isArray(value) && !value.length)) return "–";
  if (name.endsWith("_bytes")) return bytes(value);
  if (name.endsWith("_seconds")) return seconds(value);
  if (value === true) return "yes";
  if (value === false) return "no";
  if (typeof value === "number") return number(value);
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value !== "object") return String(value);
  const parts = Object.entries(value).map(([key, inner]) =>
    typeof inner === "object" && inner !== null
      ? `${key} ${Object.entries(inner).map(([size, rate]) => `${size}: ${number(rate)}`).join(", ")}`
      : `${key} ${number(inner)}`,
  );
  return parts.join("; ") || "–";
}

function expectations({ speed, capacity }) {
  const made = [];
  const known = Object.entries(speed.capacity_tokens_per_second ?? {}).filter(([, rates]) => Object.keys(rates).length);
  for (const [phase, rates] of known) {
    const columns = Object.keys(rates);
    const [caption, by] = CAPACITY[phase] ?? [phase, "Size"];
    const numeric = columns.map((_, index) => index + 1);
    made.push(table(caption, [by, ...columns], [["Tokens a second", ...Object.values(rates).map(number)]], { numeric }));
  }
  if (!known.length) made.push(el("p", {}, "Not known yet: nothing was measured for this model."));
  else made.push(el("p", { class: "muted" }, speed.estimated ? "Estimated from bytes and operations, and corrected by the steps served so far." : "Measured on this machine, and corrected by the steps served so far."));
  if (speed.drifted) made.push(el("p", { class: "error" }, "Steps have become slower than when they were measured."));
  if (capacity.kv_capacity_tokens) made.push(el("p", {}, `All contexts together may have ${number(capacity.kv_capacity_tokens)} tokens.`));
  return made;
}

function ceilings({ speed, calibration }) {
  const measured = calibration?.measurements ?? {};
  const made = [];
  const ratios = Object.entries(speed.roofline_ratio ?? {});
  if (ratios.length) {
    const bars = ratios.flatMap(([phase, ratio]) => [
      el("span", {}, PHASES[phase] ?? phase),
      el("meter", { min: "0", max: "1", value: Math.min(1, ratio), "aria-label": PHASES[phase] ?? phase }),
      el("span", { class: "number" }, percent(ratio)),
    ]);
    made.push(el("p", {}, "Each speed as a share of the best that memory and arithmetic of this machine allow."), el("div", { class: "bars" }, bars));
  }
  if (measured.fallback) made.push(el("p", {}, `The machine was not measured, since ${measured.fallback}.`));
  else if (!ratios.length && !measured.trials?.length) made.push(el("p", {}, "The machine was not measured."));
  const rates = [];
  if (measured.read_bytes_per_second) rates.push(["Memory is read at", `${number(measured.read_bytes_per_second / 1e9)} GB/s`]);
  for (const [name, rate] of Object.entries(measured.products_per_second ?? {})) rates.push([`Products in ${name}`, `${number(rate / 1e9)} billion operations/s`]);
  if (rates.length) made.push(table("Ceilings, measured at the start or before", ["Ceiling", "Rate"], rates));
  if (measured.trials?.length) made.push(trials(measured.trials));
  if (calibration && !measured.fallback) made.push(el("p", { class: "muted" }, `Measuring took ${seconds(measured.seconds)}${calibration.from_cache ? ", at an earlier start" : ""}.`));
  return made;
}

function trials(all) {
  const rows = all.map((trial) => {
    const [few, full] = ends(trial.decode_seconds);
    const many = ends(Object.keys(trial.encode_seconds ?? {}).length ? trial.encode_seconds : trial.prefill_seconds)[1];
    const name = `${trial.precision}${trial.int8_copy ? " with an int8 copy" : ""}, ${trial.threads} ${trial.threads === 1 ? "thread" : "threads"}`;
    return [name, rate(few), rate(full), rate(many)];
  });
  return table("Configurations that were tried, tokens/s", ["Configuration", "One answer", "Many answers", "Prompts or texts"], rows, { numeric: [1, 2, 3] });
}

const ends = (times) => {
  const sorted = Object.entries(times ?? {}).map(([size, time]) => [Number(size), time]).sort(([one], [two]) => one - two);
  return [sorted[0], sorted.at(-1)];
};
const rate = (pair) => (pair ? number(pair[0] / pair[1]) : "–");

function precision({ model, plan }) {
  const chosen = plan.precision.value;
  const rows = Object.entries(model.bytes_by_precision ?? {}).map(([name, size]) => {
    const cost = model.quality_costs?.[name];
    const loss = cost !== undefined ? percent(cost) : ["fp32", model.stored_dtype === "bfloat16" ? "bf16" : ""].includes(name) ? "none" : "not measured";
    return [name === chosen ? el("b", {}, `${name} (chosen)`) : name, bytes(size), loss];
  });
  const made = [el("p", {}, plan.precision.reason)];
  if (rows.length) {
    const loss = model.kind === "encoder" ? "Loss (1 – cosine)" : "Increase of perplexity";
    made.push(table("Precisions of the weights", ["Precision", "Bytes", loss], rows, { numeric: [1, 2] }));
  }
  return made;
}
