// The selected measure: the own share of each token, its sources, and the tokens to which it contributes.

import { computed } from "@preact/signals";
import * as run from "./data";
import { checkpoints, data, layers, type Maybe, modelName, OWN_SHARE, type Share, tokensOf } from "./data";
import { effectLimit } from "./effects";
import { inPoints, percent, points, signed, wholePercent } from "./format";
import { matrix, state } from "./state";

export const CHANGE = "change"; // used in place of a model for differences between both models
/** The models that the picture shows, one above the other. */
export const shownModels = computed(() => (state.change.value ? [CHANGE] : checkpoints));
/** The model of the tokens and lists below the picture. */
export const wordsModel = computed(() => (state.change.value ? CHANGE : state.checkpoint.value));

/** The models in the picture; a comparison of two texts shows one model. */
export const drawnModels = computed(() => (state.compare.value === null ? shownModels.value : [wordsModel.value]));

const ofClass = () => state.effect.value !== "";
const isOwnShare = () => state.share.value === OWN_SHARE;
const isRatio = () => !isOwnShare() && !data.matrices.includes(state.share.value);

const sharesOf = (token: number, layer: number, checkpoint: string) =>
  run.sharesOf(token, layer, checkpoint, matrix.value);
/** The own share of a token by the matrix of its sources; null if it is not known. */
export const ownPart = (token: number, layer: number, checkpoint: string): Maybe =>
  sharesOf(token, layer, checkpoint)?.own ?? null;

/** The change of a measure between both models; null if it is not known. */
function changeOf(measure: (checkpoint: string) => Maybe): Maybe {
  const [before, after = null] = checkpoints.map(measure);
  return before === null || after === null ? null : after - before;
}

/** The selected measure of a token in a layer, or its change: an own share or a mixing ratio. */
export function valueOf(token: number, layer: number, model: string): Maybe {
  const measure = (checkpoint: string) =>
    isRatio() || isOwnShare()
      ? run.ratioOf(token, layer, checkpoint, state.share.value)
      : ownPart(token, layer, checkpoint);
  return model === CHANGE ? changeOf(measure) : measure(model);
}

export type Change = { token: number; layer: number; value: number };
/** The largest change of the measure for each token and its layer, sorted by size; empty for a single model. */
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

/** The value that colours a token: the selected measure in the selected layer, or the effect on the predicted class. */
export const wordValue = (token: number): Maybe =>
  ofClass() ? run.importanceOf(token, state.effect.value) : valueOf(token, state.layer.value, wordsModel.value);

/** The ends of the scale of shares. Stretched scales end at the extremes of the shown texts, layers and models. */
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
/** The ends of the colour scale of tokens; effects on the class have a separate scale for each text. */
export const wordRange = computed((): [low: number, high: number] => {
  if (!ofClass()) return shareRange.value;
  const limit = effectLimit(state.document.value, state.effect.value, state.stretch.value);
  return [-limit, limit];
});

/** The position of a value on a scale, from 0 to 1; on a scale with negative values, from -1 to 1. */
export const placeOn = ([low, high]: [number, number], value: number) =>
  low < 0 ? value / high : high > low ? (value - low) / (high - low) : 0;

export const shareText = (value: number) => (state.change.value ? points(value) : percent(value));
/** The label of an end of the scale, without the unit of changes, which `scaleUnit` adds after both ends. */
export const endText = (value: number) => {
  if (state.change.value) return inPoints(value);
  return state.stretch.value ? percent(value) : wholePercent(value);
};
export const scaleUnit = () => (state.change.value && !ofClass() ? "points: " : "");
/** An effect as text, with more digits if all effects in the text are small. */
const effectInLogits = (value: number) => signed(value, wordRange.value[1] < 1 ? 3 : 2);
export const wordEndText = (value: number) => (ofClass() ? effectInLogits(value) : endText(value));
export const wordText = (value: number) => (ofClass() ? effectInLogits(value) : shareText(value));
export const matrixName = () => data.labels.matrices[matrix.value];
/** True if the selected measure has no sources, so that the sources of the first matrix are shown. */
export const hasOtherSources = () => (isRatio() || isOwnShare()) && data.matrices.length > 0;
/** The kind of the selected measure. */
export const shareKind = () => (isRatio() ? "mixing ratio" : "own share");
/** The beginning of a sentence that ends with shares, or with changes of shares. */
export const shareStatement = (kind = shareKind()) =>
  state.change.value ? `${data.wording.change} changes the ${kind} by` : `the ${kind} is`;
export const wordKind = () => (ofClass() ? "effect" : shareKind());
/** The name of the selected measure. */
export const measureName = () =>
  isOwnShare() ? "by exchange" : (data.labels.methods[state.share.value] ?? matrixName());
/** The name of the matrix of the sources, for use within a sentence. */
export const sourcesName = () => (data.matrices.length > 0 ? matrixName().replace(/^Exact/, "exact") : "");
/** The quantity that the colours of the picture show. */
export const shareName = () => `${state.change.value ? "change of the " : ""}${shareKind()} (${measureName()})`;
/** The quantity that the colours of tokens show. */
export const wordName = () =>
  ofClass()
    ? `effect on the predicted class, in logits (${data.labels.importance[state.effect.value].toLowerCase()})`
    : shareName();
/** True if the selected measure describes one layer, rather than all layers since the input. */
export const isOfOneLayer = () => !isOwnShare() && sourcesIn.value !== "input";
/** The model of the shares, or the two models of a change. */
export const matrixModel = () =>
  state.change.value ? checkpoints.toReversed().map(modelName).join(" minus ") : modelName(state.checkpoint.value);
/** The model of the colours of tokens. */
export const shownModel = () => (ofClass() ? modelName(checkpoints.at(-1)!) : matrixModel());

/** The sources of a token including itself, largest first; null if they are not on the page. */
const took = (token: number, checkpoint: string): Share[] | null =>
  sharesOf(token, state.layer.value, checkpoint)?.largest() ?? null;

/** The other tokens that have a token among their main sources, largest share first. */
function gave(token: number, checkpoint: string): Share[] {
  const others = tokensOf(run.documentOf[token]).filter((each) => each !== token);
  const shareIn = (each: number) => took(each, checkpoint)?.find((source) => source.token === token)?.share ?? 0;
  const given = others.map((each) => ({ token: each, share: shareIn(each) }));
  return given.filter(({ share }) => share > 0).toSorted((a, b) => b.share - a.share);
}

const changesOf = (token: number) => run.changesOf(token, state.layer.value, checkpoints, matrix.value);
const largestFirst = (changes: Share[]) => changes.toSorted((a, b) => Math.abs(b.share) - Math.abs(a.share));

/** The largest changes among the sources of a token. */
const takenChanges = (token: number): Share[] => largestFirst(changesOf(token)).slice(0, data.sourcesKept);

/** The changes of a token's shares in the tokens that have it among their main sources, largest first. */
function givenChanges(token: number): Share[] {
  const others = tokensOf(run.documentOf[token]).filter((each) => each !== token);
  const given = others.flatMap((each) =>
    changesOf(each)
      .filter((source) => source.token === token)
      .map(({ share }) => ({ token: each, share })),
  );
  return largestFirst(given);
}

/** The sources (`took`) and targets (`gave`) of a token, in a model or as changes; null if they are not on the page. */
export function exchanged(token: number) {
  const sources = took(token, state.checkpoint.value);
  if (sources === null) return null;
  if (state.change.value) return { took: takenChanges(token), gave: givenChanges(token) };
  return { took: sources.filter((each) => each.token !== token), gave: gave(token, state.checkpoint.value) };
}

/** A line from a token after a layer to one of its sources, after a lower layer or in the input. */
export type Flow = { layer: number; below: number; from: number; to: number; share: number };
/** The level of the sources of the selected measure; null if it has no sources, as in the case of ratios. */
export const sourcesIn = computed((): "input" | "layer" | null => {
  if (isRatio()) return null;
  if (data.matrices.length === 0) return null;
  return data.sinceInput.includes(matrix.value) ? "input" : "layer";
});

/** The sources of a token's vector by the selected measure, largest first; empty for ratios, which have no sources. */
export const sourcesOf = (token: number, layer: number, checkpoint: string): Share[] =>
  sourcesIn.value === null ? [] : (sharesOf(token, layer, checkpoint)?.largest() ?? []);

/** The shares of input tokens in a token's vector, and the lines to sources with a share of at least `least`. */
export function originsOf(token: number, layer: number, checkpoint: string, least: number) {
  if (sourcesIn.value === "layer") return throughLayers(token, layer, checkpoint, least);
  const input = sourcesOf(token, layer, checkpoint);
  const large = input.filter(({ share }) => share >= least);
  const flows = large.map(({ token: from, share }): Flow => ({ layer, below: 0, from, to: token, share }));
  return { flows, input: new Map(input.map((each) => [each.token, each.share])) };
}

/**
 * The sources of a token in the layer below, their sources in the next lower layer, and so on down to the input.
 *
 * A line's share of the selected vector is the product of the shares along its path. Lines with a share below `least`
 * are omitted. The shares of the input are sums over the remaining lines.
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
