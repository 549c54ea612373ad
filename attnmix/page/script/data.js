// The data of the page, decoded once, and what is looked up in them. Tokens are numbered from 0 over all documents.
// A decoder beside an encoder has a reading of its own: at each position it sees the token before.

import { byId } from "./elements.js";

// What `arrays.py` packed: deflated JSON, and in it arrays of unsigned integers as base64.
const UNKNOWN = 65535; // the code of a value that is not there
const LARGEST = 65534; // the code of the upper limit of a quantised value

async function unpacked(text) {
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** Of base64. */
export function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

const codes = (text) => new Uint16Array(bytes(text).buffer);
const value = (code, low, high) => (code === UNKNOWN ? null : low + (code * (high - low)) / LARGEST);

export const data = await unpacked(byId("data").textContent.trim());
export const documentOf = data.documents.flatMap((each, number) => Array(each.length).fill(number));
export const tokens = [...documentOf.keys()];
export const positionOf = (token) => token - data.documents[documentOf[token]].start;
export const CAPTURED = data.captured; // the checkpoint whose vectors are on the maps
export const readings = data.readings;
export const readingOf = (layer) => readings[Number(layer > (data.encoder ?? Infinity))];
/** What a token is called; beside a decoder, in both readings. */
export const nameOf = (token) => [...new Set(readings.map(({ names }) => names[token]))].join(" / ");
export const inOnePlane = (layout) => data.onePlane.includes(layout); // places at two points can be compared

const mapValues = (object, act) => Object.fromEntries(Object.entries(object).map(([key, each]) => [key, act(each)]));
const maps = mapValues(data.maps, (map) => ({ ...map, x: codes(map.x), y: codes(map.y) }));
const ratios = mapValues(data.ratios.values, (byMethod) => mapValues(byMethod, codes));
const cosines = mapValues(data.tokenSteps, codes);
export const layouts = Object.keys(maps);
export const checkpoints = Object.keys(data.labels.checkpoints).filter((name) => name in ratios);

/** The mixing ratio of a token, a ratio of lengths; null where it was not measured or not to be trusted. */
export function ratioOf(token, layer, checkpoint, method) {
  if (layer === 0 || !(checkpoint in ratios)) return null;
  return value(ratios[checkpoint][method][(layer - 1) * tokens.length + token], 0, 1);
}

/** The mean ratio of a document's tokens; null where none was measured. */
export function meanRatioOf(number, layer, checkpoint, method) {
  const { start, length } = data.documents[number];
  const known = Array.from({ length }, (_, i) => ratioOf(start + i, layer, checkpoint, method)).filter(
    (share) => share !== null,
  );
  return known.length === 0 ? null : known.reduce((sum, share) => sum + share, 0) / known.length;
}

const ofReviews = mapValues(data.reviews.values, (byMethod) => mapValues(byMethod, codes));

/** The mean ratio of each measured review, in the order of their names. */
export function reviewRatiosOf(layer, checkpoint, method) {
  const { length } = data.reviews.names;
  return data.reviews.names.map((_, i) =>
    value(ofReviews[checkpoint][method][(layer - 1) * length + i] ?? UNKNOWN, 0, 1),
  );
}

/** A function that finds its result once for each argument. */
export function once(find) {
  const found = new Map();
  return (key) => found.get(key) ?? found.set(key, find(key)).get(key);
}

const largestOf = once((all) => all.reduce((most, code) => Math.max(most, value(code, 0, 1)), 0) || 1);

/** The largest ratio of all tokens and layers, which has the strongest colour. */
export const largestRatio = (checkpoint, method) => largestOf(ratios[checkpoint][method]);

const UNIT = [0, 1];

/** Limits of x and y of a layout. Maps in planes of their own are each scaled to a square. */
export const limits = (layout) => (inOnePlane(layout) ? maps[layout].ranges[0] : [UNIT, UNIT]);

/** Whether a layout holds a capture point; those of one plane lack points whose vectors are of another width. */
export const holds = (layout, point) => !maps[layout].absent.includes(point);

const ofPoint = once((key) => {
  const [layout, point] = key.split(" ");
  return ["x", "y"].map((axis, i) => {
    const [low, high] = limits(layout)[i];
    const here = maps[layout][axis].subarray(point * tokens.length, (Number(point) + 1) * tokens.length);
    return Float32Array.from(here, (code) => value(code, low, high) ?? Number.NaN);
  });
});

/** Where all tokens lie on the map of a point, `[x, y]` by token; NaN for those on none (umap.max_points). */
export const placesOf = (layout, point) => ofPoint(`${layout} ${point}`);

/** Where a token lies on the map of a point; null where it is on none. */
export function place(layout, point, token) {
  const [x, y] = placesOf(layout, point);
  return Number.isNaN(x[token]) ? null : [x[token], y[token]];
}

const nearest = codes(data.nearest.tokens);

/** A token's nearest others among the vectors of a capture point, in the full space, the nearest first. */
export function nearestTo(token, point) {
  const from = (point * tokens.length + token) * data.nearest.number;
  return [...nearest.subarray(from, from + data.nearest.number)].filter((other) => other !== UNKNOWN);
}

const CELLS = 32; // of a map, each way

const cellOf = (at, sides) =>
  at.map((each, axis) => Math.floor((CELLS * (each - sides[axis][0])) / (sides[axis][1] - sides[axis][0])));

/**
 * The point of a layer, or of a layout without any there of all, on whose map a document's tokens lie in most places
 * that can be told apart.
 */
export function mostToSee(layout, number, layer) {
  const { start, length } = data.documents[number];
  const sides = limits(layout);
  const seen = data.sites.map((_, point) => {
    if (!holds(layout, point)) return -1;
    const places = Array.from({ length }, (_each, i) => place(layout, point, start + i)).filter(Boolean);
    return new Set(places.map((at) => cellOf(at, sides).join())).size;
  });
  const here = seen.map((cells, point) => (data.sites[point].layer === layer ? cells : -1));
  const among = Math.max(...here) < 0 ? seen : here;
  return among.indexOf(Math.max(...among));
}

/** The cosine of a token's vector after a step with the layer's input, by layer; none where points were not captured. */
export function cosinesOf(token, step) {
  const all = cosines[step] || [];
  return Array.from({ length: all.length / tokens.length }, (_, i) => value(all[i * tokens.length + token], -1, 1));
}

const decoded = once((part) => ({
  sources: codes(part.sources),
  shares: bytes(part.shares),
  own: codes(part.own),
}));

/** A text's matrix, and the row of a token in it; null where the text's matrices are not on the page. */
function rowOf(token, layer, checkpoint, matrix) {
  const { name, length } = data.documents[documentOf[token]];
  const matrices = data.contributions[name];
  if (!matrices || matrix === undefined) return null;
  const part = matrices[checkpoint][matrix];
  return { keep: part.keep, ...decoded(part), at: (layer - 1) * length + positionOf(token) };
}

/** A token's own share of what it took; null where it is not on the page or not to be trusted. */
export function ownShareOf(token, layer, checkpoint, matrix) {
  const row = rowOf(token, layer, checkpoint, matrix);
  return row && value(row.own[row.at], 0, 1);
}

/**
 * The largest shares that a token took, its sources in order; null where the text's matrices are not on the page, and
 * empty where the token's row is not to be trusted.
 */
export function sourcesOf(token, layer, checkpoint, matrix) {
  const row = rowOf(token, layer, checkpoint, matrix);
  if (row === null) return null;
  const { sources, shares, keep } = row;
  const { start } = data.documents[documentOf[token]];
  const from = row.at * keep;
  if (sources[from] === UNKNOWN) return [];
  return Array.from({ length: keep }, (_, i) => from + i)
    .map((at) => ({ token: start + sources[at], share: (shares[at] / 255) ** 2 }))
    .filter((each) => each.share > 0);
}

const scores = mapValues(data.importance, ({ values, limit }) => ({ values: codes(values), limit }));

/** A token's score for the predicted class's logit; null where it has none. */
export const importanceOf = (token, name) => value(scores[name].values[token], -scores[name].limit, scores[name].limit);
