// How much of each token is its own, what it took from which others, and to which it gave, by the chosen measure.

import { computed } from "@preact/signals";
import * as run from "./data";
import { checkpoints, data, layers, type Maybe, modelName, OWN_SHARE, type Share, tokensOf } from "./data";
import { effectLimit } from "./effects";
import { inPoints, percent, points, signed, wholePercent } from "./format";
import { matrix, state } from "./state";

export const CHANGE = "change"; // stands for a model where values are what fine-tuning changed
/** The models that the picture shows, one above the other. */
export const shownModels = computed(() => (state.change.value ? [CHANGE] : checkpoints));
/** The model of the words and lists. */
export const wordsModel = computed(() => (state.change.value ? CHANGE : state.checkpoint.value));

/** The models that stand in the picture: of two texts that are compared, one. */
export const drawnModels = computed(() => (state.compare.value === null ? shownModels.value : [wordsModel.value]));

const ofClass = () => state.effect.value !== "";
const isOwnShare = () => state.share.value === OWN_SHARE;
const isRatio = () => !isOwnShare() && !data.matrices.includes(state.share.value);

const sharesOf = (token: number, layer: number, checkpoint: string) =>
  run.sharesOf(token, layer, checkpoint, matrix.value);
/** The own share of a token by the matrix of its sources; null where it is not known. */
export const ownPart = (token: number, layer: number, checkpoint: string): Maybe =>
  sharesOf(token, layer, checkpoint)?.own ?? null;

/** What fine-tuning changes of a measure. */
function changeOf(measure: (checkpoint: string) => Maybe): Maybe {
  const [before, after = null] = checkpoints.map(measure);
  return before === null || after === null ? null : after - before;
}

/** The chosen measure of a token after a layer: own share, mixing ratio, or what fine-tuning changed of it. */
export function valueOf(token: number, layer: number, model: string): Maybe {
  const measure = (checkpoint: string) =>
    isRatio() || isOwnShare()
      ? run.ratioOf(token, layer, checkpoint, state.share.value)
      : ownPart(token, layer, checkpoint);
  return model === CHANGE ? changeOf(measure) : measure(model);
}

export type Change = { token: number; layer: number; value: number };
/** The layer of each token where fine-tuning changed the measure most, the largest changes first; none in one model. */
export const largestChanges = computed((): Change[] => {
  const inLayers = (token: number) =>
    layers.flatMap((layer): Change[] => {
      const value = valueOf(token, layer, CHANGE);
      return value === null ? [] : [{ token, layer, value }];
    });
  const largest = (all: Change[]) => all.toSorted((a, b) => Math.abs(b.value) - Math.abs(a.value));
  if (checkpoints.length < 2) return [];
  return largest(tokensOf(state.document.value).flatMap((token) => largest(inLayers(token)).slice(0, 1)));
});

/** What a word is shaded by: the chosen measure in the chosen layer, or its effect on the predicted class. */
export const wordValue = (token: number): Maybe =>
  ofClass() ? run.importanceOf(token, state.effect.value) : valueOf(token, state.layer.value, wordsModel.value);

/** The ends of the scale of shares: 0 and 100 %, or, stretched, those of the chosen text in all layers and models. */
export const shareRange = computed((): [low: number, high: number] => {
  if (!state.stretch.value) return [state.change.value ? -1 : 0, 1];
  const texts = [state.document.value, state.compare.value].filter((text) => text !== null);
  const tokens = texts.flatMap(tokensOf);
  const values = drawnModels.value.flatMap((model) =>
    layers.flatMap((layer) => tokens.map((token) => valueOf(token, layer, model))),
  );
  const known = values.filter((each) => each !== null);
  if (known.length === 0) return [0, 1];
  const [low, high] = known.reduce(([least, most], each) => [Math.min(least, each), Math.max(most, each)], [1, -1]);
  const limit = Math.max(-low, high);
  return state.change.value ? [-limit, limit] : [low, high];
});
/** The ends of the words' scale; effects on the class have a scale of each text. */
export const wordRange = computed((): [low: number, high: number] => {
  if (!ofClass()) return shareRange.value;
  const limit = effectLimit(state.document.value, state.effect.value, state.stretch.value);
  return [-limit, limit];
});

/** Where a value lies on a scale: from 0 to 1, or from -1 to 1 on one that has a sign. */
export const placeOn = ([low, high]: [number, number], value: number) =>
  low < 0 ? value / high : high > low ? (value - low) / (high - low) : 0;

export const shareText = (value: number) => (state.change.value ? points(value) : percent(value));
/** An end of the scale; the unit of changes follows both ends. */
export const endText = (value: number) => {
  if (state.change.value) return inPoints(value);
  return state.stretch.value ? percent(value) : wholePercent(value);
};
export const scaleUnit = () => (state.change.value && !ofClass() ? "points: " : "");
/** An effect, with more digits on the scale of a text whose effects are small. */
const effectInLogits = (value: number) => signed(value, wordRange.value[1] < 1 ? 3 : 2);
export const wordEndText = (value: number) => (ofClass() ? effectInLogits(value) : endText(value));
export const wordText = (value: number) => (ofClass() ? effectInLogits(value) : shareText(value));
export const matrixName = () => data.labels.matrices[matrix.value];
/** The name of the matrix whose sources are shown beside a ratio; an empty text without matrices. */
export const byMatrix = () =>
  (isRatio() || isOwnShare()) && data.matrices.length > 0 ? `, by ${matrixName().replace(/^Exact/, "exact")}` : "";
/** What a share is, in a word or two. */
export const shareKind = () => (isRatio() ? "mixing ratio" : "own share");
/** The beginning of a sentence that ends with shares, or with changes of shares. */
export const shareStatement = (kind = shareKind()) =>
  state.change.value ? `${data.wording.change} changes the ${kind} by` : `the ${kind} is`;
export const wordKind = () => (ofClass() ? "effect" : shareKind());
/** The chosen measure. */
export const measureName = () =>
  isOwnShare() ? "by exchange" : (data.labels.methods[state.share.value] ?? matrixName());
/** The matrix of the sources, within a sentence. */
export const sourcesName = () => (data.matrices.length > 0 ? matrixName().replace(/^Exact/, "exact") : "");
/** What the shades of the picture stand for. */
export const shareName = () => `${state.change.value ? "change of the " : ""}${shareKind()} (${measureName()})`;
/** What the words' shades stand for. */
export const wordName = () =>
  ofClass()
    ? `effect on the predicted class, in logits (${data.labels.importance[state.effect.value].toLowerCase()})`
    : shareName();
/** Whether the chosen measure describes one layer, and not all layers since the input. */
export const isOfOneLayer = () => !isOwnShare() && sourcesIn.value !== "input";
/** The model that shares are of, or the models that are compared. */
export const matrixModel = () =>
  state.change.value ? checkpoints.toReversed().map(modelName).join(" minus ") : modelName(state.checkpoint.value);
/** The model that the words' shades are of. */
export const shownModel = () => (ofClass() ? modelName(checkpoints.at(-1)!) : matrixModel());

/** What a token took from each token, itself among them, the most first; null where it is not on the page. */
const took = (token: number, checkpoint: string): Share[] | null =>
  sharesOf(token, state.layer.value, checkpoint)?.largest() ?? null;

/** The other tokens that have a token among their main sources, the most first. */
function gave(token: number, checkpoint: string): Share[] {
  const others = tokensOf(run.documentOf[token]).filter((each) => each !== token);
  const shareIn = (each: number) => took(each, checkpoint)?.find((source) => source.token === token)?.share ?? 0;
  const given = others.map((each) => ({ token: each, share: shareIn(each) }));
  return given.filter(({ share }) => share > 0).toSorted((a, b) => b.share - a.share);
}

const changesOf = (token: number) => run.changesOf(token, state.layer.value, checkpoints, matrix.value);
const largestFirst = (changes: Share[]) => changes.toSorted((a, b) => Math.abs(b.share) - Math.abs(a.share));

/** The largest changes of what a token took: as many as it has largest sources, of all tokens of the text. */
const takenChanges = (token: number): Share[] => largestFirst(changesOf(token)).slice(0, data.sourcesKept);

/** The changes of what a token gave to others, of those that have it among their main sources, the largest first. */
function givenChanges(token: number): Share[] {
  const others = tokensOf(run.documentOf[token]).filter((each) => each !== token);
  const given = others.flatMap((each) =>
    changesOf(each)
      .filter((source) => source.token === token)
      .map(({ share }) => ({ token: each, share })),
  );
  return largestFirst(given);
}

/** What a token took from others and gave to them, in a model or as a change; null where it is not on the page. */
export function exchanged(token: number) {
  const sources = took(token, state.checkpoint.value);
  if (sources === null) return null;
  if (state.change.value) return { took: takenChanges(token), gave: givenChanges(token) };
  return { took: sources.filter((each) => each.token !== token), gave: gave(token, state.checkpoint.value) };
}

/** A line from a token after a layer to a source of it, after a layer below or in the input. */
export type Flow = { layer: number; below: number; from: number; to: number; share: number };
/** How the chosen measure names sources: in the input, in the layer below, or, as a ratio does, none. */
export const sourcesIn = computed((): "input" | "layer" | null => {
  if (isRatio()) return null;
  if (data.matrices.length === 0) return null;
  return data.sinceInput.includes(matrix.value) ? "input" : "layer";
});

/** The sources of a token's vector by the chosen measure, the most first; none by a ratio. */
export const sourcesOf = (token: number, layer: number, checkpoint: string): Share[] =>
  sourcesIn.value === null ? [] : (sharesOf(token, layer, checkpoint)?.largest() ?? []);

/** What the input is of a token's vector, and the lines there: those of shares of the vector from `least` on. */
export function originsOf(token: number, layer: number, checkpoint: string, least: number) {
  if (sourcesIn.value === "layer") return throughLayers(token, layer, checkpoint, least);
  const input = sourcesOf(token, layer, checkpoint);
  const large = input.filter(({ share }) => share >= least);
  const flows = large.map(({ token: from, share }): Flow => ({ layer, below: 0, from, to: token, share }));
  return { flows, input: new Map(input.map((each) => [each.token, each.share])) };
}

/**
 * A token's sources in the layer below, theirs in the one below that, and so on down to the input.
 *
 * A share is that of the chosen vector: the product of the shares along the way. Smaller ones than `least` are left
 * out, and the input has what the lines bring there.
 */
function throughLayers(token: number, layer: number, checkpoint: string, least: number) {
  const flows: Flow[] = [];
  let reached = new Map([[token, 1]]);
  for (let level = layer; level > 0; level--) {
    const below = new Map<number, number>();
    for (const [to, part] of reached) {
      const large = sourcesOf(to, level, checkpoint).filter(({ share }) => part * share >= least);
      for (const { token: from, share } of large) {
        flows.push({ layer: level, below: level - 1, from, to, share: part * share });
        below.set(from, (below.get(from) ?? 0) + part * share);
      }
    }
    reached = below;
  }
  return { flows, input: reached };
}
