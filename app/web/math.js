// Formulas: LaTeX to MathML by Temml, which is loaded with the first formula. What a model writes is not trusted: of
// Temml's tree, elements and attributes that are known to be inert are built, and effort and size are bounded.

import { el } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MOST_CHARACTERS = 4000;
const MOST_NODES = 6000;
const MOST_KEPT = 300;
const MOST_INLINE = 60; // a longer source is shown on a line of its own, where it can scroll
const MOST_EMS = 12; // a space or a rule is not longer, so that a formula stays at its place
// A macro may multiply its text, so a formula that defines one is short and expands few.
const DEFINES = /\\(?:[gex]?def|let|futurelet|(?:re|provide)?newcommand|newenvironment|DeclareMathOperator)(?![a-zA-Z])/;
const MOST_DEFINING = 400;
const ELEMENTS = new Set(
  "math semantics mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts mprescripts mtable mtr mtd mstyle mpadded mphantom menclose merror none span".split(" "),
);
const ATTRIBUTES = new Set(
  "accent accentunder columnalign columnlines columnspacing columnspan depth display displaystyle fence form height largeop linebreak linethickness lspace mathcolor mathbackground mathsize mathvariant maxsize minsize movablelimits notation rowalign rowlines rowspacing rowspan rspace scriptlevel separator stretchy symmetric voffset width".split(" "),
);
const STYLES = new Set(
  "border borderBottom borderLeft borderRight borderTop color display font-style font-weight fontStyle fontWeight math-depth mathDepth padding paddingBottom paddingLeft paddingRight paddingTop textAlign whiteSpace".split(" "),
);
const kept = new Map(); // by source: the element, in the order of use
let loading = null;
let temml = null;

/** Return an element for a formula: its source at first, and MathML once Temml is there and understands it. */
export function formula(source, isDisplay, raw) {
  const isWide = isDisplay || source.length > MOST_INLINE;
  const holder = el("span", {
    class: ["math", isWide && "display"],
    dir: "ltr",
    // A long formula scrolls, also by keyboard.
    ...(isWide ? { tabindex: "0", role: "group", "aria-label": "Formula" } : {}),
  });
  holder.textContent = raw;
  if (source.length > MOST_CHARACTERS || !source.trim()) return holder;
  if (temml) fill(holder, source, isDisplay);
  else load().then(() => fill(holder, source, isDisplay), () => (loading = null));
  return holder;
}

function load() {
  loading ??= import("./vendor/temml/temml.min.js").then((module) => {
    document.head.append(el("link", { rel: "stylesheet", href: "web/vendor/temml/temml.css" }));
    temml = module.default;
  });
  return loading;
}

function fill(holder, source, isDisplay) {
  const key = `${isDisplay ? "block" : "inline"} ${source}`;
  let made = kept.get(key);
  if (made === undefined) made = convert(source, isDisplay);
  kept.delete(key);
  kept.set(key, made);
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  if (made) holder.replaceChildren(made.cloneNode(true));
}

/** Return the element, or null for what Temml does not understand, is not trusted with, or what is too large. */
function convert(source, isDisplay) {
  const defines = DEFINES.test(source);
  if (defines && source.length > MOST_DEFINING) return null;
  try {
    const tree = temml.__renderToMathMLTree(source, {
      displayMode: isDisplay,
      throwOnError: true,
      trust: false,
      strict: false,
      annotate: false,
      macros: {},
      maxSize: [MOST_EMS, 200],
      maxExpand: defines ? 100 : 1000,
      wrap: "none",
    });
    return build(tree, { left: MOST_NODES }, 0);
  } catch {
    return null;
  }
}

function build(node, budget, depth) {
  if (--budget.left < 0 || depth > 200) throw new Error("The formula is too large.");
  if (typeof node.text === "string" && !node.children?.length && !node.type) return document.createTextNode(node.text);
  const children = (node.children ?? []).map((child) => build(child, budget, depth + 1));
  const name = node.type ?? (node.attributes ? "span" : null); // a node without attributes is a fragment
  const made = name === null ? document.createDocumentFragment() : element(ELEMENTS.has(name) ? name : "mrow", node);
  made.append(...children);
  return made;
}

function element(name, node) {
  const made = name === "span" ? document.createElement("span") : document.createElementNS(MATHML, name);
  for (const [attribute, value] of Object.entries(node.attributes ?? {}))
    if (ATTRIBUTES.has(attribute)) made.setAttribute(attribute, bounded(String(value)));
  const classes = (node.classes ?? []).filter((each) => /^[a-z][a-z0-9-]*$/i.test(each ?? ""));
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [property, value] of Object.entries(node.style ?? {}))
    if (STYLES.has(property) && !/url|expression|var\(/i.test(value)) made.style[property] = bounded(String(value));
  return made;
}

/** Return a value with its lengths cut to what keeps a formula at its place. */
const bounded = (value) =>
  value.replace(/(-?\d*\.?\d+)(em|ex|pt|px|mu|cm|mm|in)/g, (_, size, unit) => {
    const most = ["em", "ex", "mu", "cm", "in"].includes(unit) ? MOST_EMS : MOST_EMS * 16;
    return `${Math.max(-most, Math.min(most, Number(size)))}${unit}`;
  });
