// Requests that have ended, those that are active, and the waterfall of one.

import { byId, el, fillRow, keyed, setAttribute, setText, tableRow } from "./dom.js";
import { clock, count, milliseconds, shortId } from "./format.js";
import { waterfall } from "./waterfall.js";

const SHOWN = 60;
const ENDED = ["Request", "Ended as", "First token", "All", "Prompt", "Output", "Decoded on"];
const ACTIVE = ["Request", "Phase", "Age", "Attempt", "Prompt", "Output", "Worker"];

export function startRequests() {
  const filter = byId("request-filter");
  const hold = byId("request-hold");
  let chosen = null;
  let held = null;
  let last = null;

  const show = (trace) => {
    chosen = trace.id;
    byId("waterfall-view").replaceChildren(...waterfall(trace));
    setText(byId("waterfall-title"), `Where the time of ${shortId(trace.id)} went`);
    if (last) draw(last);
  };

  const draw = (state) => {
    last = state;
    const active = filter.value === "active";
    const source = held ?? state;
    const kept = (trace) => filter.value !== "kept" || trace.kept.length > 0;
    const rows = active ? source.sections.active.requests : source.traces.filter(kept).slice(0, SHOWN);
    drawHead(active ? ACTIVE : ENDED);
    byId("request-empty").hidden = rows.length > 0;
    keyed(
      byId("request-body"),
      rows,
      (row) => (active ? `active ${row.id} ${row.attempt}` : row.id),
      (row) => (active ? tableRow("code", "", "number", "number", "number", "number", "") : endedRow(row, show)),
      (node, row) => (active ? fillActive(node, row) : setAttribute(node, "aria-selected", String(row.id === chosen))),
    );
  };

  filter.addEventListener("change", () => last && draw(last));
  hold.addEventListener("click", () => {
    held = held ? null : last && { sections: { ...last.sections }, traces: last.traces };
    setAttribute(hold, "aria-pressed", String(held !== null));
    if (last) draw(last);
  });
  return draw;
}

function drawHead(names) {
  keyed(
    byId("request-head"),
    names,
    (name) => name,
    (name) => el("th", { scope: "col", class: ["First token", "All", "Age", "Attempt", "Prompt", "Output"].includes(name) ? "number" : null, text: name }),
    () => {},
  );
}

function endedRow(trace, show) {
  const open = el("button", { type: "button", class: "link code", text: shortId(trace.id), title: `Ended request of ${clock(trace.time)}`, onclick: () => show(trace) });
  const tags = trace.kept.map((reason) => el("span", { class: "tag", text: reason }));
  const outcome = el("td", {}, el("span", { class: `outcome ${trace.outcome}`, text: trace.outcome }), ...tags);
  const cached = trace.cached_tokens ? ` (${count(trace.cached_tokens)} cached)` : "";
  const number = (text) => el("td", { class: "number", text });
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, open),
    outcome,
    number(milliseconds(trace.ttft_s === null ? null : 1000 * trace.ttft_s)),
    number(milliseconds(1000 * trace.total_s)),
    number(`${count(trace.prompt_tokens)}${cached}`),
    number(count(trace.output_tokens)),
    el("td", { text: trace.decode_worker || "–" }),
  );
}

function fillActive(node, row) {
  const worker = row.prefill && row.phase === "handoff" ? `${row.prefill} → ${row.decode}` : row.decode || "–";
  fillRow(node, shortId(row.id), row.phase, `${row.age_s.toFixed(1)} s`, count(row.attempt), count(row.prompt), count(row.output), worker);
}
