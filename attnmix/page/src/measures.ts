// How much of each token comes from others, from which, and to which it gave, by the chosen measure.

import * as run from "./data";
import { checkpoints, data, type Maybe, modelName, type Share, tokensOf } from "./data";
import { percent, points, signed } from "./format";
import { ratio, state } from "./state";

const MIDDLE = 0.9; // of the tokens, which the scale of the shades spans

const ofClass = () => state.shade.value in data.importance;
export const hasSign = () => ofClass() || state.change.value;

const sharesOf = (token: number, checkpoint: string) =>
  run.sharesOf(token, state.layer.value, checkpoint, state.matrix.value);
/** The share of a token that comes from others; null where it is not known. */
export function othersShare(token: number, checkpoint = state.checkpoint.value): Maybe {
  const own = sharesOf(token, checkpoint)?.own ?? null;
  return own === null ? null : 1 - own;
}

/** What fine-tuning changes of a measure of a token. */
function changeOf(token: number, measure: (token: number, checkpoint: string) => Maybe): Maybe {
  const [before, after = null] = checkpoints.map((each) => measure(token, each));
  return before === null || after === null ? null : after - before;
}
export const othersChange = (token: number) => changeOf(token, othersShare);

/** What a token is shaded by: share from others, ratio, what fine-tuning changed of it, or its score for the class. */
export function shadeOf(token: number): Maybe {
  if (ofClass()) return run.importanceOf(token, state.shade.value);
  const ratioIn = (each: number, checkpoint: string) => run.ratioOf(each, state.layer.value, checkpoint, ratio.value);
  const measure = state.shade.value === "sources" ? othersShare : ratioIn;
  return state.change.value ? changeOf(token, measure) : measure(token, state.checkpoint.value);
}

/** The ends of the scale: of all texts in this layer, or of one text's scores for a class. */
export function shadeRange(): [number, number] {
  const tokens = ofClass() ? tokensOf(state.document.value) : run.range(run.tokenCount);
  const known = tokens.map(shadeOf).filter((each) => each !== null);
  if (known.length === 0) return [0, 0];
  const sorted = Float64Array.from(known, (each) => (hasSign() ? Math.abs(each) : each)).toSorted();
  const at = (share: number) => sorted[Math.round(share * (sorted.length - 1))];
  return hasSign() ? [-at(MIDDLE), at(MIDDLE)] : [at((1 - MIDDLE) / 2), at(1 - (1 - MIDDLE) / 2)];
}

export const shadeText = (value: number) =>
  ofClass() ? signed(value) : state.change.value ? points(value) : percent(value);
export const matrixName = () => data.labels.matrices[state.matrix.value];
/** What a shade is, in a word or two. */
export const shadeKind = () =>
  ofClass() ? "effect" : state.shade.value === "ratio" ? "mixing ratio" : "share from others";
/** What the shades stand for. */
export function shadeName(): string {
  if (ofClass()) return `effect on the predicted class (${data.labels.importance[state.shade.value].toLowerCase()})`;
  const measure = state.shade.value === "ratio" ? data.labels.methods[ratio.value] : matrixName();
  return `${state.change.value ? "change of the " : ""}${shadeKind()} (${measure})`;
}
/** The model that shares are of, or the models that are compared. */
export const matrixModel = () =>
  state.change.value ? checkpoints.toReversed().map(modelName).join(" minus ") : modelName(state.checkpoint.value);
/** The model that the shades are of. */
export const shownModel = () => (ofClass() ? modelName(checkpoints.at(-1)!) : matrixModel());

/** What a token took from each token, itself among them, the most first; null where it is not on the page. */
const took = (token: number, checkpoint = state.checkpoint.value): Share[] | null =>
  sharesOf(token, checkpoint)?.largest() ?? null;

/** The other tokens that have a token among their main sources, the most first. */
function gave(token: number, checkpoint = state.checkpoint.value): Share[] {
  const others = tokensOf(run.documentOf[token]).filter((each) => each !== token);
  const shareIn = (each: number) => took(each, checkpoint)?.find((source) => source.token === token)?.share ?? 0;
  const given = others.map((each) => ({ token: each, share: shareIn(each) }));
  return given.filter(({ share }) => share > 0).toSorted((a, b) => b.share - a.share);
}

/** What changed between the models' lists, of tokens that both have, the largest change first. */
function changes(find: typeof took, token: number): Share[] {
  const [before, after] = checkpoints.map((each) => find(token, each) ?? []);
  const earlier = new Map(before.map((each) => [each.token, each.share]));
  return after
    .filter((each) => each.token !== token && earlier.has(each.token))
    .map((each) => ({ token: each.token, share: each.share - earlier.get(each.token)! }))
    .toSorted((a, b) => Math.abs(b.share) - Math.abs(a.share));
}

/** What a token took from others and gave to them, in a model or as a change; null where it is not on the page. */
export function exchanged(token: number) {
  const sources = took(token);
  if (sources === null) return null;
  if (state.change.value) return { took: changes(took, token), gave: changes(gave, token) };
  return { took: sources.filter((each) => each.token !== token), gave: gave(token) };
}
