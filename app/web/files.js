// Text files and pictures that go with a message: what is taken, how they look, and how the model gets them.

import { announce, bytes, button, el, errorBox } from "./dom.js";

const MOST_BYTES = 1024 * 1024;
const MOST_FILES = 10;
// A picture that is larger, or of another type, is drawn anew: many of them are sent with each message, and kept.
const PICTURE_TYPES = new Set(["image/jpeg", "image/png", "image/webp"]);
const PICTURE_BYTES = 512 * 1024;
const PICTURE_PIXELS = 1600; // of the longer side

/** Return what the model gets of a message: its text, and each file as a block of code under its name. */
export function messageText({ content, files }) {
  const blocks = (files ?? []).filter(({ picture }) => !picture).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}${ending(name)}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [content, ...blocks].filter(Boolean).join("\n\n");
}

/** Return a message's content as in OpenAI's API: its text, or with pictures a list of parts. */
export function messageContent(turn) {
  const pictures = (turn.files ?? []).filter(({ picture }) => picture);
  const text = messageText(turn);
  if (!pictures.length) return text;
  return [...pictures.map(({ picture }) => ({ type: "image_url", image_url: { url: picture } })), ...(text ? [{ type: "text", text }] : [])];
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

const isPicture = (file) => file.type.startsWith("image/") && file.type !== "image/svg+xml";

/** Return a picture's name and its data URL. Throws an error whose sentence says why it is not taken. */
async function readPicture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} cannot be read: it is damaged, or a kind of picture that this browser does not know.`);
  }
  const scale = Math.min(1, PICTURE_PIXELS / Math.max(bitmap.width, bitmap.height));
  const isKept = scale === 1 && file.size <= PICTURE_BYTES && PICTURE_TYPES.has(file.type);
  return { name: file.name, picture: isKept ? await dataUrl(file) : drawn(bitmap, scale) };
}

const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });

function drawn(bitmap, scale) {
  const canvas = el("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

/** Return the sent files as elements: pictures, and texts that open. */
export function fileViews(files) {
  return (files ?? []).map(({ name, text, picture }) =>
    picture ? el("img", { class: "picture", src: picture, alt: name, title: name }) : el("details", { class: "file" }, el("summary", {}, name, el("span", { class: "muted" }, ` ${bytes(new Blob([text]).size)}`)), el("pre", { tabindex: "0", role: "group", "aria-label": name }, text)),
  );
}

/**
 * The files of the message that is being written. `changed` is called after each change; `noPictures` returns why none is
 * taken, or nothing.
 */
export class Attachments {
  constructor(changed, noPictures) {
    Object.assign(this, { changed, noPictures });
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
        if (isPicture(file) && this.noPictures()) throw new Error(`${file.name} is a picture, and ${this.noPictures()}.`);
        this.files.push(await (isPicture(file) ? readPicture(file) : readText(file)));
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
      el("span", { class: "chip" }, file.picture ? el("img", { src: file.picture, alt: "" }) : null, el("span", {}, file.name), button("×", () => drop(file), { class: "quiet small", "aria-label": `Remove ${file.name}` })),
    );
    this.element.replaceChildren(...chips, ...refused.map(errorBox));
    this.element.hidden = !this.element.childNodes.length;
    this.changed();
  }
}
