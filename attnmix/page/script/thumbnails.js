// All heads of a text at a glance, and the shown one large: matrices, a row for each token that takes.

import { headsOf, HEADS, someRows } from "./attention.js";
import { clean, largestOfRows, lookedPosition, matrixHere, shownHead } from "./chosen.js";
import { data } from "./data.js";
import { byId, element } from "./elements.js";
import { change, state } from "./state.js";

const PIXELS = 44; // of a thumbnail's side at most
const ROWS = 64; // of which it is made at most
const LARGE = 300;
const TURN = 12; // milliseconds of drawing, until the page is asked what else there is to do
const MOVES_OF_GRID = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
const allBox = byId("heads-all");
const target = byId("heads-matrix");

/** The largest entry of each block of a matrix: of `rows` every so many are there, of columns all. */
function blocks({ rows, every }, side) {
  const { length } = rows[0];
  const largest = largestOfRows(rows);
  const found = new Float32Array(side * side);
  for (const [n, row] of rows.entries()) {
    const from = Math.floor((n * every * side) / length) * side;
    for (let j = 0; j < length; j++) {
      const at = from + Math.floor((j * side) / length);
      found[at] = Math.max(found[at], Math.sqrt(row[j] / largest));
    }
  }
  return found;
}

/** A matrix as a picture of at most `size` pixels; what the mask leaves out is grey. */
function picture(some, size, heads, layer) {
  const { length } = heads;
  const side = Math.min(length, Math.round(size));
  const found = blocks(some, side);
  const colour = state.colours.shade.split(",").map(Number);
  const grey = [128, 128, 128, state.dark ? 80 : 56];
  const image = new ImageData(side, side);
  for (let y = 0; y < side; y++) {
    const [top, bottom] = [Math.floor((y * length) / side), Math.ceil(((y + 1) * length) / side) - 1];
    const first = heads.reach[2 * ((layer - 1) * length + top)];
    const last = heads.reach[2 * ((layer - 1) * length + bottom) + 1];
    for (let x = 0; x < side; x++) {
      const seen = ((x + 1) * length) / side > first && (x * length) / side <= last;
      image.data.set(seen ? [...colour, Math.round(255 * found[y * side + x])] : grey, 4 * (y * side + x));
    }
  }
  return image;
}

export function drawHeadMatrix() {
  const rows = matrixHere();
  target.closest("figure").hidden = !rows;
  if (!rows) return;
  const size = Math.min(target.parentElement.clientWidth, LARGE);
  const context = clean(target, size, size);
  const image = picture({ rows, every: 1 }, size, headsOf(state.document, state.checkpoint), state.layer);
  const small = element("canvas", { width: image.width, height: image.height });
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, size, size);
  const looked = lookedPosition();
  if (looked === null) return;
  const cell = Math.max(size / rows.length, 2);
  const at = (looked * size) / rows.length;
  context.strokeStyle = state.colours.mark;
  context.lineWidth = 1.5;
  context.strokeRect(0.75, at, size - 1.5, cell);
  context.setLineDash([4, 3]);
  context.strokeRect(at, 0.75, cell, size - 1.5);
}

// The thumbnails.

const headLayers = Array.from({ length: data.ratios.layers }, (_, i) => i + 1);
const buttons = headLayers.flatMap((layer) =>
  Array.from({ length: HEADS }, (_, head) => {
    const attributes = { type: "button", "aria-label": `${data.labels.layers[layer]}, head ${head + 1}`, tabindex: -1 };
    const made = element("button", attributes, element("canvas"));
    Object.assign(made.dataset, { layer, head });
    return made;
  }),
);

const numbered = (number) => element("span", { class: "small" }, String(number));

function buildThumbnails() {
  allBox.style.setProperty("--heads", HEADS);
  const heading = [element("span"), ...Array.from({ length: HEADS }, (_, head) => numbered(head + 1))];
  const rows = headLayers.flatMap((layer) => [numbered(layer), ...buttons.slice((layer - 1) * HEADS, layer * HEADS)]);
  allBox.replaceChildren(...heading, ...rows);
}

let latest = 0; // round of drawing

/** Every head of the text, a few at a time, so that nothing waits for them. */
export function drawThumbnails() {
  const heads = headsOf(state.document, state.checkpoint);
  allBox.hidden = !heads;
  if (!heads) return;
  const kind = state.headValue;
  latest += 1;
  const round = latest;
  const every = Math.max(1, Math.floor(heads.length / ROWS));
  const left = [...buttons];
  const drawNext = () => {
    const { dataset, firstChild: canvas } = left.shift();
    const [layer, head] = [Number(dataset.layer), Number(dataset.head)];
    const some = { rows: someRows(heads, { layer, head, kind }, every), every };
    const image = picture(some, PIXELS, heads, layer);
    [canvas.width, canvas.height] = [image.width, image.height];
    canvas.getContext("2d").putImageData(image, 0, 0);
  };
  const go = () => {
    if (round !== latest) return;
    const start = performance.now();
    while (left.length > 0 && (state.printing || performance.now() - start < TURN)) drawNext();
    if (left.length > 0) setTimeout(go);
    else allBox.dataset.drawn = "";
  };
  delete allBox.dataset.drawn;
  go();
}

/** Which one is shown; the one way in with the keyboard. */
export function drawPressed() {
  for (const button of buttons) {
    const shown = Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === shownHead();
    button.setAttribute("aria-pressed", String(shown));
    button.tabIndex = shown ? 0 : -1;
  }
}

buildThumbnails();
allBox.addEventListener("click", ({ target: clicked }) => {
  const found = clicked.closest("button");
  if (found) change({ layer: Number(found.dataset.layer), head: Number(found.dataset.head) });
});
allBox.addEventListener("keydown", (event) => {
  if (!(event.key in MOVES_OF_GRID)) return;
  event.preventDefault();
  const [down, right] = MOVES_OF_GRID[event.key];
  const layer = Math.min(Math.max(state.layer + down, 1), headLayers.length);
  const head = Math.min(Math.max(shownHead() + right, 0), HEADS - 1);
  change({ layer, head });
  buttons[(layer - 1) * HEADS + head].focus();
});
target.addEventListener("click", (event) => {
  const { start, length } = data.documents[state.document];
  const at = Math.floor((event.offsetY / target.clientHeight) * length);
  change({ token: start + Math.min(at, length - 1) });
});
