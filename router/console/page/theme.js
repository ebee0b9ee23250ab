// Light, dark, or as the system prefers. Panels that draw on a canvas listen for a change.

import { byId } from "./dom.js";

const NAME = "baton-theme";
const listeners = [];

export function onThemeChange(listener) {
  listeners.push(listener);
}

export function startTheme() {
  const select = byId("theme");
  select.value = localStorage.getItem(NAME) ?? "auto";
  apply(select.value);
  select.addEventListener("change", () => {
    localStorage.setItem(NAME, select.value);
    apply(select.value);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(select.value));
}

function apply(choice) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = choice === "auto" ? (dark ? "dark" : "light") : choice;
  for (const listener of listeners) listener();
}
