// The comparison of two texts: the tokens that differ, and the differences in the selected measure.

import { computed } from "@preact/signals";
import { areAlike, type Column, columnsOf, isSame } from "./alignment";
import { layers, type Maybe, positionOf, tokensOf } from "./data";
import { valueOf, wordsModel } from "./measures";
import { state } from "./state";

const DIFFERENCE_LIMIT = 0.25; // end of the colour scale of differences

export type Comparison = { first: number; second: number; columns: Column[]; alike: boolean };
/** The selected text and the text that it is compared with, in the order of the page; null if nothing is compared. */
export const comparison = computed((): Comparison | null => {
  const [chosen, other] = [state.document.value, state.compare.value];
  if (other === null) return null;
  const [first, second] = [Math.min(chosen, other), Math.max(chosen, other)];
  return { first, second, columns: columnsOf(first, second), alike: areAlike(first, second) };
});

const columnNumbers = computed(() => {
  const numbers = new Map<number, number>();
  for (const [n, { first, second }] of (comparison.value?.columns ?? []).entries()) {
    if (first !== null) numbers.set(first, n);
    if (second !== null) numbers.set(second, n);
  }
  return numbers;
});
/** The column of a token of a shown text. */
export const columnOf = (token: number): number =>
  comparison.value === null ? positionOf(token) : columnNumbers.value.get(token)!;

/** The tokens of both texts in columns where the texts differ. */
export const unlikeTokens = computed(() => {
  const unlike = comparison.value?.columns.filter((column) => !isSame(column)) ?? [];
  return new Set(unlike.flatMap(({ first, second }) => [first, second]).filter((token) => token !== null));
});

/**
 * The selected measure in the second text minus that in the first; null if a text has no token in the column. In
 * dissimilar texts, different tokens are in the same column by chance, so their values are not compared.
 */
export function differenceOf(column: Column, layer: number): Maybe {
  const { first, second } = column;
  if (first === null || second === null) return null;
  if (!comparison.value!.alike && !isSame(column)) return null;
  const [one, other] = [first, second].map((token) => valueOf(token, layer, wordsModel.value));
  return one === null || other === null ? null : other - one;
}

/** The ends of the scale of differences: constants or, if colours are stretched, the extremes of the compared texts. */
export const differenceRange = computed((): [low: number, high: number] => {
  const [largest] = largestDifferences.value;
  const limit = state.stretch.value && largest ? Math.abs(largest.value) : DIFFERENCE_LIMIT;
  return [-limit, limit];
});

export type Difference = { column: Column; layer: number; value: number };
/** The largest difference of each column and its layer, sorted by size. */
export const largestDifferences = computed((): Difference[] => {
  const inLayers = (column: Column) =>
    layers.flatMap((layer): Difference[] => {
      const value = differenceOf(column, layer);
      return value === null ? [] : [{ column, layer, value }];
    });
  const largest = (all: Difference[]) => all.toSorted((a, b) => Math.abs(b.value) - Math.abs(a.value));
  return largest((comparison.value?.columns ?? []).flatMap((column) => largest(inLayers(column)).slice(0, 1)));
});

/** The mean of the selected measure over the tokens with a known value; null if there are none. */
export function meanOver(tokens: Maybe[], layer: number, model: string): Maybe {
  const values = tokens.map((token) => (token === null ? null : valueOf(token, layer, model)));
  const known = values.filter((value) => value !== null);
  return known.length > 0 ? known.reduce((total, value) => total + value, 0) / known.length : null;
}

/** The mean of the selected measure over the tokens of a text in the selected model. */
export const meanOf = (text: number, layer: number): Maybe => meanOver(tokensOf(text), layer, wordsModel.value);
