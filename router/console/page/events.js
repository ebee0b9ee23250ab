// Faults and migrations as they occur, the newest first.

import { byId, el, keyed } from "./dom.js";
import { clock } from "./format.js";

const WORDS = { good: "recovered", notice: "notice", bad: "fault" };
const SHOWN = 60;

export function startEvents() {
  return (state) => {
    const newest = state.events.slice(-SHOWN).reverse();
    const seen = new Map();
    const withKeys = newest.map((event) => {
      const name = `${event.time} ${event.worker} ${event.text}`;
      seen.set(name, (seen.get(name) ?? 0) + 1);
      return { ...event, key: `${name} ${seen.get(name)}` };
    });
    byId("event-empty").hidden = newest.length > 0;
    byId("event-log").hidden = newest.length === 0;
    keyed(byId("event-list"), withKeys, (event) => event.key, make, () => {});
  };
}

function make(event) {
  return el(
    "li",
    { class: event.level },
    el("time", { text: clock(event.time) }),
    el("span", { class: "mark", role: "img", "aria-label": WORDS[event.level] }),
    el("span", {}, event.worker ? el("strong", { text: `${event.worker} ` }) : null, event.text),
  );
}
