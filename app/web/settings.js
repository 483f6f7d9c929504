// The settings of one column: system prompt, sampling, a JSON schema, tools, and whether probabilities are wanted.

import { button, el, field } from "./dom.js";
import { SAMPLING } from "./generation.js";

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Return the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** Return the form. `defaults` are the checkpoint's own values; `changed` is called after each change of `settings`. */
export function settingsForm(settings, mode, defaults, changed) {
  const set = (name) => (event) => {
    settings[name] = event.target.type === "checkbox" ? event.target.checked : event.target.value;
    if (settings[name] === "" || settings[name] === false) delete settings[name];
    changed();
  };
  const text = (name, label, rows, placeholder, hint) =>
    field(label, el("textarea", { rows, placeholder, value: settings[name] ?? "", oninput: set(name), spellcheck: "false", dir: "auto" }), hint);
  const numbers = SAMPLING.map(([name, label, min, max, step]) =>
    field(
      label,
      el("input", {
        type: "number",
        min,
        max,
        step: name === "max_tokens" ? "1" : "any",
        inputmode: step < 1 ? "decimal" : "numeric",
        value: settings[name] ?? "",
        placeholder: defaults[name] ?? (name === "max_tokens" ? "no limit" : "default"),
        oninput: set(name),
      }),
    ),
  );
  const example = (name, value, control) =>
    button("Insert an example", () => {
      const box = control.querySelector("textarea");
      box.value = JSON.stringify(value, null, 2);
      box.dispatchEvent(new Event("input"));
    }, { class: "quiet small" });
  const schema = text("schema", "JSON schema", "4", "none", "The answer follows the schema: every token is checked.");
  schema.append(example("schema", EXAMPLE_SCHEMA, schema));
  const tools = text("tools", "Tools", "4", "none", "A JSON list, as in OpenAI's API. Calls are shown; you give their results.");
  tools.append(example("tools", EXAMPLE_TOOLS, tools));
  const probabilities = el("input", { type: "checkbox", checked: Boolean(settings.probabilities), onchange: set("probabilities") });
  const check = el("label", { class: "check" }, probabilities, "Probabilities of tokens");
  return el(
    "div",
    { class: "settings-form" },
    mode === "chat" ? text("system", "System prompt", "3", "none") : null,
    el("div", { class: "numbers" }, numbers),
    text("stop", "Stop strings, one a line", "2", "none"),
    schema,
    mode === "chat" ? tools : null,
    check,
  );
}

/** Return the settings in a few words. */
export function describeSettings(settings) {
  const words = SAMPLING.filter(([name]) => settings[name] !== undefined).map(([name, label]) => `${label.toLowerCase()} ${settings[name]}`);
  if (settings.system) words.unshift("system prompt");
  if (settings.schema) words.push("JSON schema");
  if (settings.tools) words.push("tools");
  if (settings.probabilities) words.push("probabilities");
  return words.join(", ") || "the model's own";
}
