// Recommendations of `baton advise --watch`: goodput with one prefill worker moved to decode, now,
// and the reverse; why TTFT and ITL are as they are; what to change; and each change as it was
// simulated.

import { byId, el, fillRow, keyed, setAttribute, setText, tableRow } from "./dom.js";
import { clock, count, milliseconds, plural } from "./format.js";

const WORDS = { good: "all is well", notice: "notice", bad: "to act on" };

export function startAdvice() {
  return (state) => {
    const advice = state.sections.advice;
    byId("advice-empty").hidden = advice !== null;
    byId("advice-view").hidden = advice === null;
    if (advice === null) return;
    setText(
      byId("advice-basis"),
      `At ${clock(advice.time)}, from ${plural(advice.requests, "request")} of ${Math.round(advice.window_s)} s. ` +
        `Simulated and measured times of the fleet as it is differ by ${percent(advice.error)}.`,
    );
    keyed(byId("advice-ratios"), advice.ratios, (each) => String(each.step), ratio, fillRatio);
    keyed(byId("advice-findings"), advice.findings, (each) => each.text, finding, () => {});
    keyed(
      byId("advice-body"),
      advice.alternatives,
      (row) => row.change,
      () => tableRow("", "number", "number", "number", "number", ""),
      fill,
    );
  };
}

function ratio(each) {
  const name = { "-1": "Ratio −1", 0: "Ratio now", 1: "Ratio +1" }[each.step];
  return el("div", { class: each.step ? "ratio" : "ratio now" }, el("dt", { text: name }), el("dd"), el("dd", { class: "note" }));
}

function fillRatio(node, each) {
  const [, value, fleet] = node.children;
  if (each.obstacle) {
    setText(value, "none");
    setText(fleet, each.obstacle);
  } else {
    setText(value, `${count(each.goodput_per_s)}/s (${percent(each.good_share)})`);
    setText(fleet, each.name);
  }
}

function finding(each) {
  return el(
    "li",
    { class: each.level },
    el("span", { class: "mark", role: "img", "aria-label": WORDS[each.level] }),
    el("span", { text: each.text }),
  );
}

function fill(node, row) {
  setAttribute(node, "data-kind", row.kind);
  fillRow(
    node,
    row.change,
    range(row),
    milliseconds(1000 * row.ttft_s),
    milliseconds(1000 * row.ttft_p99_s),
    milliseconds(1000 * row.gap_s),
    row.how.replaceAll("`", ""),
  );
}

function range(row) {
  const share = percent(row.good_share);
  return row.low === null || row.high === null || row.low === row.high ? share : `${share} (${percent(row.low)} to ${percent(row.high)})`;
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}
