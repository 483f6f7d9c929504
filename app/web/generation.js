// One answer of a language model: the request's body from a column's settings, and its stream as plain events.

import { call, events } from "./api.js";
import { messageContent } from "./files.js";

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

/** An earlier version set this limit by itself; what a reader gives is a text. */
const FORCED_MAX_TOKENS = 512;

/** Return settings without what no reader has given. */
export function givenSettings(settings) {
  const { max_tokens, ...others } = settings ?? {};
  return max_tokens === undefined || max_tokens === FORCED_MAX_TOKENS ? others : { ...others, max_tokens };
}

/** Return what a text that should be JSON means. Throws an error that names the field. */
export function parseJson(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not valid JSON: ${error.message}`);
  }
}

/**
 * Return the body of a request. `turns` are the messages before the answer, of which refused ones and those that are left
 * out are not sent; `begun` is an answer to continue, or null. Throws an error if a setting is no JSON.
 */
export function requestBody(mode, model, settings, turns, begun = null) {
  const body = { model, stream: true, stream_options: { include_usage: true } };
  for (const [name] of SAMPLING) if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  // n_predict is max_tokens that ends with the context, where max_tokens would be refused; -1 is no limit.
  if (body.max_tokens !== undefined || mode === "completion") {
    body.n_predict = body.max_tokens ?? -1;
    delete body.max_tokens;
  }
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (settings.schema?.trim()) {
    const schema = parseJson(settings.schema, "The JSON schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  if (mode === "completion") {
    if (settings.probabilities) body.logprobs = 5;
    return { ...body, prompt: promptText(turns.at(-1)) + (begun?.content ?? "") };
  }
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (settings.tools?.trim()) {
    const tools = parseJson(settings.tools, "The list of tools");
    if (!Array.isArray(tools)) throw new Error("The tools are a JSON list of objects.");
    body.tools = tools;
  }
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const messages = [...system, ...toMessages(turns)];
  if (!begun) return { ...body, messages };
  const beginning = { role: "assistant", content: begun.content };
  if (begun.reasoning) beginning.reasoning_content = begun.reasoning;
  return { ...body, messages: [...messages, beginning], continue_final_message: true, add_generation_prompt: false };
}

const promptText = ({ content, files }) => [content, ...(files ?? []).map(({ text }) => text)].filter(Boolean).join("\n\n");

/** Messages of the turns. Two of the user in a row, with no answer between them, are one: many chat templates allow no other. */
function toMessages(turns) {
  const messages = [];
  for (const turn of turns) {
    const isEmpty = turn.role === "assistant" && !turn.content && !turn.calls?.length;
    if (turn.failed || turn.omitted || isEmpty) continue;
    const message = toMessage(turn);
    const last = messages.at(-1);
    if (message.role === "user" && last?.role === "user") last.content = joined(last.content, message.content);
    else messages.push(message);
  }
  return messages;
}

const parts = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);
const joined = (one, two) => (typeof one === "string" && typeof two === "string" ? `${one}\n\n${two}` : [...parts(one), ...parts(two)]);

function toMessage(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.call, content: turn.content };
  const message = { role: turn.role, content: messageContent(turn) };
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
 * The turn gets content, reasoning, calls, tokens, finish and timing; figures of an answer that is continued are added up.
 * Throws ApiError and CutOff; AbortError if it was stopped.
 */
export async function generate(mode, body, turn, changed, signal) {
  const began = performance.now();
  const { usage: earlier, timing: before } = turn;
  const had = sizeOf(turn);
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
      if (sizeOf(turn) > had) {
        last = performance.now();
        first ??= last;
      }
      turn.finish = choice.finish_reason ?? turn.finish;
      changed();
    }
  } finally {
    const stream = (last - (first ?? last)) / 1000 + (before?.stream ?? 0);
    turn.timing = { ...stages, first: before?.first ?? (first === null ? null : (first - began) / 1000), stream };
    const found = usage && {
      prompt: usage.prompt_tokens,
      completion: usage.completion_tokens + (earlier?.completion ?? 0),
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    };
    turn.usage = found ?? earlier ?? null;
  }
}

/** Return a number that grows with an answer. */
export const sizeOf = ({ content, reasoning, calls }) => content.length + (reasoning?.length ?? 0) + (calls?.length ?? 0);

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
