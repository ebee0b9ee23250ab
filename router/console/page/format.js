// Numbers as an operator reads them.

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10_000_000) return `${(value / 1e6).toFixed(0)} M`;
  if (value >= 1_000_000) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 10_000) return `${(value / 1e3).toFixed(0)} k`;
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

export function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString("en-GB");
}

export function shortId(id) {
  return id.replace(/^req-/, "").slice(0, 8);
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
