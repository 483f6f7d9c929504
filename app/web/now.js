// Now: what the server does at this moment, from its metrics and its log of steps. Nothing is asked while this is not shown.

import { call, getJson } from "./api.js";
import { bytes, el, errorBox, number, percent, seconds, svg, table } from "./dom.js";
import { parseMetrics } from "./metrics.js";

const METRICS_SECONDS = 2;
const STEPS_SECONDS = 6;
const MOST_POINTS = 90; // three minutes
const MOST_SLOW_STEPS = 20;
const PAST_END = 1e17; // a step number that no server reaches: the answer is empty and says which number comes next
const MOST_STEPS_BEHIND = 4000;
const CAUSES = {
  prefill: "a prompt was read in the same step",
  page_fault: "memory was touched for the first time",
  garbage_collection: "Python collected garbage",
  throttled: "the quota of CPU time was used up",
  compiled: "a step of a new shape was recorded",
  preempted: "a sequence had to give up its memory",
  thermal: "heat slowed the processor down",
  frequency: "the processor ran at a low frequency",
  descheduled: "other programs took the cores",
  unknown: "unknown",
};

export class NowPage {
  constructor(info) {
    this.kind = info.model.kind;
    this.decodes = this.kind === "decoder";
    this.kvTokens = info.capacity?.kv_capacity_tokens ?? 0;
    this.stepNumber = null;
    this.slow = [];
    this.previous = null;
    this.points = [];
    this.timers = [];
    this.cards = el("dl", { class: "cards" });
    this.charts = this.decodes
      ? [new Chart("Tokens written, per second", "written"), new Chart("Tokens of prompts read, per second", "read"), new Chart("Requests: running, waiting", "running", "waiting"), new Chart("Gap between tokens: p50, p99", "gap50", "gap99", seconds)]
      : [new Chart("Texts or rows, per second", "vectors"), new Chart("Tokens read, per second", "read"), new Chart("Requests: running, waiting", "running", "waiting"), new Chart("Time of a request: p50, p99", "request50", "request99", seconds)];
    this.steps = el("div");
    this.problem = el("div");
    this.element = el(
      "div",
      { class: "page" },
      el("h1", {}, "Now"),
      this.problem,
      this.cards,
      el("div", { class: "charts" }, this.charts.map((chart) => chart.element)),
      el("h2", {}, "Slow steps"),
      this.steps,
    );
    this.onVisibility = () => (document.hidden ? this.pause() : this.run());
    this.drawSteps();
  }

  shown() {
    document.addEventListener("visibilitychange", this.onVisibility);
    this.run();
  }

  hidden() {
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.pause();
  }

  run() {
    this.pause();
    this.previous = null;
    this.abort = new AbortController();
    const signal = this.abort.signal;
    this.every(METRICS_SECONDS, () => this.readMetrics(signal), signal);
    this.every(STEPS_SECONDS, () => this.readSteps(signal), signal);
  }

  pause() {
    this.abort?.abort();
  }

  /** Call a function again and again, each time a while after it has ended. Errors are shown in place. */
  async every(delay, read, signal) {
    while (!signal.aborted) {
      let wait = delay;
      try {
        await read();
        this.problem.replaceChildren();
      } catch (error) {
        if (signal.aborted) return;
        this.problem.replaceChildren(errorBox(error));
        wait = Math.max(delay, Number(error.retryAfter) || 0);
      }
      await new Promise((resolve) => setTimeout(resolve, wait * 1000));
    }
  }

  async readMetrics(signal) {
    const metrics = parseMetrics(await (await call("metrics", { signal })).text());
    const at = performance.now() / 1000;
    const totals = {
      at,
      written: metrics.value("tokens_total", { kind: "completion" }),
      read: metrics.value("tokens_total", { kind: "prompt" }),
      vectors: metrics.value("vectors_total"),
      requests: metrics.value("requests_total"),
    };
    const quantile = (metric, share) => metrics.value("latency_quantile_seconds", { metric, quantile: share });
    const point = {
      running: metrics.value("requests_running"),
      waiting: metrics.value("requests_waiting"),
      gap50: quantile("itl", "0.5"),
      gap99: quantile("itl", "0.99"),
      request50: quantile("request", "0.5"),
      request99: quantile("request", "0.99"),
    };
    for (const name of ["written", "read", "vectors", "requests"])
      point[name] = this.previous ? (totals[name] - this.previous[name]) / (at - this.previous.at) : null;
    this.previous = totals;
    this.points = [...this.points, point].slice(-MOST_POINTS);
    for (const chart of this.charts) chart.draw(this.points);
    this.cards.replaceChildren(...this.describe(metrics, point, quantile).map(card));
  }

  describe(metrics, point, quantile) {
    const pair = (metric) => [seconds(quantile(metric, "0.5")), `p99 ${seconds(quantile(metric, "0.99"))}`];
    const found = this.decodes
      ? [
          ["Tokens a second", number(point.written), `prompts ${number(point.read)}`],
          ["First token, p50", ...pair("ttft")],
          ["Gap between tokens, p50", ...pair("itl")],
        ]
      : [
          [this.kind === "program" ? "Rows a second" : "Texts a second", number(point.vectors), `tokens ${number(point.read)}`],
          ["Time of a request, p50", ...pair("request")],
          ["Waiting before it, p50", ...pair("queue")],
        ];
    found.push(["Requests", `${number(point.running)} running`, `${number(point.waiting)} waiting`]);
    const wait = metrics.value("predicted_wait_seconds");
    found.push(["Requests a second", number(point.requests), wait === null ? "" : `a new one waits ${seconds(wait)}`]);
    const used = metrics.value("kv_cache_usage_ratio");
    if (this.decodes && used !== null) found.push(["Context memory in use", percent(used), `of ${number(this.kvTokens)} tokens`]);
    const memory = metrics.value("process_resident_memory_bytes");
    if (memory !== null) found.push(["Memory of the process", bytes(memory), ""]);
    const watts = metrics.value("power_watts");
    const perToken = metrics.value(this.decodes ? "energy_joules_per_token" : "energy_joules_per_vector");
    if (watts !== null) found.push(["Power", `${number(watts)} W`, perToken === null ? "" : `${number(perToken)} J a ${this.decodes ? "token" : "vector"}`]);
    const dollars = metrics.value("cost_dollars_total");
    const million = metrics.value(this.decodes ? "llm_cost_per_million_tokens" : "cost_per_million_vectors");
    if (dollars !== null) found.push(["Dollars since the start", number(dollars), million === null ? "" : `${number(million)} per million ${this.decodes ? "tokens" : "vectors"}`]);
    const drafted = metrics.value("speculation_tokens_total", { kind: "drafted" });
    if (drafted) found.push(["Drafted tokens accepted", percent(metrics.value("speculation_tokens_total", { kind: "accepted" }) / drafted), `of ${number(drafted)}`]);
    return found;
  }

  async readSteps(signal) {
    if (this.stepNumber === null) {
      const { next } = await getJson(`info/steps?after=${PAST_END}`, { signal });
      this.stepNumber = Math.max(0, next - MOST_STEPS_BEHIND);
    }
    // A response has at most 2,048 steps.
    for (let request = 0; request < 2; request++) {
      const { next, steps } = await getJson(`info/steps?after=${this.stepNumber}`, { signal });
      steps.cause.forEach((cause, index) => {
        if (cause) this.slow.unshift({ cause, at: steps.at[index], seconds: steps.seconds[index], phase: steps.phase[index], tokens: steps.tokens[index] });
      });
      const isComplete = steps.at.length < 2048;
      this.stepNumber = next;
      if (isComplete) break;
    }
    this.slow = this.slow.slice(0, MOST_SLOW_STEPS);
    this.drawSteps();
  }

  drawSteps() {
    const about = el("p", { class: "muted" }, "Steps that took over 1.5 times as long as expected, the last first.");
    const rows = this.slow.map(({ at, seconds: took, phase, tokens, cause }) => [new Date(at * 1000).toLocaleTimeString(), seconds(took), phase, number(tokens), CAUSES[cause] ?? cause]);
    const shown = rows.length ? table("The last slow steps", ["Time", "Took", "Phase", "Tokens", "Cause"], rows, { numeric: [1, 3] }) : el("p", {}, "None so far.");
    this.steps.replaceChildren(about, shown);
  }
}

const card = ([name, value, detail]) => el("div", { class: "card" }, el("dt", {}, name), el("dd", {}, value), el("dd", {}, detail));

const WIDTH = 300;
const HEIGHT = 100;

/** One or two lines over the last minutes. */
class Chart {
  constructor(title, first, second = null, unit = number) {
    Object.assign(this, { title, names: [first, second].filter(Boolean), unit });
    this.lines = this.names.map((_, index) => svg("polyline", { class: index ? "series second" : "series" }));
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }), ...this.lines);
    this.latest = el("span");
    this.element = el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, title), this.latest), this.picture);
    this.draw([]);
  }

  draw(points) {
    const most = Math.max(1e-9, ...points.flatMap((point) => this.names.map((name) => point[name] ?? 0)));
    const values = this.names.map((name) => points.at(-1)?.[name] ?? null);
    this.names.forEach((name, index) => {
      const at = (value, place) => `${WIDTH - (points.length - 1 - place) * (WIDTH / (MOST_POINTS - 1))},${HEIGHT - 2 - (value / most) * (HEIGHT - 8)}`;
      const shown = points.map((point, place) => (point[name] === null || point[name] === undefined ? null : at(point[name], place)));
      this.lines[index].setAttribute("points", shown.filter(Boolean).join(" "));
    });
    const text = values.map((value) => this.unit(value)).join(", ");
    this.latest.textContent = points.length ? `${text}; most ${this.unit(most < 1e-8 ? 0 : most)}` : "";
    this.picture.setAttribute("aria-label", `${this.title}: ${text}`);
  }
}
