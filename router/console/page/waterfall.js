// A request's trace as a waterfall: each phase of the critical path, what was hidden behind it,
// and what followed the first token.

import { el } from "./dom.js";
import { count, milliseconds, plural, shortId } from "./format.js";

/** The rows of a trace: {name, where, begin, took, kind}, times in microseconds. */
export function rowsOf(trace) {
  const rows = [];
  const add = (phases, from, kind) => {
    let at = from;
    for (const [name, took, tokens, where] of phases) {
      const unit = name === "fetch" ? "blocks" : "tokens";
      if (took) rows.push({ name: tokens ? `${name} (${count(tokens)} ${unit})` : name, where, begin: at, took, kind });
      at += took;
    }
  };
  add(trace.path, 0, "path");
  trace.offers.forEach(([begin, , verified, blocks], index) => {
    const took = trace.hidden_us[index]; // the rest is in `after`
    const name = `${plural(blocks, "block")} fetched${took < verified - begin ? " in part" : ""}`;
    if (took) rows.push({ name, where: trace.decode_worker, begin, took, kind: "behind" });
  });
  add(trace.after, trace.after_us, "after");
  return rows;
}

/** The GB/s of a trace's READs, over the time in which at least one offer was being read. */
export function readSpeed(trace) {
  let until = 0;
  let reading = 0;
  for (const [begin, landed] of [...trace.offers].sort((one, other) => one[0] - other[0])) {
    reading += Math.max(0, landed - Math.max(begin, until));
    until = Math.max(until, landed);
  }
  return trace.read_bytes / 1e3 / Math.max(1, reading);
}

const KINDS = { path: "critical path", behind: "hidden behind it", after: "after the first token" };

export function waterfall(trace) {
  const rows = rowsOf(trace);
  const end = Math.max(1, ...rows.map((row) => row.begin + row.took));
  const body = rows.map((row) => {
    const bar = el("span", { class: `bar ${row.kind}` });
    bar.style.marginLeft = `${(100 * row.begin) / end}%`;
    bar.style.width = `${Math.max(0.4, (100 * row.took) / end)}%`;
    return el(
      "tr",
      {},
      el("th", { scope: "row", text: row.name }),
      el("td", { class: "where", text: row.where || "router" }),
      el("td", { class: "number", text: milliseconds(row.took / 1000) }),
      el("td", { class: "track" }, bar, el("span", { class: "hidden", text: KINDS[row.kind] })),
    );
  });
  const facts = [
    `first token ${milliseconds(trace.ttft_s === null ? null : 1000 * trace.ttft_s)}`,
    `${milliseconds(1000 * trace.total_s)} in all`,
    `${count(trace.prompt_tokens)} prompt tokens (${count(trace.cached_tokens)} cached)`,
    `${count(trace.output_tokens)} output tokens`,
    `decoded on ${trace.decode_worker || "no worker"}`,
  ];
  if (trace.reads) {
    const over = trace.transport && ` over ${trace.transport}`;
    facts.push(`${(trace.read_bytes / 1e6).toFixed(1)} MB in ${plural(trace.reads, "READ")}${over} at ${readSpeed(trace).toFixed(2)} GB/s`);
  }
  const head = ["Phase", "Where", "Time"].map((name) =>
    el("th", { scope: "col", class: name === "Time" ? "number" : null, text: name }),
  );
  return [
    el("p", { class: "facts" }, el("strong", { class: `outcome ${trace.outcome}`, text: trace.outcome }), ` ${facts.join(" · ")}`),
    el(
      "ul",
      { class: "legend", "aria-label": "Kinds of bars" },
      ...Object.entries(KINDS).map(([kind, text]) => el("li", {}, el("i", { class: `bar ${kind}` }), text)),
    ),
    el(
      "table",
      { class: "waterfall" },
      el("caption", { class: "hidden", text: `Phases of request ${shortId(trace.id)}` }),
      el("thead", {}, el("tr", {}, ...head, el("th", { scope: "col", text: "From first byte to end" }))),
      el("tbody", {}, ...body),
    ),
  ];
}
