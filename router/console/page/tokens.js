// The tokens of an answer: a list to choose from, a timeline, and the details of one token.

import { el, setAttribute } from "./dom.js";
import { milliseconds } from "./format.js";

const MAX_TOKENS = 4096;

/** A token's text with its line ends to be seen; a token may be a part of a character, or nothing. */
function visible(text) {
  return text.replaceAll("\n", "↵\n") || "▯";
}

export class TokenView {
  constructor(list, timeline, detail) {
    Object.assign(this, { list, timeline, detail });
    list.addEventListener("keydown", (event) => this.move(event));
    list.addEventListener("click", (event) => {
      const index = event.target.dataset?.index;
      if (index !== undefined) this.choose(Number(index));
    });
    list.addEventListener("focus", () => this.chosen < 0 && this.length && this.choose(0));
    this.clear();
  }

  get length() {
    return this.tokens.length;
  }

  clear() {
    this.tokens = [];
    this.chosen = -1;
    this.pending = false;
    this.list.replaceChildren();
    this.list.removeAttribute("aria-activedescendant");
    this.timeline.replaceChildren();
    this.detail.replaceChildren();
    setAttribute(this.timeline, "aria-label", "No token yet");
  }

  /** Add a token of the answer's log-probabilities, received so many milliseconds after the start. */
  add(token, at) {
    if (this.length >= MAX_TOKENS) return;
    const before = this.tokens.at(-1)?.at ?? 0;
    const index = this.length;
    this.tokens.push({ token, at, gap: at - before });
    const option = el("span", { role: "option", id: `token-${index}`, "data-index": index, "aria-selected": "false", text: visible(token.token) });
    option.style.setProperty("--sure", Math.exp(token.logprob).toFixed(3));
    this.list.append(option);
    this.list.scrollTop = this.list.scrollHeight;
    if (!this.pending) {
      this.pending = true;
      requestAnimationFrame(() => this.drawTimeline());
    }
  }

  /** Draw each token's wait as a bar. The first, which has the whole prefill, has its own scale. */
  drawTimeline() {
    this.pending = false;
    if (!this.length) return;
    const gaps = this.tokens.slice(1).map((each) => each.gap);
    const longest = Math.max(1, ...gaps);
    for (let index = this.timeline.children.length; index < this.length; index += 1) {
      this.timeline.append(el("i", { class: index ? null : "first", title: `token ${index + 1}: ${milliseconds(this.tokens[index].gap)}` }));
    }
    [...this.timeline.children].forEach((bar, index) => {
      const share = index ? this.tokens[index].gap / longest : 1;
      bar.style.height = `${Math.max(4, 100 * share)}%`;
    });
    const mean = gaps.length ? gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length : 0;
    setAttribute(
      this.timeline,
      "aria-label",
      `${this.length} tokens: the first after ${milliseconds(this.tokens[0].gap)}, then one every ${milliseconds(mean)}, the longest wait ${milliseconds(gaps.length ? longest : 0)}`,
    );
  }

  move(event) {
    const steps = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -MAX_TOKENS, End: MAX_TOKENS };
    const step = steps[event.key];
    if (step === undefined || !this.length) return;
    event.preventDefault();
    this.choose(Math.min(this.length - 1, Math.max(0, this.chosen + step)));
  }

  choose(index) {
    this.list.children[this.chosen]?.setAttribute("aria-selected", "false");
    this.timeline.children[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    const option = this.list.children[index];
    option.setAttribute("aria-selected", "true");
    option.scrollIntoView({ block: "nearest" });
    this.list.setAttribute("aria-activedescendant", option.id);
    this.timeline.children[index]?.classList.add("chosen");
    this.showDetail(this.tokens[index], index);
  }

  showDetail({ token, gap }, index) {
    const rows = token.top_logprobs.map((each) => {
      const share = Math.exp(each.logprob);
      const bar = el("i", { class: "meter" });
      bar.style.width = `${100 * share}%`;
      return el(
        "tr",
        {},
        el("th", { scope: "row", class: "code", text: JSON.stringify(each.token) }),
        el("td", { class: "number", text: `${(100 * share).toFixed(1)} %` }),
        el("td", { class: "number", text: each.logprob.toFixed(3) }),
        el("td", { class: "metered wide" }, bar),
      );
    });
    const head = ["Token", "Probability", "Logprob"].map((name, at) =>
      el("th", { scope: "col", class: at ? "number" : null, text: name }),
    );
    this.detail.replaceChildren(
      el("p", {}, `Token ${index + 1} `, el("code", { text: JSON.stringify(token.token) }), ` came ${milliseconds(gap)} after ${index ? "the one before" : "the request"}, with probability ${(100 * Math.exp(token.logprob)).toFixed(1)} %.`),
      el(
        "table",
        {},
        el("caption", { class: "hidden", text: "The most likely tokens at this position" }),
        el("thead", {}, el("tr", {}, ...head, el("td"))),
        el("tbody", {}, ...rows),
      ),
    );
  }
}
