// Conversations are kept in this browser alone, in its IndexedDB; where it has none, in this tab until it is closed.
// Several tabs may write: a tab that knows an older state of a conversation keeps its own as a copy, so nothing is lost.

const DATABASE = "armature";
const STORE = "conversations";
const EARLIER_KEY = "armature.conversations"; // where an earlier version kept all of them, as one text
const UNSAVED_KEY = "armature.unsaved";
const MOST_TITLE = 80;

const memory = new Map(); // used if there is no database
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("armature.conversations") : null;
let opened = null;

/** Call `listener` with the id of a conversation that another tab has changed (`kept`, `renamed`, `forgotten`). */
export function watch(listener) {
  channel?.addEventListener("message", ({ data }) => listener(data));
}

const tell = (what, id) => channel?.postMessage({ what, id });

function database() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = request.onblocked = () => resolve(null);
    } catch {
      resolve(null);
    }
  }).then(moveEarlier);
  return opened;
}

async function moveEarlier(found) {
  try {
    const earlier = JSON.parse(localStorage.getItem(EARLIER_KEY) ?? "[]").filter((each) => Array.isArray(each?.lanes));
    if (!earlier.length) return found;
    await run(found, "readwrite", (store) => earlier.map((each) => store.put({ created: each.at, title: null, revision: 1, ...each })));
    localStorage.removeItem(EARLIER_KEY);
  } catch {
    // They stay where they are.
  }
  return found;
}

/** Run `work` in one transaction, and return what its request found. Throws the browser's error, such as a full disk. */
function run(found, mode, work) {
  if (!found) return Promise.resolve(work(inMemory)?.result);
  return new Promise((resolve, reject) => {
    const transaction = found.transaction(STORE, mode);
    const request = work(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error ?? new Error("The browser refused to keep it."));
  });
}

/** What is used of an object store, for a browser without one. */
const inMemory = {
  put: (record) => void memory.set(record.id, structuredClone(record)),
  delete: (id) => void memory.delete(id),
  clear: () => memory.clear(),
  get: (id) => answered(structuredClone(memory.get(id))),
  getAll: () => answered([...memory.values()]),
};

function answered(result) {
  const request = { result };
  queueMicrotask(() => request.onsuccess?.());
  return request;
}

const byAge = (one, two) => two.at - one.at;

/** Return all conversations, the latest first. */
export async function conversations() {
  return (await run(await database(), "readonly", (store) => store.getAll())).sort(byAge);
}

/** Return those in whose title or messages a text occurs, whatever its case. */
export async function search(text) {
  const wanted = text.trim().toLowerCase();
  const all = await conversations();
  return wanted ? all.filter((each) => searchable(each).includes(wanted)) : all;
}

const searchable = (conversation) =>
  [titleOf(conversation), ...conversation.lanes.flatMap(({ turns }) => turns.flatMap(({ content, files }) => [content, ...(files ?? []).map(({ name }) => name)]))].join("\n").toLowerCase();

export async function read(id) {
  return (await run(await database(), "readonly", (store) => store.get(id))) ?? null;
}

/** Change the stored state in one transaction; `change` returns the new one, or null to leave it. */
async function update(id, change) {
  let made = null;
  await run(await database(), "readwrite", (store) => {
    const request = store.get(id);
    request.onsuccess = () => {
      made = change(request.result ?? null);
      if (made) store.put(made);
    };
  });
  return made;
}

/** Return what is kept of a conversation. Probabilities of tokens are too large. */
export function stateOf({ id, created, title, mode, model, lanes, revision }) {
  const kept = lanes.map(({ settings, turns }) => ({ settings, turns: turns.map(({ tokens, ...turn }) => turn) }));
  return structuredClone({ id, created, at: Date.now(), title, mode, model: model.name ?? model, lanes: kept, revision });
}

/**
 * Keep a state in place of the one that this tab knows, and return what was kept: its id is a new one, and its title says
 * so, if another tab has gone on with the conversation. Throws the browser's error if there is no room.
 */
export async function keep(state) {
  const made = await update(state.id, (stored) => {
    const isOlder = stored && stored.revision !== state.revision;
    if (isOlder) return { ...state, id: newId(), title: `${titleOf(state).slice(0, MOST_TITLE - 7)} (copy)`, revision: 1 };
    return { ...state, title: stored ? stored.title : state.title, revision: state.revision + 1 };
  });
  tell("kept", made.id);
  return made;
}

/** A name that is free for a conversation. crypto.randomUUID is offered to https and localhost alone. */
export const newId = () => crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16)).join("-");

export async function rename(id, title) {
  await update(id, (stored) => stored && { ...stored, title: title.trim().slice(0, MOST_TITLE) || null });
  tell("renamed", id);
}

export async function forget(id) {
  await run(await database(), "readwrite", (store) => void store.delete(id));
  tell("forgotten", id);
}

export async function forgetAll() {
  await run(await database(), "readwrite", (store) => void store.clear());
  tell("forgotten", null);
}

/** Return the title: the given one, or the first words of the first message. */
export function titleOf({ title, lanes }) {
  if (title) return title;
  const first = lanes[0]?.turns.find((turn) => turn.role === "user");
  return first?.content.trim().replace(/\s+/g, " ").slice(0, MOST_TITLE) || first?.files?.[0]?.name || "Empty";
}

// A page that is closed cannot wait for the database, so what is unsaved then is left in the tab's own storage.

export function leaveUnsaved(state) {
  try {
    sessionStorage.setItem(UNSAVED_KEY, JSON.stringify(state));
  } catch {
    // Too long: what was kept in the last second remains.
  }
}

/** Keep what this tab left when it was closed or loaded again. */
export async function keepUnsaved() {
  const left = sessionStorage.getItem(UNSAVED_KEY);
  sessionStorage.removeItem(UNSAVED_KEY);
  if (!left) return;
  const state = JSON.parse(left);
  await update(state.id, (stored) => (stored && stored.revision > state.revision + 1 ? null : { ...state, title: stored ? stored.title : state.title, revision: Math.max(state.revision, stored?.revision ?? 0) + 1 }));
}
