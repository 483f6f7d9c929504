// Talk: the list of conversations, and one conversation in one to four columns. A message goes to all of them.

import { button, count, el, errorBox, number } from "./dom.js";
import { Attachments } from "./files.js";
import { givenSettings } from "./generation.js";
import { keep, keepUnsaved, leaveUnsaved, newId, read, stateOf, watch } from "./history.js";
import { iconButton } from "./icons.js";
import { Lane, markCut } from "./lane.js";
import { describeSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";

const MOST_COLUMNS = 4;
const SETTINGS_KEY = "armature.settings";
const CURRENT_KEY = "armature.current"; // of this tab: the conversation that is shown
const DRAFT_KEY = "armature.draft"; // of this tab: the message that is being written
const KEEP_MILLISECONDS = 1000; // between two states of an answer that grows
const CLOSED = "The answer was cut off: this page was closed or loaded again.";
const COARSE = matchMedia("(pointer: coarse)");
const EXAMPLES = {
  chat: [
    "Tell me a story about a fox.",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that checks whether a word is a palindrome.",
    "Compare buses, trains and cars in a table.",
  ],
  completion: ["Once upon a time, in a small house by the sea,", "The three most important things about bread are", "def fibonacci(n):"],
};

/** The page itself. `model`: name, whether it has a chat template, its default sampling parameters, and its size. */
export class TalkPage {
  constructor(model) {
    this.model = model;
    this.conversation = null;
    this.columns = el("div", { class: "lanes" });
    this.note = el("div", { class: "keeping", hidden: true });
    this.box = el("textarea", { rows: "1", class: "message", dir: "auto", "aria-describedby": "composer-hint" });
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.box.addEventListener("paste", (event) => this.takeFiles(event, event.clipboardData));
    this.attachments = new Attachments(() => this.box.focus({ preventScroll: true }), () => this.noPictures());
    this.attachments.element.hidden = true;
    this.sendButton = iconButton("send", "Send", () => this.send(), { class: "primary" });
    this.stopButton = iconButton("stop", "Stop", () => this.stop(), { class: "danger", hidden: true, title: "Stop (Esc)" });
    this.modes = el("div", { class: "switch", role: "group", "aria-label": "Mode" });
    this.settingsButton = iconButton("sliders", "Settings", () => this.toggleSettings(), { class: "quiet", "aria-expanded": "false" });
    this.addButton = iconButton("columns", "Add a column", () => this.addLane(), { class: "quiet" });
    this.sidebar = new Sidebar({ open: (wanted) => this.open(wanted), forgotten: (id) => this.forgotten(id) });
    this.lead = [this.sidebar.toggle, iconButton("pen", "New", () => this.open(), { class: "quiet", title: "New conversation" })];
    const room = el("div", { class: "room" }, this.columns, this.note, this.composer());
    this.element = el("div", { class: "talk" }, el("h1", { class: "hidden" }, "Talk"), this.sidebar.element, this.sidebar.backdrop, room);
    this.sidebar.over(room);
    this.onEscape = (event) => event.key === "Escape" && this.isBusy && this.stop();
    this.acceptFiles();
  }

  static latest = null; // a new key makes a new page

  /** Return the page with what this tab showed before it was loaded again. */
  static async create(model) {
    const page = (TalkPage.latest = new TalkPage(model));
    await keepUnsaved().catch(() => {});
    const id = sessionStorage.getItem(CURRENT_KEY);
    page.open(id ? await read(id).catch(() => null) : null);
    page.recallDraft();
    page.sidebar.refresh();
    watch((change) => TalkPage.latest === page && page.changedElsewhere(change));
    addEventListener("pagehide", () => TalkPage.latest === page && page.leave());
    return page;
  }

  composer() {
    const hint = COARSE.matches ? "" : "Shift+Enter begins a line";
    return el(
      "form",
      { class: "composer", onsubmit: (event) => event.preventDefault() },
      this.attachments.element,
      this.box,
      el(
        "div",
        { class: "composer-tools" },
        iconButton("clip", "Attach", () => this.attachments.choose(), { class: "quiet", title: this.model.seesPictures ? "Attach pictures and text files" : "Attach text files" }),
        this.attachments.input,
        this.modes,
        this.settingsButton,
        this.addButton,
        el("small", { id: "composer-hint", class: "muted" }, hint),
        this.sendButton,
        this.stopButton,
      ),
    );
  }

  /** Return why no picture is taken, or nothing. */
  noPictures() {
    if (!this.model.seesPictures) return `${this.model.name} reads text alone`;
    return this.conversation.mode === "chat" ? "" : "a text that is continued has none: choose Chat";
  }

  shown() {
    addEventListener("keydown", this.onEscape);
    for (const lane of this.lanes) lane.follow(true);
    if (!COARSE.matches) this.box.focus();
  }

  hidden() {
    removeEventListener("keydown", this.onEscape);
  }

  get lanes() {
    return this.conversation?.lanes ?? [];
  }

  get isBusy() {
    return this.lanes.some((lane) => lane.abort);
  }

  // ---- which conversation is shown ------------------------------------------------------------------------------------

  /** Show a kept conversation, or an empty one. `isLive`: another tab may be writing it. */
  open(kept = null, isLive = false) {
    this.stop();
    const mode = kept?.mode ?? this.conversation?.mode ?? (this.model.chats ? "chat" : "completion");
    const settings = this.lanes.map((lane) => lane.settings);
    if (!settings.length) settings.push(recallSettings());
    const given = kept?.lanes ?? settings.map((each) => ({ settings: each, turns: [] }));
    const { id = newId(), created = Date.now(), title = null, revision = 0 } = kept ?? {};
    this.conversation = { id, created, title, revision, mode, model: this.model.name, lanes: [] };
    this.conversation.lanes = given.map(({ settings: own, turns }) => {
      const lane = structuredClone({ settings: givenSettings(own), turns });
      if (!isLive) for (const turn of lane.turns) if (turn.unfinished) markCut(turn, CLOSED);
      return new Lane(this, this.conversation, lane);
    });
    this.remember();
    this.showMode();
    this.arrange();
    for (const lane of this.lanes) lane.follow(true);
  }

  remember() {
    sessionStorage.setItem(CURRENT_KEY, this.conversation.id);
    this.sidebar.mark(this.conversation.id);
  }

  /** A conversation was deleted, or all of them. */
  forgotten(id) {
    if (id !== null && id !== this.conversation.id) return;
    this.stop();
    this.conversation.isForgotten = true;
    this.open();
  }

  async changedElsewhere({ what, id }) {
    this.sidebar.refreshSoon();
    const { conversation } = this;
    if (this.isBusy || (id !== conversation.id && id !== null)) return;
    if (what === "forgotten") {
      if (conversation.revision) this.forgotten(id);
      return;
    }
    const kept = await read(id);
    if (!kept || this.conversation !== conversation || this.isBusy || kept.revision === conversation.revision) return;
    this.open(kept, true);
  }

  setMode(mode) {
    if (mode === this.conversation.mode) return;
    this.conversation.mode = mode;
    this.attachments.set(this.attachments.files.filter(({ picture }) => !picture));
    this.open({ mode, lanes: this.lanes.map(({ settings }) => ({ settings, turns: [] })) });
  }

  showMode() {
    const { mode } = this.conversation;
    const choice = (value, label) => button(label, () => this.setMode(value), { "aria-pressed": String(value === mode) });
    this.modes.replaceChildren(choice("chat", "Chat"), choice("completion", "Completion"));
    this.box.placeholder = mode === "chat" ? `Message ${this.model.name}` : "Write the beginning of a text";
    this.box.setAttribute("aria-label", mode === "chat" ? "Write a message" : "Write the beginning of a text");
  }

  // ---- columns --------------------------------------------------------------------------------------------------------

  arrange() {
    this.columns.replaceChildren(...this.lanes.map((lane) => lane.element));
    this.columns.dataset.columns = String(this.lanes.length);
    this.lanes.forEach((lane, index) => lane.name(index, this.lanes.length));
    this.addButton.disabled = this.lanes.length >= MOST_COLUMNS;
    this.arrangeSettings();
    this.showBusy();
  }

  /** One column's settings are opened beside the message; of several, each column's above it. */
  arrangeSettings() {
    const [lane] = this.lanes;
    const isOne = this.lanes.length === 1;
    this.settingsButton.hidden = !isOne;
    for (const each of this.lanes) each.head.hidden = isOne && !each.details.open;
    if (!isOne) return;
    this.settingsButton.setAttribute("aria-expanded", String(lane.details.open));
    this.settingsButton.title = `Settings: ${describeSettings(lane.settings)}`;
    this.settingsButton.classList.toggle("set", Object.keys(lane.settings).length > 0);
  }

  toggleSettings() {
    const { details, head } = this.lanes[0];
    head.hidden = false;
    details.open = !details.open;
    if (details.open) requestAnimationFrame(() => details.querySelector("textarea, input")?.focus());
  }

  addLane() {
    const last = this.lanes.at(-1);
    const lane = structuredClone({ settings: last.settings, turns: last.abort ? [] : last.turns });
    this.conversation.lanes.push(new Lane(this, this.conversation, lane));
    this.arrange();
    this.lanes.at(-1).details.open = true;
  }

  removeLane(lane) {
    lane.stop();
    this.conversation.lanes = this.lanes.filter((each) => each !== lane);
    this.arrange();
    this.keep(this.conversation);
  }

  settingsChanged(lane) {
    this.arrangeSettings();
    try {
      localStorage.setItem(SETTINGS_KEY, JSON.stringify(lane.settings));
    } catch {
      // The browser keeps nothing for this page.
    }
  }

  /** What an empty column shows: which model this is, and examples. */
  welcome() {
    const { name, parameters, context, seesPictures } = this.model;
    const about = [parameters && `${count(parameters)} parameters`, context && `a context of ${number(context)} tokens`, seesPictures && "reads pictures"].filter(Boolean);
    const example = (text) => button(text, () => this.send(text), { class: "example" });
    return el(
      "div",
      { class: "welcome" },
      el("h2", {}, name),
      about.length ? el("p", { class: "muted" }, about.join(", ")) : null,
      el("div", { class: "examples", role: "group", "aria-label": "Examples" }, EXAMPLES[this.conversation.mode].map(example)),
    );
  }

  // ---- the message ----------------------------------------------------------------------------------------------------

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || COARSE.matches) return;
    event.preventDefault();
    this.send();
  }

  /** Send a text, or what is written and attached. If no column could send it, it comes back. */
  async send(text = null) {
    const content = text ?? this.box.value;
    const files = text === null ? this.attachments.files : [];
    if ((!content.trim() && !files.length) || this.isBusy) return;
    if (text === null) {
      this.box.value = "";
      this.attachments.set([]);
    }
    const { conversation } = this;
    if (isRefused(conversation)) for (const lane of this.lanes) lane.turns.pop();
    const turn = { role: "user", content, ...(files.length ? { files } : {}) };
    await Promise.all(this.lanes.map((lane) => lane.add({ ...turn })));
    if (this.conversation !== conversation || !isRefused(conversation)) return;
    if (!this.box.value.trim() && !this.attachments.files.length) {
      this.box.value = content;
      this.attachments.set(files);
      // The box has grown, and the reason is at the end.
      requestAnimationFrame(() => this.lanes.forEach((lane) => lane.follow(true)));
    }
  }

  stop() {
    for (const lane of this.lanes) lane.stop();
  }

  showBusy() {
    this.sendButton.hidden = this.isBusy;
    this.stopButton.hidden = !this.isBusy;
  }

  /** Files may be dropped anywhere on the page, and pasted. */
  acceptFiles() {
    const has = (event) => event.dataTransfer?.types.includes("Files");
    this.element.addEventListener("dragover", (event) => {
      if (!has(event)) return;
      event.preventDefault();
      this.element.classList.add("dropping");
    });
    this.element.addEventListener("dragleave", (event) => {
      if (!this.element.contains(event.relatedTarget)) this.element.classList.remove("dropping");
    });
    this.element.addEventListener("drop", (event) => {
      this.element.classList.remove("dropping");
      this.takeFiles(event, event.dataTransfer);
    });
  }

  takeFiles(event, data) {
    // What a table or a text editor copies has a picture of the text too.
    if (!data?.files.length || (event.type === "paste" && data.types.includes("text/plain"))) return;
    event.preventDefault();
    this.attachments.take([...data.files]);
  }

  // ---- keeping --------------------------------------------------------------------------------------------------------

  /** Keep a conversation; while it is being kept, once more afterwards. */
  keep(conversation) {
    // A timer that is left from the answer would keep the same again, as a copy if another tab has gone on meanwhile.
    clearTimeout(conversation.timer);
    conversation.timer = null;
    if (conversation.isForgotten || !conversation.lanes.some((lane) => lane.turns.length)) return;
    conversation.isChanged = true;
    conversation.keeping ??= this.write(conversation).finally(() => (conversation.keeping = null));
  }

  keepSoon(conversation) {
    conversation.timer ??= setTimeout(() => this.keep(conversation), KEEP_MILLISECONDS);
  }

  async write(conversation) {
    while (conversation.isChanged && !conversation.isForgotten) {
      conversation.isChanged = false;
      try {
        const { id, title, revision } = await keep(stateOf(conversation));
        const isNew = !conversation.revision || id !== conversation.id;
        Object.assign(conversation, { id, title, revision });
        if (conversation === this.conversation) this.remember();
        if (isNew || !conversation.lanes.some((lane) => lane.abort)) this.sidebar.refreshSoon();
        this.note.hidden = true;
      } catch (error) {
        const isFull = error.name === "QuotaExceededError";
        const reason = isFull ? "the browser has no room left. Export or delete some conversations" : `the browser refused (${error.message})`;
        this.note.replaceChildren(errorBox({ message: `This conversation is not kept: ${reason}.` }));
        this.note.hidden = false;
      }
    }
  }

  /** The page is closed or loaded again: leave what the database does not have yet. */
  leave() {
    const { conversation } = this;
    const isUnsaved = conversation.isChanged || conversation.keeping || conversation.timer || this.isBusy;
    if (isUnsaved && conversation.lanes.some((lane) => lane.turns.length)) leaveUnsaved(stateOf(conversation));
    for (const files of [this.attachments.files, []]) {
      try {
        return sessionStorage.setItem(DRAFT_KEY, JSON.stringify({ text: this.box.value, files }));
      } catch {
        // Its files are too large for the tab's storage: the text alone is kept.
      }
    }
  }

  recallDraft() {
    try {
      const { text = "", files = [] } = JSON.parse(sessionStorage.getItem(DRAFT_KEY) ?? "{}");
      this.box.value = text;
      if (files.length) this.attachments.set(files);
    } catch {
      // It is not one of this page's.
    }
  }
}

/** Return whether no column could send its last message. */
const isRefused = ({ lanes }) => lanes.every((lane) => lane.turns.at(-1)?.failed);

function recallSettings() {
  try {
    return givenSettings(JSON.parse(localStorage.getItem(SETTINGS_KEY) ?? "{}"));
  } catch {
    return {};
  }
}
