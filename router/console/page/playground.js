// The playground: a streamed chat with the time and the log-probability of each token, its
// waterfall, and how its prompt would be placed.

import { byId, el, setText } from "./dom.js";
import { milliseconds, plural } from "./format.js";
import { call, events, refusal } from "./stream.js";
import { TokenView } from "./tokens.js";
import { waterfall } from "./waterfall.js";

const CHAT = "/v1/chat/completions";
const ALTERNATIVES = 5;
const TRACE_TRIES = 10;

export function startPlayground() {
  const view = new TokenView(byId("play-tokens-list"), byId("play-timeline"), byId("play-token"));
  const buttons = { send: byId("play-send"), stop: byId("play-stop") };
  let model = "";
  let abort = null;

  byId("play-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (abort) return;
    abort = new AbortController();
    buttons.send.disabled = true;
    buttons.stop.disabled = false;
    view.clear();
    try {
      await answer(body(model), view, abort.signal);
    } catch (error) {
      setText(byId("play-status"), error.name === "AbortError" ? "Stopped." : error.message);
    } finally {
      abort = null;
      buttons.send.disabled = false;
      buttons.stop.disabled = true;
    }
  });
  buttons.stop.addEventListener("click", () => abort?.abort());
  byId("play-explain").addEventListener("click", () => explain(body(model)));
  return (state) => {
    model = state.model;
  };
}

function body(model) {
  const asked = {
    model,
    messages: [{ role: "user", content: byId("play-prompt").value }],
    max_tokens: byId("play-tokens").valueAsNumber || 96,
    temperature: byId("play-temperature").valueAsNumber || 0,
  };
  const seed = byId("play-seed").valueAsNumber;
  return Number.isNaN(seed) ? asked : { ...asked, seed };
}

async function post(path, asked, signal) {
  const headers = { "content-type": "application/json" };
  const response = await call(path, { method: "POST", headers, body: JSON.stringify(asked), signal });
  if (!response.ok) throw new Error(await refusal(response));
  return response;
}

async function answer(asked, view, signal) {
  const status = byId("play-status");
  setText(status, "Waiting for the first token.");
  const wanted = { ...asked, stream: true, logprobs: true, top_logprobs: ALTERNATIVES };
  const begun = performance.now();
  const response = await post(CHAT, wanted, signal);
  let first = null;
  let reason = "";
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const message = JSON.parse(data);
    if (message.error) throw new Error(message.error.message);
    const choice = message.choices[0];
    if (!choice) continue;
    const tokens = choice.logprobs?.content ?? [];
    if (tokens.length && first === null) {
      first = performance.now() - begun;
      setText(status, "Receiving.");
    }
    for (const token of tokens) view.add(token, performance.now() - begun);
    reason = choice.finish_reason ?? reason;
  }
  const all = performance.now() - begun;
  setText(
    status,
    `${plural(view.length, "token")}, the first after ${milliseconds(first)}, all after ${milliseconds(all)}; ended by ${reason || "nothing"}.`,
  );
  await showTrace(response.headers.get("x-request-id"));
}

/** Show the waterfall of the request, which the router stores as it ends. */
async function showTrace(id) {
  for (let tries = 0; tries < TRACE_TRIES; tries += 1) {
    const response = await call(`/trace/${encodeURIComponent(id)}`);
    if (response.ok) {
      const heading = el("h3", { text: "Where its time went" });
      byId("play-explanation").replaceChildren(heading, ...waterfall(await response.json()));
      return;
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

async function explain(asked) {
  const target = byId("play-explanation");
  try {
    const found = await (await post(`${CHAT}/explain`, asked)).json();
    const [prompt] = found.prompts;
    const costs = prompt.prefill_cost;
    const sentence = `${prompt.decision === "local" ? "Prefilled where it is decoded" : "Prefilled on a prefill worker"} (${prompt.reason.replaceAll("_", " ")}), decoded on ${prompt.decode_worker}. Prefill costs ${costs.here} here and ${costs.remote ?? "has no candidate"} remote, in ${costs.unit}.`;
    target.replaceChildren(
      el("h3", { text: "Its placement" }),
      el("p", { class: "note", text: sentence }),
      costTable("Decode workers", prompt.decode_costs.workers),
      costTable("Prefill workers", prompt.prefill_costs.workers),
    );
  } catch (error) {
    target.replaceChildren(el("p", { class: "error", text: error.message }));
  }
}

function costTable(title, workers) {
  const head = ["Worker", "Cost", "Uncached", "Queued", "Obstacle"];
  const rows = workers.map((worker) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", text: worker.worker_id }),
      ...[worker.cost, worker.uncached_tokens, worker.queued_tokens].map((text) => el("td", { class: "number", text })),
      el("td", { text: worker.obstacle || "–" }),
    ),
  );
  return el(
    "table",
    {},
    el("caption", { text: title }),
    el("thead", {}, el("tr", {}, ...head.map((name, index) => el("th", { scope: "col", class: index && index < 4 ? "number" : null, text: name })))),
    el("tbody", {}, ...rows),
  );
}
