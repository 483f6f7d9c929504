// Infer, for exported programs: a form with a field for each input of the signature, and the outputs.

import { call, getJson } from "./api.js";
import { announce, el, errorBox, field, number, seconds, table } from "./dom.js";

const MOST_SHOWN = 200;
const TOP_LABELS = 5;
const FILLS = { random: "random numbers", zeros: "zeros", ones: "ones", given: "given below" };
const isWhole = (datatype) => /^U?INT/.test(datatype);

export class InferPage {
  constructor(info) {
    this.path = `v2/models/${encodeURIComponent(info.model.name)}`;
    this.form = el("form", { onsubmit: (event) => this.run(event) });
    this.result = el("div");
    this.element = el("div", { class: "page" }, el("h1", {}, "Infer"), this.form, this.result);
    this.inputs = null;
  }

  async shown() {
    if (this.inputs) return;
    try {
      const { inputs, outputs } = await getJson(this.path);
      this.inputs = inputs.map((input) => (input.parameters?.picture ? new PictureForm(input) : new InputForm(input)));
      // The best labels of an output that has some, else its values.
      this.wanted = outputs.map(({ name, parameters }) => (parameters?.labels ? { name, parameters: { classification: Math.min(TOP_LABELS, parameters.labels) } } : { name }));
      const given = outputs.map(({ name, datatype, shape }) => `${name} (${datatype} [${shape.map((size) => (size < 0 ? "any" : size)).join(", ")}])`);
      this.form.replaceChildren(
        el("p", { class: "muted" }, `Outputs: ${given.join(", ")}.`),
        ...this.inputs.map((input) => input.element),
        el("button", { type: "submit", class: "primary" }, "Infer"),
      );
    } catch (error) {
      this.form.replaceChildren(errorBox(error));
    }
  }

  async run(event) {
    event.preventDefault();
    const began = performance.now();
    try {
      const inputs = await Promise.all(this.inputs.map((input) => input.tensor()));
      const { outputs } = await (await call(`${this.path}/infer`, { body: { inputs, outputs: this.wanted } })).json();
      const took = seconds((performance.now() - began) / 1000);
      this.result.replaceChildren(...outputs.map(describeOutput), el("p", { class: "muted" }, `Took ${took}.`));
      announce(`Outputs after ${took}.`);
    } catch (error) {
      this.result.replaceChildren(errorBox(error));
    }
  }
}

/** Fields of one input: its free sizes, and what it is filled with. */
class InputForm {
  constructor({ name, datatype, shape }) {
    Object.assign(this, { name, datatype });
    // Sizes that are free in the signature are 1 in the first place, or 4 later, where 1 is often too few.
    this.sizes = shape.map((size, index) => el("input", { type: "number", min: "1", value: size > 0 ? size : index ? 4 : 1, readonly: size > 0 }));
    this.fill = el("select", { onchange: () => (this.values.parentElement.hidden = this.fill.value !== "given") });
    this.fill.append(...Object.entries(FILLS).map(([value, label]) => el("option", { value }, label)));
    this.most = el("input", { type: "number", value: isWhole(datatype) ? 10 : 1 });
    this.values = el("textarea", { rows: "4", placeholder: "[[1, 2], [3, 4]]" });
    const values = field("Values as JSON", this.values, "A list, nested or flat, in the shape above.");
    values.hidden = true;
    this.element = el(
      "fieldset",
      {},
      el("legend", {}, `${name} – ${datatype}`),
      el("div", { class: "row" }, this.sizes.map((box, index) => field(`Size ${index + 1}`, box)), field("Filled with", this.fill), field("Random below", this.most)),
      values,
    );
  }

  /** Return the tensor for the request. Throws an error if the values are no JSON. */
  tensor() {
    const shape = this.sizes.map((box) => Number(box.value));
    const kind = this.fill.value;
    const tensor = { name: this.name, datatype: this.datatype, shape };
    if (kind === "given") return { ...tensor, data: this.parse() };
    const size = shape.reduce((product, each) => product * each, 1);
    const most = Number(this.most.value);
    const random = () => (isWhole(this.datatype) ? Math.floor(Math.random() * most) : (Math.random() * 2 - 1) * most);
    const value = { zeros: () => 0, ones: () => 1, random }[kind];
    const cast = this.datatype === "BOOL" ? (each) => each >= 0.5 : (each) => each;
    return { ...tensor, data: Array.from({ length: size }, () => cast(value())) };
  }

  parse() {
    try {
      return JSON.parse(this.values.value);
    } catch (error) {
      throw new Error(`The values of ${this.name} are not valid JSON: ${error.message}`);
    }
  }
}

/** The file of an input that takes pictures, and the picture. */
class PictureForm {
  constructor({ name }) {
    this.name = name;
    this.file = el("input", { type: "file", accept: "image/*", required: true, onchange: () => this.show() });
    this.picture = el("img", { class: "picture", alt: "", hidden: true });
    this.element = el("fieldset", {}, el("legend", {}, `${name} – picture`), field("File", this.file), this.picture);
  }

  async show() {
    const [file] = this.file.files;
    this.picture.hidden = !file;
    if (file) Object.assign(this.picture, { src: await dataUrl(file), alt: file.name });
  }

  /** Return the tensor for the request, with the file as base64. */
  async tensor() {
    const url = await dataUrl(this.file.files[0]);
    return { name: this.name, datatype: "BYTES", shape: [1], data: [url.slice(url.indexOf(",") + 1)] };
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(file);
  });
}

/** The best classes of each row, which are strings `value:index:label`. */
function describeClasses({ name, shape, data }) {
  const rows = data.map((text, at) => {
    const [value, index, ...label] = text.split(":");
    return [String(Math.floor(at / shape[1])), label.join(":") || index, number(Number(value))];
  });
  return el("section", {}, el("h2", {}, name), table(`Best labels of ${name}`, ["Row", "Label", "Value"], rows));
}

function describeOutput({ name, datatype, shape, data }) {
  if (datatype === "BYTES") return describeClasses({ name, shape, data });
  const numbers = data.map(Number);
  const total = numbers.reduce((sum, value) => sum + value, 0);
  const least = numbers.reduce((one, two) => Math.min(one, two), Infinity);
  const most = numbers.reduce((one, two) => Math.max(one, two), -Infinity);
  const width = shape.at(-1) || 1;
  const rows = [];
  for (let at = 0; at < Math.min(numbers.length, MOST_SHOWN); at += width) {
    const index = shape.length > 1 ? String(rows.length) : "values";
    rows.push([index, numbers.slice(at, Math.min(at + width, at + 12)).map(number).join("  ") + (width > 12 ? " …" : "")]);
  }
  const figures = numbers.length ? `least ${number(least)}, mean ${number(total / numbers.length)}, most ${number(most)}` : "empty";
  return el(
    "section",
    {},
    el("h2", {}, name),
    el("p", { class: "muted" }, `${datatype} [${shape.join(", ")}]: ${figures}`),
    table(`Values of ${name}`, ["Row", "Values"], rows),
  );
}
