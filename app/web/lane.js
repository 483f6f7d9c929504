// One column of a conversation: its settings, its turns, and the request that is under way.

import { announce, button, el, errorBox } from "./dom.js";
import { generate, requestBody, sizeOf } from "./generation.js";
import { describeSettings, settingsForm } from "./settings.js";
import { AnswerTurn, describeAnswer, userTurn } from "./turns.js";

const NEAR_THE_END = 160; // pixels; a reader who has scrolled up further is not moved

/** Mark an answer that nobody writes any more. */
export function markCut(turn, reason) {
  delete turn.unfinished;
  turn.error ??= reason;
}

export class Lane {
  /** `talk`: the page; `conversation`: what this column belongs to, also after the page shows another. */
  constructor(talk, conversation, { settings, turns }) {
    Object.assign(this, { talk, conversation, settings, turns });
    this.abort = null;
    this.summary = el("summary");
    this.details = el("details", { class: "settings" }, this.summary);
    this.details.addEventListener("toggle", () => this.fillForm());
    this.log = el("div", { class: "log", role: "region", tabindex: "0" });
    this.close = button("Remove", () => talk.removeLane(this), { class: "quiet small remove", "aria-label": "Remove this column" });
    this.head = el("div", { class: "lane-head" }, this.details, this.close);
    this.element = el("section", { class: "lane" }, this.head, this.log);
    this.describe();
    this.show();
  }

  fillForm() {
    const form = settingsForm(this.settings, this.conversation.mode, this.talk.model.defaults, () => {
      this.describe();
      this.talk.settingsChanged(this);
    });
    this.details.replaceChildren(this.summary, ...(this.details.open ? [form] : []));
    this.talk.arrangeSettings();
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

  show(notice = null) {
    const shown = this.turns.map((turn, index) => this.elementOf(turn, index));
    if (!shown.length) shown.push(this.talk.welcome());
    this.log.replaceChildren(...shown, ...(notice ? [errorBox(notice)] : []));
  }

  elementOf(turn, index) {
    if (turn.role === "assistant") return this.answerView(turn, index).element;
    const again = () => this.sendAgain(index);
    const hasEarlier = this.turns.slice(0, index).some((each) => each.role === "user" && !each.omitted);
    const shorten = turn.isTooLong && hasEarlier ? () => this.leaveOut(index) : null;
    return userTurn(turn, { edit: (content) => this.edit(index, content), again, shorten });
  }

  answerView(turn, index) {
    const isLast = index === this.turns.length - 1;
    return new AnswerTurn(turn, {
      plain: this.conversation.mode === "completion",
      isJson: Boolean(this.settings.schema),
      retry: () => this.answerFrom(index),
      // A schema's grammar begins anew with each request.
      goOn: isLast && !this.settings.schema ? () => this.goOn(turn) : null,
      answerCalls: this.turns[index + 1]?.role === "tool" ? null : (results) => this.add(...results),
      drawn: () => this.follow(),
    });
  }

  edit(index, content) {
    this.stop();
    const { failed, isTooLong, omitted, ...turn } = this.turns[index];
    this.turns.splice(index, this.turns.length, { ...turn, content });
    this.show();
    return this.answer();
  }

  sendAgain(index) {
    return this.edit(index, this.turns[index].content);
  }

  /** Send a message that was too long without the older half of what came before it. */
  leaveOut(index) {
    const sent = this.turns.slice(0, index).filter((turn) => !turn.omitted && !turn.failed);
    const starts = sent.flatMap((turn, at) => (turn.role === "user" ? [at] : []));
    const kept = starts[Math.ceil(starts.length / 2)] ?? sent.length;
    for (const turn of sent.slice(0, kept)) turn.omitted = true;
    return this.sendAgain(index);
  }

  /** Generate an answer anew. If that fails at once, the earlier one comes back. */
  answerFrom(index) {
    this.stop();
    const earlier = this.turns.splice(index);
    this.show();
    return this.answer({ earlier });
  }

  /** Continue an answer that was cut off. */
  goOn(turn) {
    this.stop();
    delete turn.error;
    delete turn.finish;
    this.turns.pop();
    this.show();
    return this.answer({ begun: turn });
  }

  add(...turns) {
    for (const turn of this.turns) if (turn.unfinished) markCut(turn, "The answer was cut off: another tab was writing it.");
    this.turns.push(...turns);
    this.show();
    return this.answer();
  }

  stop() {
    this.abort?.abort();
  }

  async answer({ begun = null, earlier = [] } = {}) {
    const abort = (this.abort = new AbortController());
    const turn = begun ?? { role: "assistant", content: "" };
    const had = sizeOf(turn);
    const before = this.turns.slice();
    turn.unfinished = true;
    this.turns.push(turn);
    const view = this.answerView(turn, before.length);
    this.log.append(view.element);
    this.follow(true);
    view.setBusy(true);
    this.talk.showBusy();
    this.talk.keep(this.conversation);
    let error = null;
    try {
      const body = requestBody(this.conversation.mode, this.talk.model.name, this.settings, before, begun);
      await generate(this.conversation.mode, body, turn, () => (view.drawSoon(), this.talk.keepSoon(this.conversation)), abort.signal);
    } catch (caught) {
      if (caught.name === "AbortError") turn.finish = "stopped";
      else error = caught;
    }
    delete turn.unfinished;
    if (this.abort === abort) this.abort = null;
    if (error) this.failed(error, turn, sizeOf(turn) > had || begun, earlier);
    view.setBusy(false);
    this.follow();
    // The box of an error is an alert, which is read by itself.
    if (!error) announce([turn.content && `Answer: ${turn.content.slice(0, 2000)}`, describeAnswer(turn)].filter(Boolean).join(". "));
    this.talk.showBusy();
    this.talk.keep(this.conversation);
  }

  /** An answer that has begun keeps its text. Otherwise the message was not answered, so it leaves what is sent later. */
  failed(error, turn, hasText, earlier) {
    const question = this.turns.at(-2);
    turn.error = error.message;
    if (hasText || this.turns.at(-1) !== turn) return;
    if (earlier.length) {
      this.turns.splice(-1, 1, ...earlier);
      this.show(error);
    } else if (question?.role === "user") {
      this.turns.pop();
      question.failed = error.message;
      question.isTooLong = error.code === "context_length_exceeded";
      this.show();
    }
    this.follow(true);
  }

  /** Scroll with the text, unless the reader has scrolled up. */
  follow(always = false) {
    const { log } = this;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END) log.scrollTop = log.scrollHeight;
  }
}
