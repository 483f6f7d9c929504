// Elements are built from nodes and text alone. Nothing in this page turns text into markup.

/**
 * Return a new element. Attributes whose name begins with "on" are listeners; true and false set or leave out an
 * attribute; `class` may be a list. Children are nodes, texts, lists of both, or null.
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, Array.isArray(value) ? value.filter(Boolean).join(" ") : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return a new SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Return a button. */
export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, text);
}

let fields = 0;

/** Return a labelled form field: a label around its text, with the control after it. */
export function field(label, control, hint = "") {
  control.id ||= `field-${++fields}`;
  const described = hint ? el("small", { id: `${control.id}-hint` }, hint) : null;
  if (described) control.setAttribute("aria-describedby", described.id);
  return el("div", { class: "field" }, el("label", { for: control.id }, label), control, described);
}

/** Return a table. `rows` are lists of cells; the first cell of a row is its header if `rowHeaders` is true. */
export function table(caption, columns, rows, { rowHeaders = true, numeric = [] } = {}) {
  const cell = (content, index) =>
    el(
      index === 0 && rowHeaders ? "th" : "td",
      { scope: index === 0 && rowHeaders ? "row" : null, class: numeric.includes(index) ? "number" : null },
      content,
    );
  const head = el(
    "tr",
    {},
    columns.map((name, index) => el("th", { scope: "col", class: numeric.includes(index) ? "number" : null }, name)),
  );
  const body = rows.map((row) => el("tr", {}, row.map(cell)));
  const made = el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
}

/** Tell a screen reader something once. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** Return a box with an error's sentence. */
export function errorBox(error) {
  return el("div", { class: "error", role: "alert" }, error.message);
}

const WHOLE = new Intl.NumberFormat("en");
const FEW = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

/** Return a number with at most three significant digits, or all of a whole part. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Math.abs(value) >= 100 ? WHOLE.format(Math.round(value)) : FEW.format(value);
}

/** Return a duration in the unit in which it is easiest to read. */
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.001) return `${FEW.format(value * 1e6)} µs`;
  if (value < 1) return `${FEW.format(value * 1e3)} ms`;
  return value < 120 ? `${FEW.format(value)} s` : `${WHOLE.format(Math.round(value / 60))} min`;
}

/** Return a number of bytes in binary units. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${FEW.format(value)} ${units[unit]}`;
}

/** Return a large count as 4.2M, 1.5B. */
export function count(value) {
  return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
}

/** Return a share as a percentage. */
export function percent(value) {
  return value === null || value === undefined ? "–" : `${FEW.format(value * 100)}%`;
}
