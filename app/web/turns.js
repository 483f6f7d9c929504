// One message of a conversation on the page: text, files, reasoning, calls of tools, and what the answer took.

import { codeBlock } from "./code.js";
import { copyButton } from "./copy.js";
import { button, el, errorBox, number, seconds } from "./dom.js";
import { fileViews } from "./files.js";
import { MarkdownView } from "./markdown.js";
import { tokenView } from "./tokens.js";

const FINISHES = {
  stop: "",
  length: "cut off at the limit of tokens",
  tool_calls: "calls a tool",
  timeout: "timed out",
  stopped: "stopped by you",
};
const CUT = new Set(["length", "timeout", "stopped"]);

/** Return whether an answer has text that a model can go on with. */
export const canContinue = ({ content, calls, finish, error }) => Boolean(content) && !calls?.length && (CUT.has(finish) || Boolean(error));

/**
 * A message of the user or the result of a tool. `edit` is called with the new text. Of a message that was refused, `again`
 * sends it once more, and `shorten`, or null, does so without the oldest messages.
 */
export function userTurn(turn, { edit, again, shorten }) {
  const text = el("div", { class: "plain", dir: "auto" }, turn.content);
  const label = turn.role === "tool" ? "Result of a tool" : "You";
  const article = el("article", { class: ["turn", turn.role, turn.omitted && "omitted"], "aria-label": label });
  const small = (name, work) => button(name, work, { class: "quiet small" });
  const show = () => {
    const actions = [turn.failed && small("Try again", again), turn.failed && shorten && small("Leave out the oldest messages", shorten)];
    article.replaceChildren(
      ...(turn.content ? [text] : []),
      ...fileViews(turn.files),
      ...(turn.failed ? [errorBox({ message: `Not sent: ${turn.failed}` })] : []),
      ...(turn.omitted ? [leftOut()] : []),
      el("div", { class: "actions" }, actions, small("Edit", () => article.replaceChildren(editor()))),
    );
  };
  const editor = () => {
    const box = el("textarea", { rows: "4", "aria-label": "Edit the message", value: turn.content, dir: "auto" });
    const send = () => (box.value.trim() || turn.files?.length) && edit(box.value);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") show(), event.stopPropagation();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), send();
    });
    requestAnimationFrame(() => box.focus());
    return el("div", {}, box, el("div", { class: "actions" }, button("Send", send), button("Cancel", show, { class: "quiet" })));
  };
  show();
  return article;
}

const leftOut = () => el("p", { class: "muted" }, "Left out, to make room: the model does not get this any more.");

/** Text that grows: what is added is appended. */
class GrowingText {
  constructor() {
    this.element = el("div", { class: "plain", dir: "auto" });
    this.length = 0;
  }

  update(text) {
    if (text.length < this.length) this.element.replaceChildren(text);
    else if (text.length > this.length) this.element.append(text.slice(this.length));
    this.length = text.length;
  }
}

/**
 * An answer that grows. `retry` generates it anew; `goOn` continues it where it was cut off, or is null; `answerCalls` takes
 * the results of tools, or is null if they were given; `drawn` is called after it has grown.
 */
export class AnswerTurn {
  constructor(turn, { plain, isJson, retry, goOn, answerCalls, drawn }) {
    Object.assign(this, { turn, plain, isJson, retry, goOn, answerCalls, drawn });
    this.markdown = new MarkdownView();
    this.text = new GrowingText();
    this.reasoning = new GrowingText();
    this.thought = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.reasoning.element);
    this.body = el("div", { class: "body" });
    this.after = el("div"); // calls of tools, and an error
    this.footer = el("div", { class: "footer" });
    const parts = [this.thought, this.body, this.after, this.footer];
    this.element = el("article", { class: ["turn", "assistant", turn.omitted && "omitted"], "aria-label": "Answer" }, parts);
    this.showsTokens = false;
    this.isDrawing = false;
    this.cost = 0; // milliseconds that the last drawing took
    this.isBusy = false;
    this.draw();
  }

  /** Draw with one of the browser's next frames, since tokens arrive faster than it draws. Drawing gets a fifth of the time. */
  drawSoon() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    const draw = () => {
      const began = performance.now();
      this.isDrawing = false;
      this.draw();
      this.drawn();
      this.cost = performance.now() - began;
    };
    if (this.cost < 4) requestAnimationFrame(draw);
    else setTimeout(() => requestAnimationFrame(draw), this.cost * 4);
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.element.setAttribute("aria-busy", String(isBusy));
    this.draw();
  }

  draw() {
    const { turn } = this;
    this.thought.hidden = !turn.reasoning;
    this.reasoning.update(turn.reasoning ?? "");
    this.drawBody();
    if (!this.isBusy && !turn.unfinished) {
      this.drawAfter();
      this.drawFooter();
    } else {
      this.after.replaceChildren();
      this.footer.replaceChildren(el("span", { class: "waiting" }, this.waiting()));
    }
  }

  waiting() {
    if (!this.isBusy) return "Another tab is writing this answer.";
    return this.turn.content || this.turn.reasoning ? "Writing…" : "Waiting for the first token…";
  }

  drawBody() {
    const { turn } = this;
    if (this.showsTokens && turn.tokens) {
      this.body.replaceChildren(tokenView(turn.tokens));
      return;
    }
    if (this.isJson && !this.isBusy && turn.content) {
      this.body.replaceChildren(...jsonBody(turn.content));
      return;
    }
    const view = this.plain ? this.text : this.markdown;
    view.update(turn.content, this.isBusy || Boolean(turn.unfinished));
    if (this.body.firstChild !== view.element) this.body.replaceChildren(view.element);
  }

  drawAfter() {
    const { calls, error, omitted } = this.turn;
    this.after.replaceChildren(
      ...(calls?.length ? [callsForm(calls, this.answerCalls)] : []),
      ...(error ? [errorBox({ message: error })] : []),
      ...(omitted ? [leftOut()] : []),
    );
  }

  drawFooter() {
    const { turn } = this;
    const actions = [button("Retry", this.retry, { class: "quiet small" })];
    if (this.goOn && canContinue(turn)) actions.unshift(button("Continue", this.goOn, { class: "small" }));
    if (turn.content) actions.push(copyButton(() => turn.content));
    if (turn.tokens) {
      const toggle = () => {
        this.showsTokens = !this.showsTokens;
        this.draw();
      };
      actions.push(button("Tokens", toggle, { class: "quiet small", "aria-pressed": String(this.showsTokens) }));
    }
    this.footer.replaceChildren(el("span", { class: "stats" }, describeAnswer(turn)), el("span", { class: "actions" }, actions));
  }
}

/** Return an answer's figures: tokens, speed, first token with its parts, and why it ended. */
export function describeAnswer({ usage, timing, finish }) {
  const parts = [];
  if (usage) parts.push(`${number(usage.completion)} tokens`);
  if (usage && timing?.stream > 0 && usage.completion > 1) parts.push(`${number((usage.completion - 1) / timing.stream)} tokens/s`);
  if (timing?.first) {
    const inside = ["queue", "prefill"].filter((name) => timing[name] !== undefined).map((name) => `${name} ${seconds(timing[name])}`);
    parts.push(`first token ${seconds(timing.first)}${inside.length ? ` (${inside.join(", ")})` : ""}`);
  }
  if (usage) parts.push(`prompt ${number(usage.prompt)}${usage.cached ? `, ${number(usage.cached)} cached` : ""}`);
  if (FINISHES[finish] ?? finish) parts.push(FINISHES[finish] ?? finish);
  return parts.join(" · ");
}

function jsonBody(text) {
  try {
    return [codeBlock(JSON.stringify(JSON.parse(text), null, 2), "json")];
  } catch {
    return [codeBlock(text, "json"), el("p", { class: "muted" }, "The answer was cut off before the JSON was complete.")];
  }
}

function callsForm(calls, answerCalls) {
  const boxes = calls.map((call) => el("textarea", { rows: "2", "aria-label": `Result of ${call.name}` }));
  const cards = calls.map((call, index) =>
    el("div", { class: "call" }, el("p", {}, "Calls ", el("code", {}, call.name)), codeBlock(pretty(call.input), "json"), answerCalls ? boxes[index] : null),
  );
  if (!answerCalls) return el("div", { class: "calls" }, cards);
  const send = () => answerCalls(calls.map((call, index) => ({ role: "tool", call: call.id, content: boxes[index].value })));
  return el("div", { class: "calls" }, cards, button(calls.length > 1 ? "Send results" : "Send result", send));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
