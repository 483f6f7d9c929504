// One answer of a language model: the request's body from a column's settings, and its stream as plain events.

import { call, events } from "./api.js";

/** Fields of a column's settings: name in the API, label, kind, least, most, step, and a hint. */
export const SAMPLING = [
  ["max_tokens", "Max tokens", 1, null, 1],
  ["temperature", "Temperature", 0, 2, 0.05],
  ["top_p", "Top p", 0, 1, 0.01],
  ["top_k", "Top k", -1, null, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty", 0.01, 10, 0.01],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["seed", "Seed", 0, null, 1],
];

export const DEFAULT_SETTINGS = { max_tokens: 512 };

/** Return what a text that should be JSON means. Throws an error that names the field. */
export function parseJson(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not valid JSON: ${error.message}`);
  }
}

/** Return the body of a request. `turns` are the messages before the answer. Throws an error if a setting is no JSON. */
export function requestBody(mode, model, settings, turns) {
  const body = { model, stream: true, stream_options: { include_usage: true } };
  for (const [name] of SAMPLING) if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (settings.schema?.trim()) {
    const schema = parseJson(settings.schema, "The JSON schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  if (mode === "completion") {
    if (settings.probabilities) body.logprobs = 5;
    return { ...body, prompt: turns.at(-1).content };
  }
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (settings.tools?.trim()) {
    const tools = parseJson(settings.tools, "The list of tools");
    if (!Array.isArray(tools)) throw new Error("The tools are a JSON list of objects.");
    body.tools = tools;
  }
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  return { ...body, messages: [...system, ...turns.map(toMessage)] };
}

function toMessage(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.call, content: turn.content };
  const message = { role: turn.role, content: turn.content };
  if (turn.calls?.length) {
    message.tool_calls = turn.calls.map(({ id, name, input }) => ({
      id,
      type: "function",
      function: { name, arguments: input },
    }));
  }
  return message;
}

/**
 * Send a request and write its answer into `turn` as it arrives; `changed` is called after each event.
 * The turn gets content, reasoning, calls, tokens, finish and timing. Throws ApiError; AbortError if it was stopped.
 */
export async function generate(mode, body, turn, changed, signal) {
  const began = performance.now();
  let first = null;
  let last = began;
  let usage = null;
  const response = await call(mode === "chat" ? "v1/chat/completions" : "v1/completions", { body, signal });
  const stages = serverTiming(response);
  try {
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      if (mode === "chat") takeDelta(turn, choice);
      else takeText(turn, choice);
      if (turn.content || turn.reasoning || turn.calls?.length) {
        last = performance.now();
        first ??= last;
      }
      turn.finish = choice.finish_reason ?? turn.finish;
      changed();
    }
  } finally {
    turn.timing = { ...stages, first: first === null ? null : (first - began) / 1000, stream: (last - (first ?? last)) / 1000 };
    turn.usage = usage && {
      prompt: usage.prompt_tokens,
      completion: usage.completion_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    };
  }
}

function serverTiming(response) {
  const found = {};
  for (const [, name, value] of (response.headers.get("server-timing") ?? "").matchAll(/(\w+);dur=([\d.]+)/g))
    found[name] = Number(value) / 1000;
  return found;
}

function takeDelta(turn, { delta, logprobs }) {
  turn.content += delta.content ?? "";
  if (delta.reasoning_content) turn.reasoning = (turn.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    turn.calls ??= [];
    const call = (turn.calls[part.index] ??= { id: "", name: "", input: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.input += part.function?.arguments ?? "";
  }
  for (const { token, logprob, top_logprobs } of logprobs?.content ?? []) {
    (turn.tokens ??= []).push({ text: token, logprob, others: top_logprobs.map((other) => [other.token, other.logprob]) });
  }
}

function takeText(turn, { text, logprobs }) {
  turn.content += text;
  for (const [index, token] of (logprobs?.tokens ?? []).entries()) {
    const others = Object.entries(logprobs.top_logprobs?.[index] ?? {}).sort((one, two) => two[1] - one[1]);
    (turn.tokens ??= []).push({ text: token, logprob: logprobs.token_logprobs[index], others });
  }
}
