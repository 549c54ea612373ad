// The map's picture: points, words, ways and lines on a canvas, through a zoom.

import { FONT } from "./charts.js";
import { once } from "./data.js";

const SIZE = 11.5; // pixels of a word
const WORD_TALL = 13; // pixels that a word takes
const ABOVE = 8; // pixels between a point and its word
const LOCATOR = { side: 88, edge: 8, from: 1.6 }; // pixels; shown from that zoom on

const pen = document.createElement("canvas").getContext("2d");
pen.font = `${SIZE}px ${FONT}`;
const lengthOf = once((name) => pen.measureText(name).width);

/** A canvas as large as its place, sharp on any screen; its context in CSS pixels. */
export function sized(canvas, width, height, sharper) {
  const [across, down] = [Math.round(width * sharper), Math.round(height * sharper)];
  if (canvas.width !== across || canvas.height !== down) Object.assign(canvas, { width: across, height: down });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.setTransform(sharper, 0, 0, sharper, 0, 0);
  return context;
}

/** Whether a place is in a box of `[left, top, right, bottom]`. */
const isIn = ([x, y], [left, top, right, bottom]) => x >= left && x <= right && y >= top && y <= bottom;

/**
 * The tokens, of these in order, that have room for their words, and how far from it each token's word stands; `at(token)`
 * is where a token lies, in pixels, at a zoom of `k`.
 */
export function withRoom(tokens, at, { nameHere, width, height, selected }, k) {
  const corner = k < LOCATOR.from ? 0 : LOCATOR.edge + LOCATOR.side; // that the whole plane takes
  const taken = new Map(); // by row of words
  const found = new Map();
  for (const token of tokens) {
    const [across, down] = at(token);
    if (!isIn([across, down], [0, 0, width, height])) continue;
    const half = lengthOf(nameHere(token)) / 2 + 2;
    const x = Math.max(Math.min(across, width - half), half);
    const y = down < WORD_TALL + ABOVE ? down + WORD_TALL + 4 : down - ABOVE;
    if (token !== selected && isIn([x - half, y], [0, height - corner, corner, height])) continue;
    const row = Math.floor(y / WORD_TALL);
    const beside = [row - 1, row, row + 1].flatMap((each) => taken.get(each) ?? []);
    if (beside.some((other) => Math.abs(x - other.x) < half + other.half && Math.abs(y - other.y) < WORD_TALL))
      continue;
    if (!taken.has(row)) taken.set(row, []);
    taken.get(row).push({ x, y, half });
    found.set(token, [x - across, y - down]);
  }
  return found;
}

function line(context, places, colour, { width = 1.5, dash = [] } = {}) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.beginPath();
  for (const [x, y] of places) context.lineTo(x, y);
  context.stroke();
  context.setLineDash([]);
}

function dot(context, [x, y], radius, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

function ring(context, [x, y], radius, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.stroke();
}

/** A word with the paper around it, so that it can be read on points. */
function write(context, text, [x, y], colour, { bold = false, paper }) {
  context.font = `${bold ? "700 " : ""}${SIZE}px ${FONT}`;
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.strokeStyle = paper;
  context.strokeText(text, x, y);
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

const wordPictures = new Map(); // pictures of words, as to write one takes longer than to copy it
const MOST_PICTURES = 2000;

/** A word's picture, in the middle of whose width and on whose line at `down` it stands. */
function pictureOf(text, colour, looks, sharper) {
  const key = [text, colour, looks.bold, looks.paper, sharper].join("\n");
  if (!wordPictures.has(key)) {
    if (wordPictures.size >= MOST_PICTURES) wordPictures.clear();
    const picture = document.createElement("canvas");
    const [wide, tall] = [Math.ceil(1.2 * lengthOf(text)) + 8, 2 * WORD_TALL];
    const ink = sized(picture, wide, tall, sharper);
    ink.textAlign = "center";
    write(ink, text, [wide / 2, WORD_TALL + 4], colour, looks);
    wordPictures.set(key, { picture, wide, tall });
  }
  return wordPictures.get(key);
}

const pictures = new WeakMap(); // of clouds, as they were last seen

/** Where the vectors of all points lie; painted once for each zoom, as there may be 100,000. */
function paintCloud(context, { cloud, colours, width, height, sharper }, zoom) {
  if (!cloud) return;
  const as = [zoom.k, zoom.x, zoom.y, sharper, colours.line].join(" ");
  if (pictures.get(cloud)?.as !== as) {
    const picture = pictures.get(cloud)?.picture ?? document.createElement("canvas");
    const ink = sized(picture, width, height, sharper);
    ink.clearRect(0, 0, width, height);
    fillCloud(ink, { cloud, colours, width, height }, zoom);
    pictures.set(cloud, { as, picture });
  }
  context.drawImage(pictures.get(cloud).picture, 0, 0, width, height);
}

function fillCloud(context, { cloud, colours, width, height }, { k, x, y }) {
  context.fillStyle = colours.line;
  const side = cloud.x.length > 20_000 ? 1.5 : 2.2;
  for (let i = 0; i < cloud.x.length; i++) {
    const [across, down] = [k * cloud.x[i] + x, k * cloud.y[i] + y];
    if (across >= 0 && across < width && down >= 0 && down < height) context.fillRect(across, down, side, side);
  }
}

function paintTrail(context, { trail, colours }, at) {
  if (trail.length < 2) return;
  const places = trail.map((each) => at(each.place));
  line(
    context,
    places.filter((_, i) => !trail[i].off),
    colours.mark,
    { width: 1.8 },
  );
  if (trail.at(-1).off) line(context, places.slice(-2), colours.mark, { dash: [4, 3] });
  context.textAlign = "left";
  for (const [i, { end }] of trail.entries()) dot(context, places[i], end ? 3.4 : 2.2, colours.mark);
  const numbered = []; // where the last layers of the way have their numbers, as long as these can be told apart
  for (const [i, { end, layer }] of [...trail.entries()].toReversed()) {
    const [x, y] = places[i];
    if (!end || numbered.some((other) => Math.hypot(x - other[0], y - other[1]) < WORD_TALL)) continue;
    numbered.push([x, y]);
    write(context, layer, [x + 5, y - 4], colours.mark, { paper: colours.paper });
  }
}

function paintPoints(context, { byColour, radius, height, width, selected }, places) {
  let own = null;
  for (const [colour, tokens] of byColour) {
    context.fillStyle = colour;
    context.beginPath();
    for (const token of tokens) {
      if (token === selected) own = colour;
      const [x, y] = places(token);
      if (x < -9 || y < -9 || x > width + 9 || y > height + 9) continue;
      context.moveTo(x + radius, y);
      context.arc(x, y, radius, 0, 2 * Math.PI);
    }
    context.fill();
  }
  if (own !== null) dot(context, places(selected), radius, own); // above those at the same place
}

function paintWords(context, { labelled, nameHere, colours, selected, sharper }, places) {
  const whole = (place) => Math.round(place * sharper) / sharper; // of the screen's pixels, or words would be blurred
  for (const [token, [across, down]] of labelled) {
    const [x, y] = places(token);
    const bold = token === selected;
    const looks = { bold, paper: colours.paper };
    const { picture, wide, tall } = pictureOf(nameHere(token), bold ? colours.mark : colours.ink, looks, sharper);
    const at = [x + across - wide / 2, y + down - WORD_TALL - 4].map(whole);
    context.drawImage(picture, ...at, wide, tall);
  }
}

/** The whole plane in a corner, with what is seen of it. */
function paintLocator(context, scene, { k, x, y }) {
  const { width, height, colours, shown, base, cloud } = scene;
  if (k < LOCATOR.from) return;
  const across = Math.min(width, height);
  const scale = LOCATOR.side / across;
  const [left, top] = [LOCATOR.edge, height - LOCATOR.edge - LOCATOR.side];
  const inside = (px, py) => [left + (px - (width - across) / 2) * scale, top + (py - (height - across) / 2) * scale];
  context.fillStyle = colours.paper;
  context.fillRect(left, top, LOCATOR.side, LOCATOR.side);
  const put = (px, py) => context.fillRect(...inside(px, py), 1.2, 1.2);
  context.fillStyle = colours.edge;
  const step = cloud ? Math.ceil(cloud.x.length / 1500) : 1;
  if (cloud) for (let i = 0; i < cloud.x.length; i += step) put(cloud.x[i], cloud.y[i]);
  context.fillStyle = colours.mark;
  for (const token of shown) put(...base(token));
  context.strokeStyle = colours.edge;
  context.lineWidth = 1;
  context.strokeRect(left, top, LOCATOR.side, LOCATOR.side);
  const clamp = (value, low) => Math.min(Math.max(value, low), low + LOCATOR.side);
  const corner = inside(-x / k, -y / k);
  const other = inside((width - x) / k, (height - y) / k);
  const [x0, y0, x1, y1] = [clamp(corner[0], left), clamp(corner[1], top), clamp(other[0], left), clamp(other[1], top)];
  context.strokeStyle = colours.mark;
  context.lineWidth = 1.6;
  context.strokeRect(x0, y0, Math.max(x1 - x0, 3), Math.max(y1 - y0, 3));
}

/**
 * Paint a scene through a zoom: `at` turns a place without zoom into pixels, `places` gives a token's pixels now.
 */
export function paint(context, scene, zoom, { at, places }) {
  const { width, height, colours, near, selected, hovered, title } = scene;
  context.clearRect(0, 0, width, height);
  paintCloud(context, scene, zoom);
  paintTrail(context, scene, at);
  for (const token of near) line(context, [places(selected), places(token)], colours.took, { dash: [2, 2] });
  paintPoints(context, scene, places);
  paintWords(context, scene, places);
  for (const token of near) ring(context, places(token), scene.radius + 2.5, colours.took, 1.5);
  if (scene.shown.includes(selected)) ring(context, places(selected), scene.radius + 4.5, colours.mark, 2.6);
  if (hovered !== null && scene.shown.includes(hovered)) {
    ring(context, places(hovered), scene.radius + 3, colours.ink, 2);
  }
  paintLocator(context, scene, zoom);
  context.textAlign = "left";
  if (title) write(context, title, [8, 17], colours.ink, { bold: true, paper: colours.paper });
}
