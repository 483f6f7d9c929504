// Small pictures for buttons, drawn in lines of the text's colour.

import { button, el, svg } from "./dom.js";

const PATHS = {
  list: "M3 5h14M3 10h14M3 15h14",
  pen: "M4 16l1-4 8.5-8.5 3 3L8 15l-4 1z",
  clip: "M14.5 9.5l-5.3 5.3a3.2 3.2 0 0 1-4.5-4.5l6-6a2.1 2.1 0 0 1 3 3l-6 6a1 1 0 0 1-1.5-1.5l5-5",
  sliders: "M3 6h8m4 0h2M3 14h2m4 0h8M13 4v4M7 12v4",
  columns: "M3 4h14v12H3zM10 4v12",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  half: "M10 3a7 7 0 1 0 0 14zM10 3a7 7 0 0 1 0 14",
};

/** Return a button with a picture. Its text is always its name; where there is little room, the picture alone is shown. */
export function iconButton(name, text, onclick, attributes = {}) {
  const made = button("", onclick, attributes);
  made.append(icon(name), el("span", { class: "words" }, text));
  return made;
}

export const icon = (name) => svg("svg", { viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
