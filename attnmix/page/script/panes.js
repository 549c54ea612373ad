// What stands below a pane: its numbers as a table, and the pane as a file, made here and sent nowhere.

import { data } from "./data.js";
import { byId, drawing, element } from "./elements.js";
import { change, show, state } from "./state.js";

const MOST_ROWS = 300; // that a table shows; the csv has all
const SHARPER = 2; // pixels of a PNG for each of the screen
const KEPT = 10_000; // milliseconds that a browser has for saving a file
// Of a drawing's style, what it does not carry itself once it stands alone.
const STYLES = (
  "fill fill-opacity stroke stroke-width stroke-opacity stroke-dasharray stroke-linecap stroke-linejoin opacity " +
  "color font-family font-size font-weight font-style letter-spacing text-anchor dominant-baseline visibility " +
  "display paint-order text-decoration direction"
).split(" ");

const called = (id) => id.replace(/-chart$/, "");

/** Of what is shown: the same choice gives the same name. */
function fileName(id, ending) {
  const parts = [called(id), data.documents[state.document].name, state.checkpoint, `layer-${state.layer}`];
  return `${parts.join("_").replace(/[^\w.-]+/g, "-")}.${ending}`;
}

function save(blob, name) {
  const href = URL.createObjectURL(blob);
  element("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), KEPT);
}

const cell = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
};

const csvOf = ({ columns, rows }) => [columns, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");

// A drawing that stands alone.

function withStyles(original) {
  const copy = original.cloneNode(true);
  const originals = [original, ...original.querySelectorAll("*")];
  for (const [i, each] of [copy, ...copy.querySelectorAll("*")].entries()) {
    const style = getComputedStyle(originals[i]);
    for (const name of STYLES) each.style.setProperty(name, style.getPropertyValue(name));
    each.removeAttribute("class");
  }
  return copy;
}

/** What a pane draws, its layers in order: drawings as they are, canvases as pictures. */
function standingAlone(pane) {
  const box = pane.getBoundingClientRect();
  const parts = pane.matches("svg, canvas") ? [pane] : [...pane.querySelectorAll("svg, canvas")];
  const layers = parts.filter((each) => !each.parentElement.closest("svg"));
  const size = { width: Math.ceil(box.width), height: Math.ceil(box.height) };
  const placed = layers.map((each) => {
    const { left, top, width, height } = each.getBoundingClientRect();
    const at = { x: left - box.left, y: top - box.top, width, height };
    if (each.matches("canvas")) return drawing("image", { ...at, href: each.toDataURL() });
    const copy = withStyles(each);
    for (const [key, number] of Object.entries(at)) copy.setAttribute(key, number);
    return copy;
  });
  const ground = drawing("rect", { width: "100%", height: "100%", fill: state.colours.paper });
  return drawing("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}` }, ground, ...placed);
}

const serialised = (svg) => new XMLSerializer().serializeToString(svg);

async function rasterised(svg) {
  const picture = new Image();
  picture.src = `data:image/svg+xml,${encodeURIComponent(serialised(svg))}`;
  await picture.decode();
  const canvas = element("canvas", {
    width: SHARPER * svg.getAttribute("width"),
    height: SHARPER * svg.getAttribute("height"),
  });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

// The table.

function tableOf({ columns, rows }, id) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const shown = rows.slice(0, MOST_ROWS).map((row) => {
    const cells = row.map((value) => element("td", {}, element("bdi", {}, String(value ?? ""))));
    return element("tr", {}, ...cells);
  });
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...shown));
  const name = `Values of ${called(id)}`;
  const scrolled = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, table);
  const note = `${MOST_ROWS} of ${rows.length} rows; the csv has all.`;
  return rows.length > MOST_ROWS ? [element("p", { class: "small" }, note), scrolled] : [scrolled];
}

const pressed = (label, id, act) => {
  const button = element("button", { type: "button", "aria-label": `${label} of ${called(id)}` }, label);
  button.addEventListener("click", act);
  return button;
};

/**
 * Give the pane whose element has this id its table and its files; once for each pane, before or after it is drawn.
 *
 * `rows()` returns `{columns: [...], rows: [[...], ...]}` of what the pane shows now. It reads `state`, so that an open
 * table follows it. A pane that is no drawing has a `picture()`, an <svg> with its width and height, or null for none.
 */
export function register(id, rows, picture = () => standingAlone(byId(id))) {
  const table = element("div");
  const values = element("details", {}, element("summary", {}, "Values"), table);
  values.addEventListener("toggle", () => change({ opened: { ...state.opened, [id]: values.open } }));
  const files = {
    csv: () => save(new Blob([csvOf(rows())], { type: "text/csv" }), fileName(id, "csv")),
    SVG: () => save(new Blob([serialised(picture())], { type: "image/svg+xml" }), fileName(id, "svg")),
    PNG: async () => save(await rasterised(picture()), fileName(id, "png")),
  };
  const offered = Object.entries(files).filter(([kind]) => kind === "csv" || picture);
  byId(id).after(element("div", { class: "files" }, values, ...offered.map(([kind, act]) => pressed(kind, id, act))));
  show(() => table.replaceChildren(...(state.opened[id] ? tableOf(rows(), id) : [])));
}
