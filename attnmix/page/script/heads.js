// The view Heads: one head, whose lines go from each token to those that it takes from.

import { clean, largestOfRows, matrixHere, namesHere, selectedPosition } from "./chosen.js";
import { data, once } from "./data.js";
import { byId } from "./elements.js";
import { endsOf, linesOf, ownerOf, PALEST, rowHeight, scaleOf, tallest } from "./ends.js";
import { register } from "./panes.js";
import { change, state } from "./state.js";

const linesBox = byId("heads-lines");
const linesCanvas = byId("heads-canvas");
const MOST_LINES = 3000; // drawn at once
const LEVELS = 20; // of how strong a line is
const FAINT = 0.01; // of the strongest, below which a line cannot be seen
const EDGE = 8; // pixels
const HEAD_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const HEAD_STEPS = { ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1 };

/** The strongest entries of a head, the faintest first. */
const strongestOf = once((rows) => {
  const least = FAINT * largestOfRows(rows);
  const found = rows.flatMap((row, i) => [...row.entries()].filter(([, v]) => v > least).map(([j, v]) => [i, j, v]));
  return found.toSorted((a, b) => a[2] - b[2]).slice(-MOST_LINES);
});

/** Where each token's row is, from above; rows that are not there have none. */
function rowsAt(positions, length) {
  const found = new Int32Array(length).fill(-1);
  for (const [n, position] of positions.entries()) found[position] = n;
  return found;
}

function layout({ left, right }, length) {
  const number = Math.max(left.length, right.length);
  const row = rowHeight(number);
  const width = linesBox.clientWidth;
  const names = Math.min(170, Math.round(width * 0.34));
  const top = linesBox.scrollTop;
  const [leftAt, rightAt] = [left, right].map((positions) => rowsAt(positions, length));
  return {
    row,
    width,
    names,
    top,
    number,
    leftAt,
    rightAt,
    height: Math.min(state.printing ? number * row : length * rowHeight(length), tallest()), // on the screen always the same
    y: (place) => (place + 0.5) * row - top,
  };
}

/** Lines of one colour, in as many strokes as there are levels. */
function stroke(context, place, lines, { colour, largest, palest = 0 }) {
  const levels = Array.from({ length: LEVELS }, () => new Path2D());
  const [left, right] = [place.names + EDGE, place.width - place.names - EDGE];
  const bend = (right - left) * 0.4;
  for (const [i, j, value] of lines) {
    if (place.leftAt[i] < 0 || place.rightAt[j] < 0) continue;
    const [from, to] = [place.y(place.leftAt[i]), place.y(place.rightAt[j])];
    if (value < FAINT * largest || Math.max(from, to) < 0 || Math.min(from, to) > place.height) continue;
    const path = levels[Math.min(LEVELS - 1, Math.floor((value / largest) * LEVELS))];
    path.moveTo(left, from);
    path.bezierCurveTo(left + bend, from, right - bend, to, right, to);
  }
  context.strokeStyle = colour;
  for (const [level, path] of levels.entries()) {
    const strength = (level + 1) / LEVELS;
    context.globalAlpha = palest + (1 - palest) * strength;
    context.lineWidth = 0.6 + 3.6 * strength;
    context.stroke(path);
  }
  context.globalAlpha = 1;
}

/** As much of a name as fits. */
function fitted(context, name, width) {
  if (context.measureText(name).width <= width) return name;
  const letters = [...name];
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("")}…`;
}

const nothing = () => 0;

/** The two columns: their tokens, where each starts, its names' edge, and how much of a name is behind it. */
function sidesOf(place, { rows, looked, left, right }) {
  const start = place.width - place.names;
  const takes = looked === null ? nothing : (i) => rows[looked][i];
  const taken = looked === null ? nothing : (i) => (i === looked ? 0 : rows[i][looked]);
  const shade = `rgb(${state.colours.shade})`;
  return [
    { positions: left, x: 0, edge: place.names - 3, align: "right", colour: shade, share: taken },
    { positions: right, x: start, edge: start + 3, align: "left", colour: state.colours.took, share: takes },
  ];
}

/** A column of names; behind each how much it gives to the token that is looked at, or takes from it. */
function drawNames(context, place, column, { names, looked, largest }) {
  const first = Math.floor(place.top / place.row);
  const seen = column.positions.slice(first, Math.ceil((place.top + place.height) / place.row));
  context.textBaseline = "middle";
  context.textAlign = column.align;
  for (const [n, position] of seen.entries()) {
    const y = place.y(first + n);
    context.fillStyle = column.colour;
    context.globalAlpha = 0.45 * Math.min(1, column.share(position) / largest);
    context.fillRect(column.x, y - place.row / 2 + 1, place.names, place.row - 2);
    context.globalAlpha = 1;
    context.font = `${looked === position ? 700 : 400} ${place.row > 20 ? 15 : 13}px ${HEAD_FONT}`;
    context.fillStyle = state.colours.ink;
    context.fillText(fitted(context, names[position], place.names - EDGE), column.edge, y);
    if (looked !== position) continue;
    context.strokeStyle = state.colours.mark;
    context.lineWidth = 2;
    context.strokeRect(column.x + 1, y - place.row / 2 + 1, place.names - 2, place.row - 2);
  }
}

let paintLines = () => {};
let followed = null; // the token that was scrolled to

/** A selected token that cannot be seen is scrolled to, once. */
function followToken(place) {
  const position = selectedPosition();
  byId("heads-rows").style.height = `${Math.max(place.number * place.row - place.height, 0)}px`;
  linesBox.classList.toggle("long", place.number * place.row > place.height);
  if (state.token === followed) return;
  followed = state.token;
  if (position === null) return;
  const y = place.leftAt[position] * place.row;
  if (y < linesBox.scrollTop || y + place.row > linesBox.scrollTop + place.height)
    linesBox.scrollTop = y - place.height / 2;
}

export function drawHeadLines() {
  const rows = matrixHere();
  linesBox.hidden = !rows;
  if (!rows) return;
  const ends = endsOf(rows);
  const [names, looked] = [namesHere(), ownerOf(ends)];
  const largest = scaleOf(rows, looked);
  const { took, shade } = state.colours;
  followToken(layout(ends, rows.length));
  paintLines = () => {
    const place = layout(ends, rows.length);
    const context = clean(linesCanvas, place.width, place.height);
    if (looked === null) stroke(context, place, strongestOf(rows), { colour: `rgb(${shade})`, largest });
    else {
      const { taken, given } = linesOf(rows, looked);
      stroke(context, place, given, { colour: `rgb(${shade})`, largest, palest: PALEST });
      stroke(context, place, taken, { colour: took, largest, palest: PALEST });
    }
    for (const column of sidesOf(place, { rows, looked, ...ends }))
      drawNames(context, place, column, { names, looked, largest });
  };
  paintLines();
}

function tokenAtRow(event) {
  const rows = matrixHere();
  if (!rows) return null;
  const ends = endsOf(rows);
  const place = layout(ends, rows.length);
  const corner = linesCanvas.getBoundingClientRect();
  const side = event.clientX - corner.left < place.width / 2 ? ends.left : ends.right;
  const position = side[Math.floor((event.clientY - corner.top + place.top) / place.row)];
  return position === undefined ? null : data.documents[state.document].start + position;
}

linesBox.addEventListener("scroll", () => requestAnimationFrame(() => paintLines()));
linesCanvas.addEventListener("pointermove", (event) => change({ hovered: tokenAtRow(event) }));
linesCanvas.addEventListener("pointerleave", () => change({ hovered: null }));
linesCanvas.addEventListener("click", (event) => change({ token: tokenAtRow(event) ?? state.token }));
linesBox.addEventListener("keydown", (event) => {
  const { start, length } = data.documents[state.document];
  const position = selectedPosition();
  const next = position === null ? 0 : Math.min(Math.max(position + HEAD_STEPS[event.key], 0), length - 1);
  const token = { Home: start, End: start + length - 1, Escape: null }[event.key];
  if (!(event.key in HEAD_STEPS) && token === undefined) return;
  event.preventDefault();
  change({ token: event.key in HEAD_STEPS ? start + next : token, hovered: null });
});
byId("head-value").addEventListener("change", ({ target }) => change({ headValue: target.value }));

register("heads-lines", () => {
  const [rows, names] = [matrixHere() ?? [], namesHere()];
  const looked = ownerOf(endsOf(rows));
  const lines = looked === null ? strongestOf(rows) : Object.values(linesOf(rows, looked)).flat();
  const seen = lines.filter(([, , value]) => value > 0).toSorted((a, b) => b[2] - a[2]);
  const shown = seen.map(([i, j, value]) => [i, names[i], j, names[j], value]);
  const kind = state.headValue === "weight" ? "attention weight" : "weight times length";
  return { columns: ["position", "token", "takes from position", "takes from token", kind], rows: shown };
});
