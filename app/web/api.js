// Requests to the server that this page came from. An API key is kept for this tab only, and sent to no other host.

const KEY = "armature.key";

/** The one of several models that each request names; null if there is one model. */
let model = new URLSearchParams(location.search).get("model");

export function useModel(name) {
  model = name;
}

function forModel(path) {
  if (model === null) return path;
  return `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(model)}`;
}

/** An answer that is an error, with the server's own sentence. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** A stream that ended before the server said that it was complete. */
export class CutOff extends Error {}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function sentence(body) {
  const found = body?.error?.message ?? body?.error ?? body?.message ?? body?.detail;
  return typeof found === "string" ? found : null;
}

/**
 * Send a request; with `body`, as JSON by POST. Return the response if it is successful.
 * Throws ApiError with the server's sentence, and AbortError if `signal` was aborted.
 */
export async function call(path, { body, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(forModel(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = null;
  let code = null;
  try {
    const told = JSON.parse(text);
    message = sentence(told);
    code = told.error?.code ?? null;
  } catch {
    // A proxy's error page is no JSON.
  }
  const wait = response.headers.get("retry-after");
  const error = new ApiError(response.status, message ?? `The server answered with status ${response.status}.`, code);
  if (wait) error.message += ` Try again in ${wait} s.`;
  if (response.status === 401) dispatchEvent(new CustomEvent("armature:key", { detail: error.message }));
  throw error;
}

export const getJson = async (path, options) => (await call(path, options)).json();

/**
 * Yield the JSON of each event of a stream of server-sent events, until [DONE]. Throws ApiError if an event is an error, and
 * CutOff if the stream ends without [DONE] or the connection is lost.
 */
export async function* events(response) {
  if (!response.headers.get("content-type")?.startsWith("text/event-stream"))
    throw new ApiError(response.status, "What answered is not this server: its answer is no stream of events. Is there a proxy that asks for something?");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const value = await nextPiece(reader);
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = parseEvent(data);
        if (event.error) throw new ApiError(event.error.code ?? 500, sentence(event) ?? "The server ended the answer.");
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function nextPiece(reader) {
  let piece;
  try {
    piece = await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CutOff("The answer was cut off: the connection to the server was lost. Is it still running?");
  }
  if (piece.done) throw new CutOff("The answer was cut off: the connection ended before the answer did.");
  return piece.value;
}

function parseEvent(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new CutOff("The answer was cut off: the server sent something that this page cannot read.");
  }
}
