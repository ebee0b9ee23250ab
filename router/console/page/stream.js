// Calls to this server with the operator's key, and its stream of states.

const KEY = "baton-key";
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5000;
const SILENCE_MS = 5000; // a message comes every second

export const savedKey = () => sessionStorage.getItem(KEY);
export const saveKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** fetch with the key in its header: a key in a URL would end up in logs and histories. */
export function call(path, options = {}) {
  const headers = { ...options.headers, authorization: `Bearer ${savedKey()}` };
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
}

/** The message of a response that is an error. */
export async function refusal(response) {
  const found = await response.json().catch(() => ({}));
  return found.error?.message ?? `The router answered ${response.status}.`;
}

/** Yield the data of each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) {
        if (line.startsWith("data: ")) yield line.slice(6);
      }
    }
  }
}

/**
 * Follow the stream for ever. `take` gets each message, `report` the state of the connection and why
 * the router refused it, and `refused` is called, and waited for, when the key is not accepted.
 */
export async function follow(take, report, refused) {
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    if (!savedKey()) await refused("");
    const abort = new AbortController();
    let problem = "";
    let watch = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const response = await call("/console/stream", { signal: abort.signal });
      if (response.status === 401) {
        forgetKey();
        await refused("This key is not accepted.");
        continue;
      }
      if (!response.ok) {
        problem = await refusal(response);
        throw new Error(problem);
      }
      for await (const data of events(response)) {
        clearTimeout(watch);
        watch = setTimeout(() => abort.abort(), SILENCE_MS);
        take(JSON.parse(data));
        report("live");
        pause = FIRST_PAUSE_MS;
      }
    } catch (error) {
      console.warn("the stream ended:", error.message);
    } finally {
      clearTimeout(watch);
    }
    report("lost", problem);
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}
