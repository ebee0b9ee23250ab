// Fleets and workers, each with a map of its blocks, and the same as a table.

import { byId, el, fillRow, keyed, setAttribute, setText, tableRow } from "./dom.js";
import { count, milliseconds, plural } from "./format.js";
import { onThemeChange } from "./theme.js";

const STATES = ["used", "leased", "pinned", "cached", "quarantined", "free"];
const COLUMNS = 25;
const CELLS = 100;
const CELL = 7;
const GAP = 2;
const WIDTH = COLUMNS * (CELL + GAP) - GAP;
const HEIGHT = (CELLS / COLUMNS) * (CELL + GAP) - GAP;
const HEAD = ["Worker", "Role", "State", "Running", "Waiting", "Queued tokens", "Handoffs", "Step", ...STATES];

let colours = {};

export function startFleets() {
  byId("legend").append(
    ...STATES.map((name) => el("li", {}, el("i", { class: `cell ${name}` }), name)),
  );
  byId("fleet-head").append(
    ...HEAD.map((name, index) => el("th", { scope: "col", class: index > 2 ? "number" : null, text: capital(name) })),
  );
  let last = null;
  readColours();
  onThemeChange(() => {
    readColours();
    for (const canvas of document.querySelectorAll("canvas.map")) canvas.drawn = "";
    if (last) draw(last);
  });
  byId("fleet-details").addEventListener("toggle", () => last && drawTable(last));
  return (state) => {
    last = state;
    draw(state);
  };
}

function draw(state) {
  const workers = sorted(state);
  const fleets = ["prefill", "decode"].map((role) => ({
    role,
    workers: workers.filter((worker) => worker.role === role),
  }));
  keyed(byId("fleet-list"), fleets, (fleet) => fleet.role, makeFleet, drawFleet);
  drawTable(state);
}

function sorted(state) {
  return Object.entries(state.workers)
    .map(([id, row]) => ({ id, ...row }))
    .sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
}

function makeFleet(fleet) {
  const name = `fleet-${fleet.role}`;
  return el(
    "section",
    { class: "fleet", "aria-labelledby": name },
    el("h3", { id: name }, `${capital(fleet.role)} `, el("span", { class: "sum" })),
    el("ul", { class: "workers" }),
    el("p", { class: "empty", text: `No ${fleet.role} worker.` }),
  );
}

function drawFleet(node, fleet) {
  const [title, list, empty] = node.children;
  const total = (name) => fleet.workers.reduce((sum, worker) => sum + worker[name], 0);
  const facts = [plural(fleet.workers.length, "worker"), `${count(total("running"))} running`, `${count(total("waiting"))} waiting`, `${count(total("queued_tokens"))} queued tokens`];
  setText(title.querySelector(".sum"), facts.join(" · "));
  setAttribute(list, "data-many", fleet.workers.length > 12 ? "yes" : "no");
  if (empty.hidden !== fleet.workers.length > 0) empty.hidden = fleet.workers.length > 0;
  keyed(list, fleet.workers, (worker) => worker.id, makeWorker, drawWorker);
}

function makeWorker(worker) {
  const canvas = el("canvas", { class: "map", role: "img" });
  return el(
    "li",
    { class: "worker card" },
    el("div", { class: "name" }, el("strong", { text: worker.id }), el("span", { class: "state" })),
    canvas,
    el("div", { class: "load" }),
    el("div", { class: "reason" }),
  );
}

function drawWorker(node, worker) {
  const [name, canvas, load, reason] = node.children;
  setText(name.lastElementChild, worker.state);
  setAttribute(node, "data-state", worker.state);
  const facts = [`${worker.running} running`, `${worker.waiting} waiting`];
  if (worker.handoffs) facts.push(plural(worker.handoffs, "handoff"));
  if (worker.step_ms) facts.push(`step ${milliseconds(worker.step_ms)}`);
  const linked = !["lost", "not linked", "refused"].includes(worker.state);
  setText(load, linked ? facts.join(" · ") : `last report: ${facts.join(" · ")}`);
  const slow = linked && worker.degraded ? `reads ${plural(worker.degraded, "peer")} slowly` : "";
  setText(reason, worker.reason || slow);
  drawMap(canvas, worker);
}

/** The cells of each state: hundredths of the pool, at least one where there is any block. */
export function cellsOf(blocks) {
  const total = blocks.total || 1;
  const cells = Object.fromEntries(
    STATES.map((name) => [name, blocks[name] ? Math.max(1, Math.round((CELLS * blocks[name]) / total)) : 0]),
  );
  let surplus = STATES.reduce((sum, name) => sum + cells[name], 0) - CELLS;
  while (surplus !== 0 && blocks.total) {
    const largest = STATES.reduce((a, b) => (cells[b] > cells[a] ? b : a));
    cells[largest] -= Math.sign(surplus);
    surplus -= Math.sign(surplus);
  }
  return cells;
}

function drawMap(canvas, worker) {
  const cells = cellsOf(worker.blocks);
  const drawn = JSON.stringify([cells, worker.state]);
  if (canvas.drawn === drawn) return;
  canvas.drawn = drawn;
  const words = STATES.filter((name) => worker.blocks[name]).map((name) => `${worker.blocks[name]} ${name}`);
  setAttribute(canvas, "aria-label", `Blocks of ${worker.id}: ${words.join(", ") || "not reported"}`);
  const ratio = Math.max(2, devicePixelRatio);
  canvas.width = WIDTH * ratio;
  canvas.height = HEIGHT * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  let index = 0;
  for (const name of STATES) {
    pen.fillStyle = colours[name];
    for (let left = cells[name]; left > 0; left -= 1, index += 1) {
      const x = (index % COLUMNS) * (CELL + GAP);
      const y = Math.floor(index / COLUMNS) * (CELL + GAP);
      pen.beginPath();
      pen.roundRect(x, y, CELL, CELL, 1.5);
      pen.fill();
    }
  }
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours = Object.fromEntries(STATES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function drawTable(state) {
  if (!byId("fleet-details").open) return;
  const classes = HEAD.map((_, index) => (index > 2 ? "number" : ""));
  keyed(
    byId("fleet-body"),
    sorted(state),
    (worker) => worker.id,
    () => tableRow(...classes),
    (row, worker) =>
      fillRow(
        row, worker.id, worker.role, worker.state, count(worker.running), count(worker.waiting),
        count(worker.queued_tokens), count(worker.handoffs), milliseconds(worker.step_ms),
        ...STATES.map((name) => count(worker.blocks[name])),
      ),
  );
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}
