// Conversations are kept in this browser alone. The oldest are dropped when there are too many, or the browser is full.

const KEY = "armature.conversations";
const MOST = 50;
const MOST_CHARACTERS = 2_000_000;

/** Return the kept conversations, the latest first. */
export function conversations() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept.filter((each) => Array.isArray(each?.lanes)) : [];
  } catch {
    return [];
  }
}

function write(kept) {
  for (let most = MOST; most > 0; most = Math.floor(most / 2)) {
    const text = JSON.stringify(kept.slice(0, most));
    if (text.length > MOST_CHARACTERS && most > 1) continue;
    try {
      localStorage.setItem(KEY, text);
      return;
    } catch {
      // The browser has no room for so many.
    }
  }
}

/** Keep a conversation in place of its earlier state. Probabilities of tokens are too large to be kept. */
export function keep(conversation) {
  const lanes = conversation.lanes.map(({ settings, turns }) => ({
    settings,
    turns: turns.map(({ tokens, ...turn }) => turn),
  }));
  const kept = { id: conversation.id, at: Date.now(), mode: conversation.mode, lanes };
  write([kept, ...conversations().filter(({ id }) => id !== conversation.id)]);
}

export function forget(id) {
  write(conversations().filter((each) => each.id !== id));
}

export function forgetAll() {
  localStorage.removeItem(KEY);
}

/** Return a title: the first words of the first message. */
export function titleOf(conversation) {
  const first = conversation.lanes[0]?.turns.find((turn) => turn.role === "user")?.content ?? "";
  return first.trim().replace(/\s+/g, " ").slice(0, 80) || "Empty";
}
