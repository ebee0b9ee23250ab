// The tree of prefixes that recent prompts share, and which workers hold each.

import { byId, el, keyed, setText, tableRow } from "./dom.js";
import { count } from "./format.js";

const CHIPS = 6;

export function startPrefixes() {
  return (state) => {
    const nodes = state.sections.prefixes;
    byId("prefix-empty").hidden = nodes.length > 0;
    byId("prefixes").querySelector("table").hidden = nodes.length === 0;
    const most = Math.max(1, ...nodes.map((node) => node.prompts));
    const path = [];
    const rows = nodes.map((node) => {
      path.length = node.depth;
      path.push(node.id);
      return { ...node, key: path.join(" ") };
    });
    keyed(
      byId("prefix-body"),
      rows,
      (node) => node.key,
      () => tableRow("code", "number", "number", ""),
      (row, node) => draw(row, node, most),
    );
  };
}

function draw(row, node, most) {
  const shown = JSON.stringify([node, most]);
  if (row.shown === shown) return;
  row.shown = shown;
  const [name, blocks, prompts, holders] = row.cells;
  const branch = node.depth ? `${"│ ".repeat(node.depth - 1)}├ ` : "";
  const level = el("span", { class: "hidden", text: `level ${node.depth + 1}: ` });
  name.replaceChildren(level, el("span", { class: "branch", "aria-hidden": "true", text: branch }), node.id);
  setText(blocks, count(node.blocks));
  const meter = el("i", { class: "meter" });
  meter.style.width = `${(100 * node.prompts) / most}%`;
  prompts.replaceChildren(el("span", { class: "metered" }, meter), count(node.prompts));
  const chips = node.holders.slice(0, CHIPS).map((worker) => el("span", { class: "chip", text: worker }));
  if (node.holders.length > CHIPS) chips.push(el("span", { class: "chip", text: `and ${node.holders.length - CHIPS} more` }));
  holders.replaceChildren(...(chips.length ? chips : ["no worker"]));
}
