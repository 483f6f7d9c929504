// Text files that go with a message: what is taken, how they look before they are sent, and how the model gets them.

import { announce, bytes, button, el, errorBox } from "./dom.js";

const MOST_BYTES = 1024 * 1024;
const MOST_FILES = 10;

/** Return what the model gets of a message: its text, and each file as a block of code under its name. */
export function messageText({ content, files }) {
  if (!files?.length) return content;
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}${ending(name)}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [content, ...blocks].filter(Boolean).join("\n\n");
}

const ending = (name) => name.match(/\.([\w+#-]{1,12})$/)?.[1].toLowerCase() ?? "";

/** Return a file's name and text. Throws an error whose sentence says why it is not taken. */
export async function readText(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${bytes(file.size)}. A file may have at most ${bytes(MOST_BYTES)}.`);
  let data;
  try {
    data = new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} cannot be read. Folders cannot be attached.`);
  }
  const refusal = new Error(`${file.name} is not a text file. Only text is attached, in UTF-8 or UTF-16.`);
  const encoding = data[0] === 0xff && data[1] === 0xfe ? "utf-16le" : data[0] === 0xfe && data[1] === 0xff ? "utf-16be" : "utf-8";
  let text;
  try {
    text = new TextDecoder(encoding, { fatal: true }).decode(data);
  } catch {
    throw refusal;
  }
  // Control characters other than tab, line ends, form feed and escape are in no text.
  if (/[\0-\x08\x0b\x0e-\x1a\x1c-\x1f]/.test(text)) throw refusal;
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  return { name: file.name, text: text.replaceAll("\r\n", "\n") };
}

/** Return the sent files as elements that open. */
export function fileViews(files) {
  return (files ?? []).map(({ name, text }) =>
    el("details", { class: "file" }, el("summary", {}, name, el("span", { class: "muted" }, ` ${bytes(new Blob([text]).size)}`)), el("pre", { tabindex: "0", role: "group", "aria-label": name }, text)),
  );
}

/** The files of the message that is being written. `changed` is called after each change. */
export class Attachments {
  constructor(changed) {
    this.changed = changed;
    this.files = [];
    this.input = el("input", { type: "file", multiple: true, hidden: true, onchange: () => this.take([...this.input.files]) });
    this.element = el("div", { class: "attachments" });
  }

  choose() {
    this.input.value = "";
    this.input.click();
  }

  set(files) {
    this.files = files ?? [];
    this.draw();
  }

  /** Add files; those that are refused are named, with the reason. */
  async take(chosen) {
    const refused = [];
    for (const file of chosen) {
      try {
        if (this.files.length >= MOST_FILES) throw new Error(`${file.name} was not attached: a message has at most ${MOST_FILES} files.`);
        this.files.push(await readText(file));
        announce(`${file.name} is attached.`);
      } catch (error) {
        refused.push(error);
      }
    }
    this.draw(refused);
  }

  draw(refused = []) {
    const drop = (file) => this.set(this.files.filter((each) => each !== file));
    const chips = this.files.map((file) =>
      el("span", { class: "chip" }, file.name, button("×", () => drop(file), { class: "quiet small", "aria-label": `Remove ${file.name}` })),
    );
    this.element.replaceChildren(...chips, ...refused.map(errorBox));
    this.element.hidden = !this.element.childNodes.length;
    this.changed();
  }
}
