// Handoffs in flight, and where prompts were prefilled.

import { byId, fillRow, keyed, setText, tableRow } from "./dom.js";
import { count, shortId } from "./format.js";

export function startHandoffs() {
  return (state) => {
    const { handoffs, phases } = state.sections.active;
    const open = phases.handoff ?? 0;
    setText(byId("handoff-count"), count(open));
    byId("handoff-empty").hidden = handoffs.length > 0;
    byId("handoffs").querySelector("table").hidden = handoffs.length === 0;
    keyed(
      byId("handoff-body"),
      handoffs,
      (row) => `${row.id} ${row.decode} ${row.attempt}`,
      () => tableRow("code", "", "", "", "number", "number"),
      (node, row) =>
        fillRow(
          node,
          shortId(row.id),
          row.prefill || "–",
          row.decode,
          row.answered ? "rest of KV is read" : "prompt is computed",
          count(row.prompt),
          `${row.age_s.toFixed(1)} s`,
        ),
    );
    setText(byId("placements"), placements(state.sections.placements));
  };
}

/** The sentence on where prompts went since the router started. */
export function placements(counts) {
  const sums = { disaggregated: 0, local: 0 };
  const reasons = [];
  for (const [label, times] of Object.entries(counts)) {
    const [decision, reason] = label.split(" ");
    sums[decision] += times;
    if (decision === "local") reasons.push(`${reason.replaceAll("_", " ")} ${count(times)}`);
  }
  if (!sums.disaggregated && !sums.local) return "";
  const why = reasons.length ? ` (${reasons.join(", ")})` : "";
  return `Since the start: ${count(sums.disaggregated)} prompts to prefill workers, ${count(sums.local)} prefilled where they are decoded${why}.`;
}
