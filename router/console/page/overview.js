// Tiles with the present values, three charts, and the warning that no KV moves.

import { Chart } from "./chart.js";
import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import { count, milliseconds } from "./format.js";

// By outcome of `baton_recent_prefills`: what is a fault where no KV moves.
const REMEDIES = {
  failed: "handoffs fail: the decode workers' logs have “handoff failed”",
  configured: "router.placement is local: set it to auto",
  cheaper: "local prefill costs less: “Explain its placement” in the playground shows the costs",
  alone: "these requests were in steps that hung, and run alone: the router's log has “worker hung”",
  no_prefill_worker: "no prefill worker was linked when they were placed: send requests again",
  incompatible: "run all workers with the same model, dtype, pool settings, processor type and version; during an upgrade, wait until the workers of the other role are replaced too",
  too_large: "prompts do not fit into the prefill workers' pools",
  left: "prefill workers drain or restart",
};

// A decode worker prefills these better by itself: a fleet that gets no others is in order.
const HARMLESS = ["short", "cached"];

export function startOverview() {
  const charts = [
    new Chart(byId("chart-ttft"), {
      title: "Time to first token",
      series: [
        { field: "ttft_p99", label: "p99", kind: "second" },
        { field: "ttft_p50", label: "p50", kind: "first" },
      ],
      format: milliseconds,
      limit: (state) => 1000 * state.objectives.ttft_s,
    }),
    new Chart(byId("chart-itl"), {
      title: "Between tokens",
      series: [
        { field: "itl_p99", label: "p99", kind: "second" },
        { field: "itl_p50", label: "p50", kind: "first" },
      ],
      format: milliseconds,
      limit: (state) => 1000 * state.objectives.itl_s,
    }),
    new Chart(byId("chart-goodput"), {
      title: "Output tokens a second",
      series: [
        { field: "output", label: "all", kind: "all" },
        { field: "goodput", label: "within objectives", kind: "good" },
      ],
      format: count,
    }),
  ];
  return (state) => {
    drawTiles(state);
    drawWarning(state);
    for (const chart of charts) chart.draw(state.points, state.fields, state);
  };
}

function drawTiles(state) {
  const last = state.points.at(-1) ?? [];
  const of = (field) => last[state.fields.indexOf(field)] ?? null;
  const workers = Object.values(state.workers);
  const ready = workers.filter((worker) => worker.state === "ready").length;
  const bad = ready < workers.length ? "bad" : "";
  const blocks = workers.filter((worker) => worker.role === "decode").map((worker) => worker.blocks);
  const sum = (name) => blocks.reduce((total, each) => total + each[name], 0);
  const held = sum("total") ? 1 - (sum("free") + sum("cached")) / sum("total") : 0;
  const tiles = [
    ["Workers ready", `${ready} of ${workers.length}`, bad],
    ["Active requests", count(of("active")), ""],
    ["Requests a second", count(of("ended")), of("failed") > 0 ? "bad" : ""],
    ["Goodput", `${count(of("goodput"))} tok/s`, ""],
    ["First token, p99", milliseconds(of("ttft_p99")), late(of("ttft_p99"), state.objectives.ttft_s)],
    ["Between tokens, p99", milliseconds(of("itl_p99")), late(of("itl_p99"), state.objectives.itl_s)],
    ["Decode KV in use", `${Math.round(100 * held)} %`, held > 0.95 ? "bad" : ""],
  ];
  keyed(
    byId("tiles"),
    tiles,
    ([name]) => name,
    ([name]) => el("div", { class: "tile" }, el("dt", { text: name }), el("dd")),
    (node, [, value, level]) => {
      setText(node.lastElementChild, value);
      setAttribute(node, "data-level", level);
    },
  );
}

function late(milliseconds, objective_s) {
  return objective_s > 0 && milliseconds > 1000 * objective_s ? "bad" : "";
}

/** The fault that kept most prompts from the prefill workers, as `baton doctor` judges: [reason,
 * times], or undefined if KV moved for one, or none needed it. */
export function mainFault({ moved = 0, ...reasons }) {
  if (moved) return undefined;
  const faults = Object.entries(reasons).filter(([reason]) => !HARMLESS.includes(reason));
  return faults.sort((a, b) => b[1] - a[1])[0];
}

/** Warn when prefill workers take work and no KV came from them of late. */
function drawWarning(state) {
  const prefill = Object.values(state.workers).filter(
    (worker) => worker.role === "prefill" && worker.state === "ready",
  );
  const fault = mainFault(state.sections.prefills);
  const node = byId("warning");
  const shown = prefill.length > 0 && fault !== undefined;
  if (node.hidden === shown) node.hidden = !shown;
  if (!shown) return;
  const [reason, times] = fault;
  const all = Object.values(state.sections.prefills).reduce((sum, each) => sum + each, 0);
  const why = REMEDIES[reason] ?? reason;
  // The count changes each second, and is no part of what a screen reader reads out as an alert.
  setText(byId("warning-text"), `No KV comes from the prefill workers: ${why}.`);
  setText(
    byId("warning-count"),
    `Decode workers computed all ${count(all)} prompts of the last five minutes (${reason.replaceAll("_", " ")}: ${count(times)}).`,
  );
}
