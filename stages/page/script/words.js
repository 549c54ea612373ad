// Tokens as words on the map: which of them there is room for.

import { FONT, PRINTED } from "./charts.js";
import { tokens } from "./data.js";
import { state } from "./state.js";

export const MARGIN = 8; // pixels around the map
export const SIZE = 11; // pixels

const pen = document.createElement("canvas").getContext("2d");
pen.font = `${SIZE}px ${FONT}`;
const widths = new Map();

function widthOf(token) {
  if (!widths.has(token)) widths.set(token, pen.measureText(tokens[token]).width);
  return widths.get(token);
}

/** Pixels for one unit of the map, which is as long upwards as sideways. */
function pixelsPerUnit(chart, ranges) {
  const sizes = state.printing ? [PRINTED.width, PRINTED.tall] : [chart.clientWidth, chart.clientHeight];
  return Math.min(...sizes.map((size, i) => (size - 2 * MARGIN) / Math.abs(ranges[i][1] - ranges[i][0])));
}

/** Those of the shown tokens whose words do not lie on one another, the selected one first. */
export function withRoom(shown, chart, ranges) {
  const scale = pixelsPerUnit(chart, ranges);
  const taken = [];
  const found = new Set();
  for (const { token, at } of shown.toSorted((a, b) => (b.token === state.token) - (a.token === state.token))) {
    const [x, y] = at.map((each) => each * scale);
    const half = widthOf(token) / 2 + 1;
    if (taken.some((other) => Math.abs(x - other.x) < half + other.half && Math.abs(y - other.y) < SIZE)) continue;
    taken.push({ x, y, half });
    found.add(token);
  }
  return found;
}
