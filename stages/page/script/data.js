// The data of the page, decoded once, and what is looked up in them. Tokens are numbered from 0 over all documents.

import { UNKNOWN, bytes, codes, unpacked, value } from "./decode.js";
import { byId } from "./elements.js";

export const data = await unpacked(byId("data").textContent.trim());
export const { tokens } = data;
export const documentOf = data.documents.flatMap((each, number) => Array(each.length).fill(number));
export const positionOf = (token) => token - data.documents[documentOf[token]].start;
export const CAPTURED = data.captured; // the checkpoint whose vectors are on the maps
export const inOnePlane = (layout) => data.onePlane.includes(layout); // places at two points can be compared

const mapValues = (object, act) => Object.fromEntries(Object.entries(object).map(([key, each]) => [key, act(each)]));
const maps = mapValues(data.maps, (map) => ({ ...map, x: codes(map.x), y: codes(map.y) }));
const ratios = mapValues(data.ratios.values, (byMethod) => mapValues(byMethod, codes));
const cosines = mapValues(data.tokenSteps, codes);
export const layouts = Object.keys(maps);
export const checkpoints = Object.keys(data.labels.checkpoints).filter((name) => name in ratios);

/** The share of a token's vector that comes from other tokens; null where it was not measured or not to be trusted. */
export function ratioOf(token, layer, checkpoint, method) {
  if (layer === 0 || !(checkpoint in ratios)) return null;
  return value(ratios[checkpoint][method][(layer - 1) * tokens.length + token], 0, 1);
}

const largest = new Map();

/** The largest ratio of all tokens and layers, which has the strongest colour. */
export function largestRatio(checkpoint, method) {
  const all = ratios[checkpoint][method];
  if (!largest.has(all)) largest.set(all, all.reduce((most, code) => Math.max(most, value(code, 0, 1)), 0) || 1);
  return largest.get(all);
}

const UNIT = [0, 1];

/** Limits of x and y of a layout. Maps in planes of their own are each scaled to a square. */
export const limits = (layout) => (inOnePlane(layout) ? maps[layout].ranges[0] : [UNIT, UNIT]);

/** Where a token lies on the map of a point; null where it is on none (umap.max_points). */
export function place(layout, point, token) {
  const at = point * tokens.length + token;
  const [x, y] = limits(layout);
  return maps[layout].x[at] === UNKNOWN ? null : [value(maps[layout].x[at], ...x), value(maps[layout].y[at], ...y)];
}

/** The cosine of a token's vector after a step with the layer's input, by layer; none where points were not captured. */
export function cosinesOf(token, step) {
  const all = cosines[step] || [];
  return Array.from({ length: all.length / tokens.length }, (_, i) => value(all[i * tokens.length + token], -1, 1));
}

const decoded = new Map();

/**
 * The largest shares that a token took, its sources in order; null where the text's matrices are not on the page, and
 * empty where the token's row is not to be trusted. `head` is a number or "mean".
 */
export function sourcesOf(token, layer, checkpoint, matrix, head) {
  const { name, start, length } = data.documents[documentOf[token]];
  const matrices = data.contributions[name];
  if (!matrices || matrix === undefined) return null;
  const byHead = matrix === "attention" && head !== "mean";
  const part = matrices[checkpoint][byHead ? "heads" : matrix];
  if (!decoded.has(part)) decoded.set(part, { sources: codes(part.sources), shares: bytes(part.shares) });
  const { sources, shares } = decoded.get(part);
  const row = byHead ? (layer - 1) * part.number + head : layer - 1;
  const from = (row * length + positionOf(token)) * part.keep;
  if (sources[from] === UNKNOWN) return [];
  return Array.from({ length: part.keep }, (_, i) => from + i)
    .map((at) => ({ token: start + sources[at], share: (shares[at] / 255) ** 2 }))
    .filter((each) => each.share > 0);
}
