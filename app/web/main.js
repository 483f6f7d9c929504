// The frame of the page: which parts suit the served model, the API key, the theme, and a server that is still loading.

import { ApiError, call, getJson, hasKey, setKey, useModel } from "./api.js";
import { announce, button, el, errorBox, field, seconds } from "./dom.js";
import { icon } from "./icons.js";

const THEMES = ["auto", "light", "dark"];
const POLL_SECONDS = 1;
const main = document.getElementById("main");
const lead = document.getElementById("lead"); // buttons of the page that is shown
const pages = new Map(); // by name: the title and, once it was opened, the page
let shown = null;

/** The parts of each kind of model. A part is loaded when it is opened. */
const PARTS = {
  talk: ["Talk", async (info) => (await import("./talk.js")).TalkPage.create(await describeDecoder(info))],
  compare: ["Compare", async (info) => new (await import("./compare.js")).ComparePage(info)],
  infer: ["Infer", async (info) => new (await import("./infer.js")).InferPage(info)],
  machine: ["Machine", async () => new (await import("./machine.js")).MachinePage()],
  now: ["Now", async (info) => new (await import("./now.js")).NowPage(info)],
};
const FIRST = { decoder: "talk", encoder: "compare", program: "infer" };

async function describeDecoder(info) {
  const props = await getJson("props").catch(() => ({}));
  const { name, num_parameters: parameters, max_model_len: context } = info.model;
  return { name, parameters, context, defaults: info.sampling_defaults ?? {}, chats: Boolean(props.chat_template), seesPictures: Boolean(props.modalities?.vision) };
}

// ---- start ------------------------------------------------------------------------------------------------------------

async function start() {
  applyTheme(recall("armature.theme") ?? "auto");
  try {
    const info = await waitUntilReady();
    if (!("version" in info)) return askForKey(hasKey() ? "The key is not known to this server." : "This server needs an API key.");
    open(info);
  } catch (error) {
    if (error.status === 401) return;
    main.replaceChildren(errorBox(error), button("Try again", start));
  }
}

/** Return /info once the server, and the chosen one of several models, is ready; until then show how far it is. */
async function waitUntilReady() {
  let isAsked = false;
  for (;;) {
    let info = null;
    try {
      info = await getJson("info");
    } catch (error) {
      if (!(error instanceof ApiError) || error.status === 401 || error.status === 0) throw error;
    }
    if (info?.stage === "ready") return info;
    if (info?.models) {
      const chosen = info.models.find(({ name }) => name === info.model.name);
      choose(info);
      if (chosen.state === "failed") throw new Error(`${chosen.name} cannot be loaded: ${chosen.stage}`);
      if (chosen.state === "unloaded" && !isAsked) call("tokenize", { body: { prompt: "" } }).catch(() => {});
      isAsked = true;
      main.replaceChildren(loading({ stage: chosen.stage }));
      await new Promise((resolve) => setTimeout(resolve, POLL_SECONDS * 1000));
      continue;
    }
    // The readiness probe answers 503 with the stage until the server is ready.
    const ready = await fetch("readyz", { cache: "no-store" }).then((response) => response.json(), () => ({}));
    main.replaceChildren(loading(ready));
    await new Promise((resolve) => setTimeout(resolve, POLL_SECONDS * 1000));
  }
}

function loading({ stage, progress }) {
  const left = progress?.remaining_seconds;
  return el(
    "div",
    { class: "notice" },
    el("h1", {}, "The model is loading"),
    el("p", {}, progress ? `${progress.phase}: ${progress.percent}%${left ? `, about ${seconds(left)} left` : ""}` : (stage ?? "")),
    el("progress", { max: "100", value: progress?.percent ?? null, "aria-label": "Loading" }),
  );
}

function open(info) {
  const { name, kind, architecture } = info.model;
  document.title = `${name} – Armature`;
  document.getElementById("model").title = architecture ?? "";
  choose(info);
  for (const part of [FIRST[kind], "machine", "now"]) pages.set(part, { title: PARTS[part][0], make: () => PARTS[part][1](info) });
  document.getElementById("tabs").replaceChildren(
    ...[...pages].map(([part, { title }]) => el("a", { href: `#${part}`, id: `tab-${part}` }, title)),
    hasKey() ? "" : el("a", { href: "docs", class: "aside" }, "API"),
  );
  const key = document.getElementById("key");
  key.hidden = !hasKey();
  key.onclick = () => askForKey("Give another key, or none.");
  addEventListener("hashchange", route);
  route();
}

/** Show the name of the model; of several ones, a list to choose from. */
function choose({ model, models }) {
  const place = document.getElementById("model");
  useModel(models ? model.name : null);
  if (!models) return place.replaceChildren(model.name);
  const options = models.map(({ name }) => el("option", { value: name, selected: name === model.name }, name));
  const list = el("select", { "aria-label": "Model" }, options);
  list.onchange = () => location.assign(`?model=${encodeURIComponent(list.value)}`);
  place.replaceChildren(list);
}

async function route() {
  const wanted = location.hash.slice(1);
  const name = pages.has(wanted) ? wanted : [...pages.keys()][0];
  const entry = pages.get(name);
  for (const link of document.querySelectorAll("#tabs a"))
    link.id === `tab-${name}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  shown?.hidden?.();
  shown = null;
  lead.replaceChildren();
  try {
    entry.page ??= await entry.make();
  } catch (error) {
    main.replaceChildren(errorBox(error), button("Try again", route));
    return;
  }
  main.replaceChildren(entry.page.element);
  lead.replaceChildren(...(entry.page.lead ?? []));
  shown = entry.page;
  shown.shown?.();
  announce(`${entry.title} is shown.`);
}

// ---- key --------------------------------------------------------------------------------------------------------------

function askForKey(message) {
  shown?.hidden?.();
  lead.replaceChildren();
  const box = el("input", { type: "password", autocomplete: "off", spellcheck: "false" });
  const use = (event) => {
    event.preventDefault();
    setKey(box.value.trim());
    pages.clear();
    removeEventListener("hashchange", route);
    start();
  };
  const form = el(
    "form",
    { class: "notice", onsubmit: use },
    el("h1", {}, "API key"),
    el("p", { role: "alert" }, message),
    field("Key", box, "It is kept in this tab until you close it, and sent to this server alone."),
    el("button", { type: "submit", class: "primary" }, "Use the key"),
  );
  main.replaceChildren(form);
  box.focus();
}

// The key can be refused at any request, for example after the server was started again with others.
addEventListener("armature:key", ({ detail }) => askForKey(detail));

// ---- theme ------------------------------------------------------------------------------------------------------------

function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function applyTheme(theme) {
  const known = THEMES.includes(theme) ? theme : "auto";
  document.documentElement.dataset.theme = known;
  const themeButton = document.getElementById("theme");
  themeButton.replaceChildren(icon("half"), el("span", { class: "words" }, `Theme: ${known}`));
  themeButton.title = `Theme: ${known}`;
}

document.getElementById("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  applyTheme(next);
  try {
    localStorage.setItem("armature.theme", next);
  } catch {
    // The browser keeps nothing for this page.
  }
});

start();
