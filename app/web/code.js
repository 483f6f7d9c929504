// Blocks of code. highlight.js is loaded when a language is named for the first time, and gives a tree of names and texts,
// from which elements are built: its HTML is not used.

import { copyButton } from "./copy.js";
import { el } from "./dom.js";

const MOST_CHARACTERS = 60_000; // longer code has no colours, since finding them would be felt
const MOST_DEPTH = 40;
let library = null;

/** Return a block of code with a button that copies it. `isOpen`: more may follow, so it has no colours yet. */
export function codeBlock(text, language = "", isOpen = false) {
  const code = el("code", {}, text);
  const name = `Code${language ? ` in ${language}` : ""}`;
  const pre = el("pre", { tabindex: "0", role: "group", "aria-label": name, dir: "ltr" }, code);
  if (language && !isOpen && text.length <= MOST_CHARACTERS) colour(code, text, language);
  return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, language), copyButton(() => code.textContent)), pre);
}

async function colour(code, text, language) {
  try {
    library ??= import("./vendor/highlight/highlight.min.js");
    const { default: highlighter } = await library;
    if (!highlighter.getLanguage(language)) return;
    const { _emitter: tree } = highlighter.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(...nodesOf(tree.rootNode.children, 0));
  } catch {
    library = null; // The server may have been away: the code stays without colours.
  }
}

function nodesOf(children, depth) {
  return children.map((child) => {
    if (typeof child === "string") return child;
    const inner = depth < MOST_DEPTH ? nodesOf(child.children, depth + 1) : [textOf(child)];
    return el("span", { class: `hl-${(child.scope ?? "").split(/[.:]/)[0]}` }, inner);
  });
}

const textOf = (node) => (typeof node === "string" ? node : node.children.map(textOf).join(""));
