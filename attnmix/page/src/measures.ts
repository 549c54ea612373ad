// How much of each word comes from others, from which words, and to which it gave, by the chosen measure.

import { headShare, headSources } from "./attention";
import * as run from "./data";
import { checkpoints, data, type Maybe, modelName, type Share, tokensOf } from "./data";
import { percent, points, signed } from "./format";
import { state } from "./state";

const MIDDLE = 0.9; // of the tokens, which the scale of the shades spans

const byHead = () => state.matrix.value === "attention" && state.head.value !== null;
const ofClass = () => state.shade.value in data.importance;
export const hasSign = () => ofClass() || state.change.value;

/** The share of a token that comes from others by the measure of sources; null where it is not known. */
export function othersShare(token: number, layer: number, checkpoint: string): Maybe {
  const own = byHead()
    ? headShare(token, layer, checkpoint, state.head.value!)
    : run.ownShare(token, layer, checkpoint, state.matrix.value);
  return own === null ? null : 1 - own;
}

const minus = (one: Maybe, other: Maybe): Maybe => (one === null || other === null ? null : one - other);
/** What fine-tuning changes of the share that comes from others. */
export const othersChange = (token: number): Maybe => {
  const [before, after] = checkpoints.map((each) => othersShare(token, state.layer.value, each));
  return minus(after ?? null, before);
};

/** What a word is shaded by: share from others, ratio, what fine-tuning changed of it, or its score for the class. */
export function shadeOf(token: number): Maybe {
  const [kind, layer] = [state.shade.value, state.layer.value];
  const [checkpoint, change] = [state.checkpoint.value, state.change.value];
  if (ofClass()) return run.importanceOf(token, kind);
  if (kind === "sources") return change ? othersChange(token) : othersShare(token, layer, checkpoint);
  const ratio = (each: string) => run.ratioOf(token, layer, each, state.method.value);
  return change ? minus(ratio(checkpoints[1]), ratio(checkpoints[0])) : ratio(checkpoint);
}

/** The ends of the scale: of all texts in this layer; of one text's scores for a class, and of a head. */
export function shadeRange(): [number, number] {
  const one = ofClass() || (state.shade.value === "sources" && byHead());
  const tokens = one ? tokensOf(state.document.value) : run.range(run.tokenCount);
  const known = tokens
    .map(shadeOf)
    .filter((each) => each !== null)
    .map((each) => (hasSign() ? Math.abs(each) : each));
  if (known.length === 0) return [0, 0];
  const sorted = Float64Array.from(known).toSorted();
  const at = (share: number) => sorted[Math.round(share * (sorted.length - 1))];
  return hasSign() ? [-at(MIDDLE), at(MIDDLE)] : [at((1 - MIDDLE) / 2), at(1 - (1 - MIDDLE) / 2)];
}

export const shadeText = (value: number) =>
  ofClass() ? signed(value) : state.change.value ? points(value) : percent(value);
export const matrixName = () =>
  `${data.labels.matrices[state.matrix.value ?? ""] ?? ""}${byHead() ? `, head ${state.head.value! + 1}` : ""}`;
/** What the shades stand for. */
export function shadeName(): string {
  if (ofClass()) return `effect on the predicted class (${data.labels.importance[state.shade.value].toLowerCase()})`;
  const change = state.change.value ? "change of the " : "";
  return state.shade.value === "ratio"
    ? `${change}mixing ratio (${data.labels.methods[state.method.value]})`
    : `${change}share from other words (${matrixName()})`;
}
/** What a shade is, in a word or two. */
export const shadeKind = () => (ofClass() ? "effect" : state.shade.value === "ratio" ? "mixing ratio" : "from others");
/** The model that the shades are of. */
export const shownModel = () =>
  ofClass()
    ? modelName(checkpoints.at(-1)!)
    : state.change.value
      ? checkpoints.toReversed().map(modelName).join(" minus ")
      : modelName(state.checkpoint.value);

/** What a token took from each word, itself among them, the most first; null where it is not on the page. */
const took = (token: number, checkpoint = state.checkpoint.value): Share[] | null =>
  byHead()
    ? headSources(token, state.layer.value, checkpoint, state.head.value!)
    : run.sourcesOf(token, state.layer.value, checkpoint, state.matrix.value);

/** The other words that a token took most from; null where they are not on the page. */
export const mainSources = (token: number): Share[] | null =>
  took(token)?.filter((each) => each.token !== token) ?? null;

/** The other words that have a token among their main sources, the most first. */
function gave(token: number, checkpoint = state.checkpoint.value): Share[] {
  const others = tokensOf(run.documentOf[token]).filter((each) => each !== token);
  const shares = others.map((each) => took(each, checkpoint)?.find((source) => source.token === token)?.share ?? 0);
  const given = others.map((each, n) => ({ token: each, share: shares[n] }));
  return given.filter(({ share }) => share > 0).toSorted((a, b) => b.share - a.share);
}

/** What changed between the models' lists, of words that both have, the largest change first. */
function changes(find: typeof took, token: number): Share[] {
  const lists = checkpoints.map((each) => new Map((find(token, each) ?? []).map((one) => [one.token, one.share])));
  const [before, after] = lists;
  return [...after]
    .filter(([each]) => each !== token && before.has(each))
    .map(([each, share]) => ({ token: each, share: share - before.get(each)! }))
    .toSorted((a, b) => Math.abs(b.share) - Math.abs(a.share));
}

/** What a token took from other words and gave to them, in a model or as a change; null where it is not on the page. */
export function exchanged(token: number) {
  const main = mainSources(token);
  if (main === null) return null;
  return state.change.value
    ? { took: changes(took, token), gave: changes(gave, token) }
    : { took: main, gave: gave(token) };
}
