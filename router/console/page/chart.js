// A chart of values over time, as SVG. Its label says in words what it shows.

import { el, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 150;
const MARGIN = { top: 10, right: 6, bottom: 20, left: 46 };
const SHORTEST_S = 120;

/**
 * `series`: [{field, label, kind}], of which kind is also the class of the line and its key;
 * `format` writes a value, `limit` returns an objective to draw, or 0.
 */
export class Chart {
  constructor(figure, { title, series, format, limit = () => 0 }) {
    this.series = series;
    this.format = format;
    this.limit = limit;
    this.title = title;
    this.values = series.map(() => el("span", { class: "value" }));
    const keys = series.map((one, index) =>
      el("span", { class: `key ${one.kind}` }, el("i"), `${one.label} `, this.values[index]),
    );
    this.svg = el("svg:svg", { role: "img", height: HEIGHT });
    this.time = el("span", { class: "time" });
    figure.append(
      el("figcaption", {}, el("strong", { text: title }), ...keys, this.time),
      this.svg,
    );
    this.lines = series.map((one) => el("svg:path", { class: `line ${one.kind}` }));
    this.areas = series.map((one) => el("svg:path", { class: `area ${one.kind}` }));
    this.grid = el("svg:g", { class: "grid", "aria-hidden": "true" });
    this.objective = el("svg:line", { class: "objective" });
    this.cursor = el("svg:line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.svg.append(this.grid, ...this.areas, ...this.lines, this.objective, this.cursor);
    this.hovered = null;
    this.svg.addEventListener("pointermove", (event) => {
      this.hovered = event.offsetX;
      this.readOut();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.hovered = null;
      this.readOut();
    });
    this.width = 400;
    new ResizeObserver(([entry]) => {
      this.width = Math.max(160, entry.contentRect.width);
      if (this.points) this.draw(this.points, this.fields, this.state);
    }).observe(figure);
  }

  draw(points, fields, state) {
    Object.assign(this, { points, fields, state });
    setAttribute(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    setAttribute(this.svg, "width", String(this.width));
    if (!points.length) return;
    const columns = this.series.map((one) => fields.indexOf(one.field));
    const end = points.at(-1)[0];
    this.begin = Math.min(points[0][0], end - SHORTEST_S);
    this.end = end;
    const limit = this.limit(state);
    let highest = 0;
    for (const point of points) {
      for (const column of columns) highest = Math.max(highest, point[column] ?? 0);
    }
    this.top = niceTop(Math.max(highest * 1.05, highest ? 0 : 1, limit && limit < 3 * highest ? limit * 1.1 : 0));
    this.lines.forEach((line, index) => {
      const { path, area } = this.paths(points, columns[index]);
      setAttribute(line, "d", path);
      setAttribute(this.areas[index], "d", area);
    });
    this.drawGrid(limit);
    this.columns = columns;
    this.readOut();
    const last = points.at(-1);
    const words = this.series.map((one, index) => `${one.label} ${this.format(last[columns[index]])}`);
    const minutes = Math.max(1, Math.round((end - points[0][0]) / 60));
    setAttribute(
      this.svg,
      "aria-label",
      `${this.title}, last ${minutes} min: now ${words.join(", ")}; highest ${this.format(highest)}`,
    );
  }

  x(time) {
    const room = this.width - MARGIN.left - MARGIN.right;
    return MARGIN.left + (room * (time - this.begin)) / (this.end - this.begin || 1);
  }

  y(value) {
    const room = HEIGHT - MARGIN.top - MARGIN.bottom;
    return HEIGHT - MARGIN.bottom - (room * Math.min(value, this.top)) / this.top;
  }

  /** The line of a series with gaps where it has no value, and the area below it. */
  paths(points, column) {
    let path = "";
    let area = "";
    let run = [];
    const floor = HEIGHT - MARGIN.bottom;
    const close = () => {
      if (run.length) {
        const line = run.map(([x, y]) => `${x} ${y}`).join("L");
        path += `M${line}`;
        area += `M${run[0][0]} ${floor}L${line}L${run.at(-1)[0]} ${floor}Z`;
      }
      run = [];
    };
    for (const point of points) {
      if (point[column] === null) close();
      else run.push([this.x(point[0]).toFixed(1), this.y(point[column]).toFixed(1)]);
    }
    close();
    return { path, area };
  }

  drawGrid(limit) {
    const marks = [];
    for (const share of [0, 0.5, 1]) {
      const y = this.y(share * this.top);
      marks.push(
        el("svg:line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }),
        el("svg:text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end", text: this.format(share * this.top) }),
      );
    }
    const ends = [
      [this.begin, "start"],
      [this.end, "end"],
    ];
    for (const [time, anchor] of ends) {
      marks.push(el("svg:text", { x: this.x(time), y: HEIGHT - 5, "text-anchor": anchor, text: clock(time) }));
    }
    this.grid.replaceChildren(...marks);
    const shown = limit > 0 && limit <= this.top;
    setAttribute(this.objective, "visibility", shown ? "visible" : "hidden");
    if (!shown) return;
    for (const [name, value] of [["x1", MARGIN.left], ["x2", this.width - MARGIN.right], ["y1", this.y(limit)], ["y2", this.y(limit)]]) {
      setAttribute(this.objective, name, String(value));
    }
  }

  /** Show the values at the pointer, or the last ones. */
  readOut() {
    if (!this.points?.length || !this.columns) return;
    let point = this.points.at(-1);
    if (this.hovered !== null) {
      const distance = (one) => Math.abs(this.x(one[0]) - this.hovered);
      for (const one of this.points) if (distance(one) < distance(point)) point = one;
    }
    this.values.forEach((node, index) => setText(node, this.format(point[this.columns[index]])));
    setText(this.time, this.hovered === null ? "" : clock(point[0]));
    const x = String(this.x(point[0]));
    setAttribute(this.cursor, "x1", x);
    setAttribute(this.cursor, "x2", x);
    setAttribute(this.cursor, "visibility", this.hovered === null ? "hidden" : "visible");
  }
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (step * power >= value) return step * power;
  return value;
}
