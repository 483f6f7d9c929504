// The tokens of an answer, shaded by their probabilities, with the alternatives of the one that is pointed at.

import { el, number } from "./dom.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1];
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
const chance = (logprob) => `${number(Math.exp(logprob) * 100)}%`;

/** Return the tokens as a group in which the pointer or the arrow keys choose one. */
export function tokenView(tokens) {
  const card = el("div", { class: "token-card", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
  const spans = tokens.map(({ text, logprob }) => {
    const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
    return el("span", { class: ["token", `p${level < 0 ? LEVELS.length : level}`] }, text);
  });
  let chosen = -1;
  const choose = (index) => {
    if (index === chosen || index < 0 || index >= tokens.length) return;
    spans[chosen]?.classList.remove("chosen");
    chosen = index;
    spans[chosen].classList.add("chosen");
    card.replaceChildren(...describe(tokens[chosen]));
  };
  const group = el(
    "div",
    {
      class: "tokens",
      role: "group",
      tabindex: "0",
      "aria-label": "Tokens. The arrow keys move from one to the next.",
      onpointerover: (event) => choose(spans.indexOf(event.target)),
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        choose(Math.min(tokens.length - 1, Math.max(0, chosen + step)));
      },
    },
    spans,
  );
  return el("div", { class: "token-view" }, group, card);
}

function describe({ text, logprob, others }) {
  const known = others.some(([other]) => other === text) ? others : [[text, logprob], ...others];
  const rows = known.map(([other, score]) =>
    el(
      "li",
      { class: other === text ? "taken" : null },
      el("code", {}, visible(other)),
      el("meter", { min: "0", max: "1", value: Math.exp(score), "aria-label": `Probability of ${visible(other)}` }),
      el("span", { class: "number" }, chance(score)),
    ),
  );
  return [el("p", {}, el("code", {}, visible(text)), ` had a probability of ${chance(logprob)}.`), el("ol", {}, rows)];
}
