// Elements, numbers as text, lines and bars. Text is set as text, never as HTML: names come from callers.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";
function s(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const number = (value) => Math.round(value).toLocaleString("en");
export const percent = (share) => `${Math.round(100 * share)} %`;

export function brief(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
  return value < 10 && value % 1 ? value.toFixed(1) : number(value);
}

export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.round(whole / 60)} min`;
  return whole < 129600 ? `${(whole / 3600).toFixed(1)} h` : `${Math.round(whole / 86400)} d`;
}

// A run has one of eight colours, and the letters beside it: two runs may share a colour.
export function tint(run) {
  let sum = 0;
  for (const letter of run) sum = (sum * 31 + letter.codePointAt(0)) >>> 0;
  return `c${sum % 8}`;
}
export const letters = (run) => run.replace(/^ext:/, "").slice(0, 4);

// One child for each item, kept while its key is there, so that focus and scrolling stay where they are.
export function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = old.get(name);
    if (!node) {
      node = make(item);
      node.dataset.key = name;
    }
    old.delete(name);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
    update(node, item);
  }
  for (const node of old.values()) node.remove();
}

// The content anew, if it has changed.
export function fill(node, signature, ...children) {
  const text = JSON.stringify(signature);
  if (node.dataset.was === text) return;
  node.dataset.was = text;
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null));
}

// lines: [{name, kind, values, now}], values may hold null; now: text, or null when nobody reports it.
export function chart(title, lines, { most, unit, minutes }) {
  const width = 240, height = 56;
  const known = lines.filter((line) => line.now !== null);
  const top = most ?? Math.max(1, ...known.flatMap((line) => line.values.filter((value) => value !== null)));
  const count = Math.max(2, ...known.map((line) => line.values.length));
  const paths = known.filter((line) => most || line.values.some((value) => value)).map((line) => {
    let path = "", pen = false;
    line.values.forEach((value, index) => {
      if (value === null) { pen = false; return; }
      const x = width - ((line.values.length - 1 - index) * width) / (count - 1);
      const y = height - 2 - (Math.min(value, top) / top) * (height - 4);
      path += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${pen ? "" : "h0.01"}`;
      pen = true;
    });
    return s("path", { d: path, class: `line ${line.kind}` });
  });
  const told = lines.map((line) => `${line.name} ${line.now ?? "not reported"}`).join(", ");
  const grid = [0.5].map((at) => s("path", { d: `M0 ${height * at}H${width}`, class: "grid" }));
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}, last ${minutes} minutes: ${told}` }, ...grid, ...paths);
  const key = lines.map((line) => h("li", {}, s("svg", { viewBox: "0 0 18 4", class: "stroke", "aria-hidden": "true" }, s("path", { d: "M0 2h18", class: `line ${line.kind}` })), line.name, " ",
    h("b", { class: line.now === null ? "quiet" : "" }, line.now ?? "not reported")));
  const scale = h("span", { class: "scale", "aria-hidden": true }, h("span", {}, most === 1 ? "100 %" : brief(top)), h("span", {}, "0"));
  return h("figure", {}, h("figcaption", {}, title, unit ? h("small", {}, ` ${unit}`) : null),
    h("div", { class: "plot" }, scale, picture), h("ul", { class: "key" }, key));
}

// parts: [{tokens, kind, text, title}]; widths are shares of `whole`.
export function bar(label, parts, whole) {
  const nodes = parts.filter((part) => part.tokens > 0).map((part) => {
    const piece = h("span", { class: `piece ${part.kind}`, title: part.title, "data-run": part.run }, part.tokens > 0.06 * whole ? (part.text ?? "") : "");
    piece.style.flexGrow = part.tokens / whole;
    return piece;
  });
  return h("div", { class: "bar", role: "img", "aria-label": label }, nodes);
}
