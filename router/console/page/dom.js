// Small tools for the document. Text is always set as text, never parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`class`, `text`, `on...` are special) and children. */
export function el(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set an element's text, unless it has that text: an unchanged node costs no layout. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/**
 * Make the children of `parent` those of `items`, in their order. Elements are kept by key, so that
 * focus and selection stay while values change.
 */
export function keyed(parent, items, keyOf, create, update) {
  const known = parent.keyedChildren ?? (parent.keyedChildren = new Map());
  const wanted = new Set();
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (wanted.has(key)) continue;
    wanted.add(key);
    let node = known.get(key);
    if (!node) {
      node = create(item);
      known.set(key, node);
    }
    update(node, item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const [key, node] of known) {
    if (wanted.has(key)) continue;
    node.remove();
    known.delete(key);
  }
}

/** A row of a table with one cell for each class name given; the first is the row's header. */
export function tableRow(...classes) {
  const cells = classes.map((name, index) =>
    index ? el("td", { class: name || null }) : el("th", { scope: "row", class: name || null }),
  );
  return el("tr", {}, ...cells);
}

export function fillRow(row, ...texts) {
  texts.forEach((text, index) => text !== null && setText(row.cells[index], text));
}
