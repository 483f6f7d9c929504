// The list of conversations: newest first, found by a word, renamed, exported and deleted.

import { announce, button, el, errorBox } from "./dom.js";
import { asJson, asMarkdown, download, fileName } from "./export.js";
import { conversations, forget, forgetAll, read, rename, search, titleOf } from "./history.js";
import { iconButton } from "./icons.js";

const MOST_SHOWN = 200;
const OPEN_KEY = "armature.list";
const WIDE = matchMedia("(min-width: 64rem)");

/** `open` is called with a conversation to show, or null for a new one; `forgotten` with the id of one, or null for all. */
export class Sidebar {
  constructor({ open, forgotten }) {
    Object.assign(this, { open, forgotten });
    this.current = null;
    this.asked = 0;
    this.timer = null;
    this.most = MOST_SHOWN;
    this.query = el("input", { type: "search", placeholder: "Search", "aria-label": "Search the conversations", oninput: () => this.refresh() });
    this.list = el("ul", { class: "entries" });
    this.note = el("p", { class: "muted" });
    this.element = el(
      "nav",
      { class: "sidebar", id: "conversations", "aria-label": "Conversations", onkeydown: (event) => this.onKey(event) },
      el("div", { class: "sidebar-head" }, button("New conversation", () => this.choose(null), { class: "primary" }), this.query),
      el("div", { class: "sidebar-list" }, this.list, this.note),
      (this.foot = el("div", { class: "actions" }, button("Export all", () => this.exportAll(), { class: "quiet small" }), button("Delete all", () => this.clear(), { class: "quiet small" }))),
    );
    this.toggle = iconButton("list", "Conversations", () => this.show(this.element.hidden, true), { class: "quiet", "aria-controls": "conversations" });
    this.backdrop = el("div", { class: "backdrop", onclick: () => this.show(false, true) });
    WIDE.addEventListener("change", () => this.arrange());
    this.arrange();
  }

  /** Beside the conversation where there is room, as long as it is not closed; over it elsewhere, if it is opened. */
  arrange() {
    this.show(WIDE.matches && localStorageItem(OPEN_KEY) !== "closed", false);
  }

  show(isShown, byReader) {
    this.element.hidden = !isShown;
    this.backdrop.hidden = !isShown || WIDE.matches;
    this.toggle.setAttribute("aria-expanded", String(isShown));
    this.covered?.toggleAttribute("inert", isShown && !WIDE.matches);
    if (!byReader) return;
    if (WIDE.matches) keepItem(OPEN_KEY, isShown ? "open" : "closed");
    if (isShown) this.query.focus();
    else this.toggle.focus();
  }

  /** Name the element that the list covers where there is little room. */
  over(element) {
    this.covered = element;
  }

  onKey(event) {
    if (event.key !== "Escape" || WIDE.matches) return;
    event.stopPropagation();
    this.show(false, true);
  }

  choose(conversation) {
    if (!WIDE.matches) this.show(false, false);
    this.open(conversation);
  }

  mark(id) {
    this.current = id;
    for (const row of this.list.children) {
      const isCurrent = row.dataset.id === id;
      const entry = row.querySelector(".entry");
      isCurrent ? entry?.setAttribute("aria-current", "true") : entry?.removeAttribute("aria-current");
    }
  }

  /** Show what has changed elsewhere: as soon as the reader is not about to change a row. */
  refreshSoon() {
    this.timer ??= setTimeout(() => ((this.timer = null), this.refresh(true)), 200);
  }

  async refresh(keepsForm = false) {
    const isChanging = () => keepsForm && this.list.querySelector("form, [aria-expanded=true]");
    if (isChanging()) return this.refreshSoon();
    const asked = ++this.asked;
    let found;
    try {
      found = await search(this.query.value);
    } catch (error) {
      this.note.replaceChildren(errorBox(error));
      return;
    }
    if (asked !== this.asked) return; // More was typed meanwhile.
    if (isChanging()) return this.refreshSoon(); // A row was opened meanwhile.
    const focused = this.list.contains(document.activeElement) && document.activeElement.closest("[data-id]")?.dataset.id;
    this.list.replaceChildren(...found.slice(0, this.most).map((each) => this.row(each)));
    if (focused) this.entryOf(focused)?.focus();
    const more = () => ((this.most += MOST_SHOWN), this.refresh());
    if (found.length > this.most) this.note.replaceChildren(button(`Show more of ${found.length}`, more, { class: "quiet small" }));
    else this.note.textContent = found.length ? "Kept in this browser alone." : this.query.value ? "Nothing is found." : "There are none yet. They will be kept in this browser alone.";
    this.foot.hidden = !found.length && !this.query.value;
    this.mark(this.current);
  }

  entryOf(id) {
    return this.list.querySelector(`[data-id="${CSS.escape(id)}"] .entry`);
  }

  row(conversation) {
    const { id, at } = conversation;
    const title = titleOf(conversation);
    const act = (label, work) => button(label, work, { class: "quiet small" });
    const row = el("li", { "data-id": id });
    const actions = el(
      "div",
      { class: "actions", hidden: true },
      act("Rename", () => this.rename(row, id, title)),
      act("Markdown", () => this.export(id, "md")),
      act("JSON", () => this.export(id, "json")),
      act("Delete", () => this.remove(id)),
    );
    const more = button("⋯", () => more.setAttribute("aria-expanded", String(!(actions.hidden = !actions.hidden))), {
      class: "more",
      "aria-expanded": "false",
      "aria-label": `Rename, export or delete ${title}`,
      title: "Rename, export or delete",
    });
    const openIt = async () => this.choose(await read(id));
    row.append(button(title, openIt, { class: "entry", dir: "auto", title: `${title}\n${new Date(at).toLocaleString()}` }), more, actions);
    return row;
  }

  rename(row, id, title) {
    const box = el("input", { "aria-label": "Title", value: title, maxlength: "80", dir: "auto" });
    const done = async (isKept) => {
      if (isKept) await rename(id, box.value);
      await this.refresh();
      this.entryOf(id)?.focus();
    };
    const onsubmit = (event) => (event.preventDefault(), done(true));
    const onkeydown = (event) => event.key === "Escape" && (event.stopPropagation(), done(false));
    row.replaceChildren(el("form", { class: "rename", onsubmit, onkeydown }, box, el("button", { type: "submit", class: "small" }, "Keep")));
    box.select();
  }

  async export(id, kind) {
    const conversation = await read(id);
    if (!conversation) return;
    const name = fileName(titleOf(conversation), kind);
    if (kind === "md") download(name, asMarkdown(conversation), "text/markdown");
    else download(name, asJson([conversation]), "application/json");
    announce(`${name} is saved.`);
  }

  async exportAll() {
    download("conversations.json", asJson(await conversations()), "application/json");
  }

  async remove(id) {
    await forget(id);
    this.forgotten(id);
    await this.refresh();
    this.query.focus();
  }

  /** Ask first. The question stands where no refresh of the list replaces it. */
  clear() {
    const actions = [...this.foot.childNodes];
    const answer = () => (this.foot.replaceChildren(...actions), this.query.focus());
    const sure = button("Yes, delete all", async () => {
      await forgetAll();
      this.forgotten(null);
      this.query.value = "";
      await this.refresh();
      answer();
    }, { class: "danger small" });
    this.foot.replaceChildren("Delete all conversations of this browser?", sure, button("No", answer, { class: "quiet small" }));
    sure.focus();
  }
}

function localStorageItem(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function keepItem(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // The browser keeps nothing for this page.
  }
}
