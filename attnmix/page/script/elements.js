// Elements of the page, and text for them.

export const byId = (id) => document.getElementById(id);

/** An element with its attributes; children that are strings stay text, whatever they hold. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** The same within a drawing. */
export function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Options of a select, from pairs of value and label. */
export function fill(select, pairs) {
  select.replaceChildren(...pairs.map(([value, label]) => element("option", { value }, label)));
}

/** A scale of colours between the labels of its two ends. */
export function ramp(low, high, colours) {
  const style = `background: linear-gradient(90deg, ${colours.join(", ")})`;
  return [element("span", {}, low), element("span", { class: "ramp", style }), element("span", {}, high)];
}

// The blocks of scripts that are written from right to left.
const RIGHT_TO_LEFT = /[\u0590-\u08FF\uFB1D-\uFDFF\uFE70-\uFEFC\u{10800}-\u{10FFF}\u{1E800}-\u{1EFFF}]/u;

/** Someone's text within a sentence of the page, which it leaves in its order. */
export const isolated = (text) => (RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text);

export const inText = (label) => label[0].toLowerCase() + label.slice(1);
export const percent = (share) => (share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(100 * share)} %`);

/** With a minus as long as a plus. */
export const decimals = (number, digits = 3) => number.toFixed(digits).replace("-", "\u2212");

/** A number with its sign, whether above or below zero. */
export const signed = (number, digits = 3) =>
  `${number > 0 ? "+" : number < 0 ? "\u2212" : ""}${Math.abs(number).toFixed(digits)}`;

// Whatever stops the script before the views are drawn is said on the page.
addEventListener("unhandledrejection", ({ reason }) => {
  if (document.documentElement.dataset.ready) return;
  const note = `The views cannot be shown: ${reason.message}. A browser of 2023 or newer is needed.`;
  document.querySelector("main").prepend(element("p", { class: "note missing" }, note));
});
