// Talk: one to four columns, each a conversation with its own settings. A message goes to all of them.

import { announce, button, el } from "./dom.js";
import { DEFAULT_SETTINGS, generate, requestBody } from "./generation.js";
import { conversations, forget, forgetAll, keep, titleOf } from "./history.js";
import { describeSettings, settingsForm } from "./settings.js";
import { AnswerTurn, describeAnswer, userTurn } from "./turns.js";

const MOST_COLUMNS = 4;
const SETTINGS_KEY = "armature.settings";

/** One column: its settings, its turns, and the request that is under way. */
class Lane {
  constructor(talk, { settings, turns }) {
    Object.assign(this, { talk, settings, turns });
    this.abort = null;
    this.summary = el("summary");
    this.details = el("details", { class: "settings" }, this.summary);
    this.details.addEventListener("toggle", () => this.fillForm());
    this.log = el("div", { class: "log", role: "region", tabindex: "0" });
    this.close = button("Remove", () => talk.removeLane(this), { class: "quiet small remove", "aria-label": "Remove this column" });
    this.element = el("section", { class: "lane" }, el("div", { class: "lane-head" }, this.details, this.close), this.log);
    this.describe();
    this.show();
  }

  fillForm() {
    const form = settingsForm(this.settings, this.talk.mode, this.talk.model.defaults, () => {
      this.describe();
      this.talk.rememberSettings(this.settings);
    });
    this.details.replaceChildren(this.summary, ...(this.details.open ? [form] : []));
  }

  describe() {
    this.summary.replaceChildren(el("b", {}, "Settings"), ` ${describeSettings(this.settings)}`);
  }

  name(index, number) {
    const name = number > 1 ? `Column ${index + 1}` : "Conversation";
    this.element.setAttribute("aria-label", name);
    this.log.setAttribute("aria-label", `${name}: messages`);
    this.close.hidden = number < 2;
  }

  show() {
    this.log.replaceChildren(...this.turns.map((turn, index) => this.elementOf(turn, index)));
  }

  elementOf(turn, index) {
    if (turn.role !== "assistant") return userTurn(turn, (content) => this.edit(index, content));
    return this.answerView(turn, index).element;
  }

  answerView(turn, index) {
    return new AnswerTurn(turn, {
      plain: this.talk.mode === "completion",
      isJson: Boolean(this.settings.schema),
      retry: () => this.answerFrom(index),
      answerCalls: this.turns[index + 1]?.role === "tool" ? null : (results) => this.add(...results),
      drawn: () => this.follow(),
    });
  }

  edit(index, content) {
    this.stop();
    this.turns.splice(index, this.turns.length, { ...this.turns[index], content });
    this.show();
    this.answer();
  }

  /** Drop the turns from an answer on, and generate it anew. */
  answerFrom(index) {
    this.stop();
    this.turns.splice(index);
    this.show();
    this.answer();
  }

  add(...turns) {
    this.turns.push(...turns);
    this.show();
    return this.answer();
  }

  stop() {
    this.abort?.abort();
  }

  async answer() {
    const abort = (this.abort = new AbortController());
    const turn = { role: "assistant", content: "" };
    const before = this.turns.slice();
    this.turns.push(turn);
    const view = this.answerView(turn, before.length);
    this.log.append(view.element);
    this.follow();
    view.setBusy(true);
    this.talk.showBusy();
    try {
      const body = requestBody(this.talk.mode, this.talk.model.name, this.settings, before);
      await generate(this.talk.mode, body, turn, () => view.drawSoon(), abort.signal);
    } catch (error) {
      if (error.name === "AbortError") turn.finish = "stopped";
      else turn.error = error.message;
    }
    if (this.abort === abort) this.abort = null;
    view.setBusy(false);
    this.follow();
    announce(turn.error ? `Error: ${turn.error}` : `Answer: ${turn.content.slice(0, 2000)}. ${describeAnswer(turn)}`);
    this.talk.showBusy();
    this.talk.keep();
  }

  /** Scroll with the text, unless the reader has scrolled up. */
  follow() {
    const { log } = this;
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
  }
}

/** The page itself. `model`: name, whether it has a chat template, and its default sampling parameters. */
export class TalkPage {
  constructor(model) {
    this.model = model;
    this.lanes = [];
    this.columns = el("div", { class: "lanes" });
    this.box = el("textarea", { rows: "2", class: "message", "aria-describedby": "composer-hint", onkeydown: (event) => this.onKey(event) });
    this.sendButton = button("Send", () => this.send(), { class: "primary" });
    this.stopButton = button("Stop", () => this.stop(), { class: "danger", hidden: true });
    this.modes = el("div", { class: "switch", role: "group", "aria-label": "Mode" });
    this.addButton = button("Add a column", () => this.addLane(), { class: "quiet" });
    this.history = el("dialog", { class: "history", "aria-label": "Conversations" });
    this.element = el(
      "div",
      { class: "talk" },
      el("h1", { class: "hidden" }, "Talk"),
      el(
        "div",
        { class: "bar" },
        this.modes,
        button("New", () => this.open(), { class: "quiet" }),
        button("History", () => this.showHistory(), { class: "quiet" }),
        this.addButton,
      ),
      this.columns,
      el(
        "form",
        { class: "composer", onsubmit: (event) => event.preventDefault() },
        this.box,
        el("div", { class: "composer-buttons" }, this.sendButton, this.stopButton),
        el("small", { id: "composer-hint", class: "muted" }, "Enter sends, Shift+Enter begins a line, Esc stops."),
      ),
      this.history,
    );
    this.onEscape = (event) => event.key === "Escape" && this.isBusy && this.stop();
    this.open();
  }

  shown() {
    addEventListener("keydown", this.onEscape);
    this.box.focus();
  }

  hidden() {
    removeEventListener("keydown", this.onEscape);
  }

  get isBusy() {
    return this.lanes.some((lane) => lane.abort);
  }

  /** Show a kept conversation, or an empty one. */
  open(conversation = null) {
    this.stop();
    this.id = conversation?.id ?? crypto.randomUUID?.() ?? String(Math.random());
    this.setMode(conversation?.mode ?? this.mode ?? (this.model.chats ? "chat" : "completion"));
    const settings = this.lanes.map((lane) => lane.settings);
    if (!settings.length) settings.push(recallSettings());
    const given = conversation?.lanes ?? settings.map((each) => ({ settings: each, turns: [] }));
    this.lanes = given.map((lane) => new Lane(this, structuredClone(lane)));
    this.arrange();
  }

  setMode(mode) {
    this.mode = mode;
    const choice = (value, label) =>
      button(label, () => value !== this.mode && (this.setMode(value), this.open()), { "aria-pressed": String(value === mode) });
    this.modes.replaceChildren(choice("chat", "Chat"), choice("completion", "Completion"));
    this.box.placeholder = mode === "chat" ? "Write a message" : "Write the beginning of a text";
    this.box.setAttribute("aria-label", this.box.placeholder);
  }

  arrange() {
    this.columns.replaceChildren(...this.lanes.map((lane) => lane.element));
    this.lanes.forEach((lane, index) => lane.name(index, this.lanes.length));
    this.addButton.disabled = this.lanes.length >= MOST_COLUMNS;
    this.showBusy();
  }

  addLane() {
    const last = this.lanes.at(-1);
    this.lanes.push(new Lane(this, structuredClone({ settings: last.settings, turns: last.abort ? [] : last.turns })));
    this.arrange();
    this.lanes.at(-1).details.open = true;
  }

  removeLane(lane) {
    lane.stop();
    this.lanes = this.lanes.filter((each) => each !== lane);
    this.arrange();
  }

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  send() {
    const content = this.box.value;
    if (!content.trim() || this.isBusy) return;
    this.box.value = "";
    for (const lane of this.lanes) lane.add({ role: "user", content });
  }

  stop() {
    for (const lane of this.lanes) lane.stop();
  }

  showBusy() {
    this.sendButton.hidden = this.isBusy;
    this.stopButton.hidden = !this.isBusy;
  }

  keep() {
    if (this.lanes.some((lane) => lane.turns.length)) keep(this);
  }

  rememberSettings(settings) {
    try {
      localStorage.setItem(SETTINGS_KEY, JSON.stringify(settings));
    } catch {
      // The browser keeps nothing for this page.
    }
  }

  showHistory() {
    const dialog = this.history;
    const rows = conversations().map((each) => {
      const openIt = () => {
        dialog.close();
        this.open(each);
      };
      const drop = () => {
        forget(each.id);
        this.showHistory();
      };
      return el(
        "li",
        {},
        button(titleOf(each), openIt, { class: "entry" }),
        el("span", { class: "muted" }, new Date(each.at).toLocaleString()),
        button("Delete", drop, { class: "quiet small", "aria-label": `Delete ${titleOf(each)}` }),
      );
    });
    const clear = button("Delete all", () => (forgetAll(), this.showHistory()), { class: "quiet" });
    dialog.replaceChildren(
      el("h2", {}, "Conversations"),
      el("p", { class: "muted" }, "They are kept in this browser alone."),
      rows.length ? el("ul", { class: "entries" }, rows) : el("p", {}, "There are none yet."),
      el("div", { class: "actions" }, button("Close", () => dialog.close()), rows.length ? clear : null),
    );
    if (!dialog.open) dialog.showModal();
  }
}

function recallSettings() {
  try {
    return { ...DEFAULT_SETTINGS, ...JSON.parse(localStorage.getItem(SETTINGS_KEY) ?? "{}") };
  } catch {
    return { ...DEFAULT_SETTINGS };
  }
}
