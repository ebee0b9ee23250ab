// The console: follows the router's stream, and gives each panel the state once a message.

import { startAdvice } from "./advice.js";
import { byId, setText } from "./dom.js";
import { startEvents } from "./events.js";
import { startFleets } from "./fleets.js";
import { startHandoffs } from "./handoffs.js";
import { startOverview } from "./overview.js";
import { startPlayground } from "./playground.js";
import { startPrefixes } from "./prefixes.js";
import { startRequests } from "./requests.js";
import { follow, saveKey } from "./stream.js";
import { startTheme } from "./theme.js";

const MAX_POINTS = 600;
const MAX_EVENTS = 200;
const MAX_TRACES = 200;

const state = {
  model: "",
  objectives: { ttft_s: 0, itl_s: 0 },
  fields: [],
  workers: {},
  sections: { active: { phases: {}, requests: [], handoffs: [] }, placements: {}, prefills: {}, prefixes: [], advice: null },
  points: [],
  events: [],
  traces: [],
};

// A panel is a function of the state.
const panels = [];
let pending = false; // a frame is asked for

function take(message) {
  if (message.whole) {
    Object.assign(state, {
      model: message.model,
      objectives: message.objectives,
      fields: message.fields,
      workers: message.workers,
      sections: message.state,
      points: message.points,
      events: message.events,
      traces: message.traces,
    });
  } else {
    for (const [name, row] of Object.entries(message.workers)) {
      if (row === null) delete state.workers[name];
      else state.workers[name] = row;
    }
    Object.assign(state.sections, message.state);
    state.points = [...state.points, ...message.points].slice(-MAX_POINTS);
    state.events = [...state.events, ...message.events].slice(-MAX_EVENTS);
    const known = new Set(state.traces.map((trace) => trace.id));
    const added = message.traces.filter((trace) => !known.has(trace.id));
    state.traces = [...added, ...state.traces].slice(0, MAX_TRACES);
  }
  if (pending) return; // a hidden page draws no frame
  pending = true;
  requestAnimationFrame(draw);
}

function draw() {
  pending = false;
  setText(byId("model"), state.model);
  for (const panel of panels) panel(state);
}

function report(connection, problem) {
  const node = byId("connection");
  if (node.dataset.state !== connection) node.dataset.state = connection;
  setText(node, connection === "live" ? "live" : `${problem || "connection lost"}, trying again`);
}

/** Ask for the key, and resolve once one is given. */
function askForKey(problem) {
  const dialog = byId("key-dialog");
  const form = byId("key-form");
  const input = byId("key-input");
  setText(byId("key-error"), problem);
  if (!dialog.open) dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      const key = input.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) {
        setText(byId("key-error"), "A key has letters, digits and signs of ASCII only.");
        return; // a header with other characters cannot be sent
      }
      saveKey(key);
      input.value = "";
      dialog.close();
      resolve();
    };
  });
}

function startKeyDialog() {
  // Without a key there is nothing to show: Escape does not close it.
  byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
}

startTheme();
startKeyDialog();
panels.push(
  startOverview(),
  startAdvice(),
  startFleets(),
  startHandoffs(),
  startEvents(),
  startRequests(),
  startPrefixes(),
  startPlayground(),
);
follow(take, report, askForKey);
