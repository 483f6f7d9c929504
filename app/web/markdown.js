// Markdown to elements. What a model writes is not trusted: elements get their text as text, links lead only to http and
// https, and pictures are shown as links, since a picture's address would tell another host that it was looked at.
// The outermost elements have dir="auto": each takes the direction of its own text.

import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { formula } from "./math.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const TASK = /^\[([ xX])\]\s+/;
const CLOSING = { "$$": "$$", "\\[": "\\]" }; // of a formula on lines of its own
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

/** Return elements for the lines of a block. `isOpen`: more lines may follow, so code has no colours yet. */
export function renderBlock(source, isOpen = false) {
  const made = renderLines(source.split("\n"), 0, isOpen);
  for (const element of made) if (!element.matches(".code, .math, hr")) element.setAttribute("dir", "auto");
  return made;
}

function renderLines(lines, depth, isOpen) {
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
      const grows = isOpen && at === lines.length;
      const code = codeBlock(lines.slice(start, at).join("\n"), match[2].toLowerCase(), grows);
      if (grows && depth === 0) code.openFence = match[1];
      made.push(code);
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
      made.push(el("blockquote", {}, renderLines(inner, depth + 1, isOpen)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      at = renderList(lines, at, made, depth, isOpen);
    } else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      at = renderTable(lines, at, made);
    } else {
      at = renderParagraph(lines, at, made);
    }
  }
  return made;
}

const beginsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));

/** A paragraph, in which a formula may stand on lines that would otherwise begin a list or a quotation. */
function renderParagraph(lines, at, made) {
  const start = at;
  let end = formulaEnd(lines, at++);
  while (at < lines.length && lines[at].trim() && (at <= end || !beginsBlock(lines[at]))) {
    if (at > end) end = formulaEnd(lines, at);
    at++;
  }
  const text = lines.slice(start, at).join("\n");
  const whole = text.trim().match(WHOLE_FORMULA);
  made.push(whole ? formula(whole[1] ?? whole[2], true, text) : el("p", {}, inline(text)));
  return at;
}

/** Return the line that closes the formula which a line leaves open; -1 if there is none. */
function formulaEnd(lines, at) {
  const open = lines[at].replace(/\$\$.*?\$\$|\\\[.*?\\\]/g, "").match(/\$\$|\\\[/);
  if (!open) return -1;
  for (let end = at + 1; end < lines.length && lines[end].trim(); end++) if (lines[end].includes(CLOSING[open[0]])) return end;
  return -1;
}

function renderList(lines, at, made, depth, isOpen) {
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
  const children = items.map((item, index) => {
    const task = item[0].match(TASK);
    if (task) item[0] = item[0].slice(task[0].length);
    const inner = renderLines(item, depth + 1, isOpen && index === items.length - 1);
    // The first paragraph needs no element of its own if it is the only one, or only a list follows.
    const isTight = inner[0]?.tagName === "P" && inner.slice(1).every((each) => /^[OU]L$/.test(each.tagName));
    const content = isTight ? [...inner[0].childNodes, ...inner.slice(1)] : inner;
    return el("li", { class: task ? "task" : null }, task ? checkBox(task[1]) : null, content);
  });
  const start = ordered ? Number.parseInt(mark, 10) : 1;
  made.push(el(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? String(start) : null }, children));
  return at;
}

const checkBox = (mark) => el("input", { type: "checkbox", disabled: true, checked: mark !== " ", "aria-label": mark === " " ? "To do" : "Done" });

function renderTable(lines, at, made) {
  const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const head = cells(lines[at]);
  const sides = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "middle" : "end") : null));
  const rows = [];
  for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].trim(); at++) rows.push(cells(lines[at]));
  const row = (tag, values) => el("tr", {}, head.map((_, index) => el(tag, { class: sides[index] }, inline(values[index] ?? ""))));
  made.push(
    el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, rows.map((each) => row("td", each))))),
  );
  return at;
}

const WHOLE_FORMULA = /^(?:\$\$((?:(?!\$\$)[\s\S])+)\$\$|\\\[((?:(?!\\\])[\s\S])+)\\\])$/;
// In the order in which they are tried at each position. The lengths are bounded, so that no text takes long.
const INLINE = new RegExp(
  [
    /(?<code>(?<ticks>`+)(?!`)(?<literal>[\s\S]{0,4000}?[^`])\k<ticks>(?!`))/,
    /(?<display>\$\$(?<dollars>(?:(?!\$\$)[\s\S]){1,4000})\$\$|\\\[(?<brackets>(?:(?!\\\])[\s\S]){1,4000})\\\])/,
    /(?<formula>\\\((?<parentheses>(?:(?!\\\))[\s\S]){1,4000})\\\)|(?<![\w\\$])\$(?<single>(?![\s$])[^$`\n]{0,400}[^\s$`\\])\$(?![\w$]))/,
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
  if (found.display) return formula(found.dollars ?? found.brackets, true, found.display);
  if (found.formula) return found.single && isPlain(found.single) ? found.formula : formula(found.parentheses ?? found.single, false, found.formula);
  if (found.escaped) return found.escaped[1];
  if (found.link) return link(found.target, found.label ? inline(found.label, depth) : found.target) ?? found.link;
  if (found.auto) return autoLink(found.auto);
  if (found.strong) return el("strong", {}, inline(found.strong.slice(2, -2), depth));
  if (found.strike) return el("s", {}, inline(found.strike.slice(2, -2), depth));
  return el("em", {}, inline(found.emphasis.slice(1, -1), depth));
}

/** Return whether what stands between two dollars is rather words, as in "$5 for one, or two for 9$". */
const isPlain = (text) => !/[\\^_=<>{}]/.test(text) && /[\p{L}\p{N}]\s+\p{L}{2,}|\p{L}{4,}/u.test(text);

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

/**
 * Shows text that grows. Blocks to which no line can be added are settled: they are split, rendered and coloured once. Of
 * the last block, code that is still open grows by a text; anything else is rendered again.
 */
export class MarkdownView {
  constructor() {
    this.element = el("div", { class: "prose" });
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    this.text = "";
    this.settled = 0; // characters of the settled blocks
    this.shown = []; // the blocks after them
    this.isOpen = false;
  }

  /** Show a text; `isOpen` while more may follow. */
  update(text, isOpen = false) {
    if (text === this.text && isOpen === this.isOpen) return;
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    this.isOpen = isOpen;
    const blocks = splitBlocks(text.slice(this.settled));
    const wanted = blocks.map((source, index) => ({ source, isOpen: isOpen && index === blocks.length - 1 }));
    if (!this.grow(wanted)) this.replace(wanted);
    // The first line of a block says whether it belongs to the block before, so it must be whole.
    const settled = this.shown.slice(0, blocks.at(-1).includes("\n") ? -1 : -2);
    for (const { source } of settled) this.settled += source.length + 1;
    this.shown.splice(0, settled.length);
  }

  replace(wanted) {
    const differs = ({ source, isOpen }, index) => source !== this.shown[index]?.source || isOpen !== this.shown[index].isOpen;
    const first = wanted.findIndex(differs);
    const same = first < 0 ? wanted.length : first;
    for (const { nodes } of this.shown.splice(same)) for (const node of nodes) node.remove();
    for (const { source, isOpen } of wanted.slice(same)) {
      const nodes = renderBlock(source, isOpen);
      this.element.append(...nodes);
      this.shown.push({ source, isOpen, nodes });
    }
  }

  /** Append to code that is not closed yet, and return whether that is all that has changed. */
  grow(wanted) {
    const before = this.shown.at(-1);
    const after = wanted.at(-1);
    const code = before?.nodes.at(-1);
    if (wanted.length !== this.shown.length || !code?.openFence || !after.isOpen || !after.source.startsWith(before.source)) return false;
    const lastLine = before.source.slice(before.source.lastIndexOf("\n") + 1);
    const added = after.source.slice(before.source.length);
    if (FENCE.test(lastLine) || (lastLine + added).includes(code.openFence)) return false;
    code.querySelector("code").append(added);
    before.source = after.source;
    return true;
  }
}
