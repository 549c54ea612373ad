// The one measure of a text: how much of each word comes from others, from which words, and to which it gave.

import { headShareOf, headSources } from "./attention.js";
import { checkpoints, data, documentOf, importanceOf, ownShareOf, ratioOf, sourcesOf, tokens } from "./data.js";
import { inText } from "./elements.js";
import { state } from "./state.js";

const MIDDLE = 0.9; // of the tokens, which the scale of the shades spans
export const canDiffer = checkpoints.length === 2;

/** What words can be shaded by, with its name. */
export const shades = [
  ...(data.matrices.length > 0 ? [["measure", "share from others"]] : []),
  ["ratio", "length ratio of others"],
  ...Object.keys(data.importance).map((name) => [name, `for the class: ${inText(data.labels.importance[name])}`]),
];

/** Attention alone is there by head. */
const byHead = () => state.matrix === "attention" && state.head !== "mean";

const ofClass = () => state.shade in data.importance;

/** The share of a token that comes from others by the measure, the rest being its own; null where it is not known. */
export function othersByMeasure(token, layer, checkpoint) {
  const own = byHead()
    ? headShareOf(token, layer, checkpoint, state.head)
    : ownShareOf(token, layer, checkpoint, state.matrix);
  return own === null ? null : 1 - own;
}

const othersOf = (token, layer, checkpoint) =>
  state.shade === "ratio" ? ratioOf(token, layer, checkpoint, state.method) : othersByMeasure(token, layer, checkpoint);

export const minus = (one, other) => (one === null || other === null ? null : one - other);

/** What a token is shaded by: `othersOf`, what fine-tuning changed of it, or its score for the class. */
export function shadeOf(token, checkpoint = state.checkpoint, difference = state.difference) {
  if (ofClass()) return importanceOf(token, state.shade);
  if (!difference) return othersOf(token, state.layer, checkpoint);
  const [before, after] = checkpoints.map((each) => othersOf(token, state.layer, each));
  return minus(after, before);
}

export const isSigned = () => ofClass() || state.difference;

/** The ends of the scale, between which most tokens lie: of all texts in this layer; of one text's scores for a class. */
export function shadeRange() {
  const counted = ofClass() ? tokens.filter((token) => documentOf[token] === state.document) : tokens;
  const known = counted.map((token) => shadeOf(token)).filter((each) => each !== null);
  if (known.length === 0) return [0, 0];
  const sorted = (isSigned() ? known.map(Math.abs) : known).toSorted((a, b) => a - b);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const outside = (1 - MIDDLE) / 2;
  return isSigned() ? [-at(MIDDLE), at(MIDDLE)] : [at(outside), at(1 - outside)];
}

/** By what the words are shaded and their sources listed, as a name within a sentence. */
export function measureName() {
  const head = byHead() ? `, head ${state.head + 1}` : "";
  return `${data.labels.matrices[state.matrix]}${head}`;
}

export const shadeName = () => (state.shade === "ratio" ? data.labels.methods[state.method] : measureName());

/** What a token took from each word, the most first, itself among them; null or empty as `sourcesOf` has it. */
export const tookFrom = (token, checkpoint = state.checkpoint) =>
  byHead()
    ? headSources(token, state.layer, checkpoint, state.head)
    : sourcesOf(token, state.layer, checkpoint, state.matrix);

/** Which of the other words have a token among their kept sources, and with which share, the most first. */
function gaveTo(token, checkpoint = state.checkpoint) {
  const { start, length } = data.documents[documentOf[token]];
  const others = Array.from({ length }, (_, i) => start + i).filter((each) => each !== token);
  return others
    .flatMap((each) => {
      const found = (tookFrom(each, checkpoint) || []).find((source) => source.token === token);
      return found ? [{ token: each, share: found.share }] : [];
    })
    .toSorted((a, b) => b.share - a.share);
}

/** What changed between two lists of shares, of the words that both have, the most first. */
function changes(find, token) {
  const [before, after] = checkpoints.map(
    (each) => new Map((find(token, each) || []).map((one) => [one.token, one.share])),
  );
  return [...after.keys()]
    .filter((each) => each !== token && before.has(each))
    .map((each) => ({ token: each, share: after.get(each) - before.get(each) }))
    .toSorted((a, b) => Math.abs(b.share) - Math.abs(a.share));
}

/** What a token took from others and gave to them, in one model or in what is shown, be that a difference of two. */
export function exchanged(token, checkpoint = null) {
  if (state.difference && checkpoint === null) return { took: changes(tookFrom, token), gave: changes(gaveTo, token) };
  const took = tookFrom(token, checkpoint ?? state.checkpoint) || [];
  return { took: took.filter((each) => each.token !== token), gave: gaveTo(token, checkpoint ?? state.checkpoint) };
}

export const modelName = () =>
  state.difference ? "fine-tuned minus pretrained" : inText(data.labels.checkpoints[state.checkpoint]);
