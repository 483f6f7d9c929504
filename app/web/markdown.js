// Markdown to elements. What a model writes is not trusted: elements get their text as text, links lead only to http and
// https, and pictures are shown as links, since a picture's address would tell another host that it was looked at.

import { button, el } from "./dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8;

/** Return the source of each top-level block: paragraphs, lists, fences, tables. Joined by newlines they are the text. */
export function splitBlocks(text) {
  const blocks = [];
  let block = [];
  let fence = null;
  let blank = false;
  for (const line of text.split("\n")) {
    const mark = fence ? null : line.match(FENCE);
    if (fence) {
      block.push(line);
      if (closes(line, fence)) fence = null;
    } else {
      // A list goes on after a blank line with further items or indented lines.
      const goesOn = block.length && ITEM.test(block[0]) && (ITEM.test(line) || /^\s{2,}\S/.test(line) || !line.trim());
      if (blank && line.trim() && !goesOn && block.length) {
        blocks.push(block.join("\n"));
        block = [];
      }
      block.push(line);
      if (mark) fence = mark[1];
    }
    blank = !fence && !line.trim();
  }
  if (block.length) blocks.push(block.join("\n"));
  return blocks;
}

const closes = (line, fence) => {
  const trimmed = line.trim();
  return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
};

/** Return elements for the lines of a block. */
export function renderBlock(source, depth = 0) {
  return renderLines(source.split("\n"), depth);
}

function renderLines(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (!line.trim()) {
      at++;
    } else if ((match = line.match(FENCE))) {
      const start = ++at;
      while (at < lines.length && !closes(lines[at], match[1])) at++;
      made.push(codeBlock(lines.slice(start, at).join("\n"), match[2]));
      at++;
    } else if ((match = line.match(HEADING))) {
      // Headings of an answer rank below those of the page.
      made.push(el(`h${Math.min(6, match[1].length + 1)}`, {}, inline(match[2])));
      at++;
    } else if (RULE.test(line)) {
      made.push(el("hr"));
      at++;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const inner = [];
      while (at < lines.length && (match = lines[at].match(QUOTE))) inner.push(match[1]), at++;
      made.push(el("blockquote", {}, renderLines(inner, depth + 1)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      at = renderList(lines, at, made, depth);
    } else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      at = renderTable(lines, at, made);
    } else {
      const start = at++;
      while (at < lines.length && lines[at].trim() && !beginsBlock(lines[at])) at++;
      made.push(el("p", {}, inline(lines.slice(start, at).join("\n"))));
    }
  }
  return made;
}

const beginsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));

function renderList(lines, at, made, depth) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const items = [];
  while (at < lines.length) {
    const match = lines[at].match(ITEM);
    if (match && match[1].length <= indent.length && /\d/.test(match[2]) === ordered) {
      items.push([match[3]]);
    } else if (items.length && (/^\s+\S/.test(lines[at]) || (lines[at].trim() && !beginsBlock(lines[at]) && lines[at - 1]?.trim()))) {
      items.at(-1).push(lines[at].replace(/^(\t| {1,4})/, ""));
    } else if (!lines[at].trim() && (ITEM.test(lines[at + 1] ?? "") || /^\s+\S/.test(lines[at + 1] ?? ""))) {
      items.at(-1)?.push("");
    } else break;
    at++;
  }
  const children = items.map((item) => {
    const inner = renderLines(item, depth + 1);
    // A single paragraph needs no element of its own.
    return el("li", {}, inner.length === 1 && inner[0].tagName === "P" ? [...inner[0].childNodes] : inner);
  });
  const start = ordered ? Number.parseInt(mark, 10) : 1;
  made.push(el(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? String(start) : null }, children));
  return at;
}

function renderTable(lines, at, made) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const head = cells(lines[at]);
  const rows = [];
  for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].trim(); at++) rows.push(cells(lines[at]));
  const row = (tag, values) => el("tr", {}, head.map((_, index) => el(tag, {}, inline(values[index] ?? ""))));
  made.push(
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, rows.map((each) => row("td", each))))),
  );
  return at;
}

/** Return a block of code with a button that copies it. */
export function codeBlock(text, language = "") {
  const copy = button("Copy", async () => {
    await navigator.clipboard?.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }, { class: "quiet small" });
  const pre = el("pre", { tabindex: "0", role: "group", "aria-label": `Code${language ? ` in ${language}` : ""}` }, el("code", {}, text));
  return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, language), copy), pre);
}

// In the order in which they are tried at each position. The lengths are bounded, so that no text takes long.
const INLINE = new RegExp(
  [
    /(?<code>(?<ticks>`+)(?!`)(?<literal>[\s\S]{0,4000}?[^`])\k<ticks>(?!`))/,
    /(?<escaped>\\[!-/:-@[-`{-~])/,
    /(?<link>!?\[(?<label>[^\]\n]{0,500})\]\(\s*<?(?<target>[^\s)>]{1,2000})>?(?:\s+["'][^"'\n]{0,500}["'])?\s*\))/,
    /(?<auto>https?:\/\/[^\s<>"'`\])]{1,2000})/,
    /(?<strong>(?<bold>\*\*|__)(?=\S)[\s\S]{0,2000}?\S\k<bold>)/,
    /(?<strike>~~(?=\S)[\s\S]{0,2000}?\S~~)/,
    /(?<emphasis>(?<![\w*])(?<mark>[*_])(?=[^\s*_])[\s\S]{0,2000}?[^\s*_]\k<mark>(?![\w*]))/,
  ]
    .map((pattern) => pattern.source)
    .join("|"),
  "u",
);

/** Return nodes for text with emphasis, code and links. */
export function inline(text, depth = 0) {
  const nodes = [];
  while (text) {
    const match = depth < MAX_DEPTH ? text.match(INLINE) : null;
    if (!match) {
      nodes.push(text);
      break;
    }
    if (match.index) nodes.push(text.slice(0, match.index));
    nodes.push(inlineNode(match, depth + 1));
    text = text.slice(match.index + match[0].length);
  }
  return nodes;
}

function inlineNode(match, depth) {
  const found = match.groups;
  if (found.code) return el("code", {}, found.literal.replace(/^ (.*) $/s, "$1"));
  if (found.escaped) return found.escaped[1];
  if (found.link) return link(found.target, found.label ? inline(found.label, depth) : found.target) ?? found.link;
  if (found.auto) return autoLink(found.auto);
  if (found.strong) return el("strong", {}, inline(found.strong.slice(2, -2), depth));
  if (found.strike) return el("s", {}, inline(found.strike.slice(2, -2), depth));
  return el("em", {}, inline(found.emphasis.slice(1, -1), depth));
}

function autoLink(text) {
  const address = text.replace(/[.,;:!?]+$/, "");
  return el("span", {}, link(address, address) ?? address, text.slice(address.length));
}

/** Return a link, or null if the address is not one of http or https. */
function link(address, label) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return el("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank" }, label);
}

/** Shows text that grows: only the blocks that have changed are rendered again. */
export class MarkdownView {
  constructor() {
    this.element = el("div", { class: "prose" });
    this.shown = [];
  }

  update(text) {
    const blocks = splitBlocks(text);
    let same = 0;
    while (same < blocks.length && this.shown[same]?.source === blocks[same]) same++;
    for (const old of this.shown.splice(same)) for (const node of old.nodes) node.remove();
    for (const source of blocks.slice(same)) {
      const nodes = renderBlock(source);
      this.element.append(...nodes);
      this.shown.push({ source, nodes });
    }
  }
}
