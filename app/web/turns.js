// One message of a conversation on the page: text, reasoning, calls of tools, and what the answer took.

import { button, el, errorBox, number, seconds } from "./dom.js";
import { codeBlock, MarkdownView } from "./markdown.js";
import { tokenView } from "./tokens.js";

const FINISHES = {
  stop: "",
  length: "cut off at max tokens",
  tool_calls: "calls a tool",
  timeout: "timed out",
  stopped: "stopped by you",
};

/** A message of the user or the result of a tool. `edit` is called with the new text. */
export function userTurn(turn, edit) {
  const text = el("div", { class: "plain" }, turn.content);
  const article = el("article", { class: ["turn", turn.role], "aria-label": turn.role === "tool" ? "Result of a tool" : "You" });
  const show = () => {
    const change = button("Edit", () => article.replaceChildren(editor()), { class: "quiet small" });
    article.replaceChildren(text, el("div", { class: "actions" }, change));
  };
  const editor = () => {
    const box = el("textarea", { rows: "4", "aria-label": "Edit the message", value: turn.content });
    const send = () => box.value.trim() && edit(box.value);
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

/**
 * An answer that grows. `retry` generates it anew; `answerCalls` takes the results of tools, or is null if they were
 * given; `drawn` is called after it has grown.
 */
export class AnswerTurn {
  constructor(turn, { plain, isJson, retry, answerCalls, drawn }) {
    Object.assign(this, { turn, plain, isJson, retry, answerCalls, drawn });
    this.markdown = new MarkdownView();
    this.reasoning = el("div", { class: "plain" });
    this.thought = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.reasoning);
    this.body = el("div", { class: "body" });
    this.after = el("div"); // calls of tools, and an error
    this.footer = el("div", { class: "footer" });
    this.element = el("article", { class: ["turn", "assistant"], "aria-label": "Answer" }, this.thought, this.body, this.after, this.footer);
    this.showsTokens = false;
    this.frame = 0;
    this.isBusy = false;
    this.draw();
  }

  /** Draw with the browser's next frame, since tokens arrive faster than it draws. */
  drawSoon() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
      this.drawn();
    });
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.element.setAttribute("aria-busy", String(isBusy));
    this.draw();
  }

  draw() {
    const { turn } = this;
    this.thought.hidden = !turn.reasoning;
    if (turn.reasoning && this.reasoning.textContent.length !== turn.reasoning.length) this.reasoning.textContent = turn.reasoning;
    this.drawBody();
    if (!this.isBusy) {
      this.drawAfter();
      this.drawFooter();
    } else this.footer.replaceChildren(el("span", { class: "waiting" }, turn.content || turn.reasoning ? "Writing…" : "Waiting for the first token…"));
  }

  drawBody() {
    const { turn } = this;
    if (this.showsTokens && turn.tokens) {
      this.body.replaceChildren(tokenView(turn.tokens));
      return;
    }
    if (this.isJson && !this.isBusy && turn.content) this.body.replaceChildren(...jsonBody(turn.content));
    else if (this.plain) this.body.replaceChildren(el("div", { class: "plain" }, turn.content));
    else {
      this.markdown.update(turn.content);
      if (this.body.firstChild !== this.markdown.element) this.body.replaceChildren(this.markdown.element);
    }
  }

  drawAfter() {
    const { calls, error } = this.turn;
    this.after.replaceChildren(...(calls?.length ? [callsForm(calls, this.answerCalls)] : []), ...(error ? [errorBox({ message: error })] : []));
  }

  drawFooter() {
    const { turn } = this;
    const actions = [button("Retry", this.retry, { class: "quiet small" })];
    if (turn.content) actions.push(button("Copy", () => navigator.clipboard?.writeText(turn.content), { class: "quiet small" }));
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
