// Copying. Browsers offer navigator.clipboard to https and localhost alone; elsewhere an element is selected and copied.

import { announce, button, el } from "./dom.js";

const SHOWN_MILLISECONDS = 2500;

/** Copy a text and return whether the browser did it. */
export async function copyText(text) {
  try {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(text);
      return true;
    }
  } catch {
    // Not allowed, for example in a frame: the older way may be.
  }
  return copySelected(text);
}

function copySelected(text) {
  const focused = document.activeElement;
  const box = el("textarea", { class: "hidden", readonly: true, tabindex: "-1", "aria-hidden": "true", value: text });
  document.body.append(box);
  box.select();
  let copied = false;
  try {
    copied = document.execCommand("copy");
  } catch {
    // An old browser without the command.
  }
  box.remove();
  focused?.focus({ preventScroll: true });
  return copied;
}

/** Return a button that copies what `textOf` returns, and says whether that was possible. */
export function copyButton(textOf) {
  let timer = 0;
  const made = button("Copy", async () => {
    const copied = await copyText(textOf());
    made.textContent = copied ? "Copied" : "Not copied: select the text instead";
    announce(copied ? "Copied." : "The browser did not let this page copy. Select the text instead.");
    clearTimeout(timer);
    timer = setTimeout(() => (made.textContent = "Copy"), SHOWN_MILLISECONDS);
  }, { class: "quiet small" });
  return made;
}
