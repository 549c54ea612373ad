// The right margin of the picture of tokens by layers: the means by layer and their positions.

import { type Block, blocks, GAP, type Layout } from "./blocks";
import { meanOver } from "./comparison";
import { data, layers, type Maybe } from "./data";
import { CHANGE, placeOn, shareRange } from "./measures";
import type { Series } from "./payload";
import { state } from "./state";

const [LEFT, RIGHT] = [12, 12]; // pixels on both sides of the scale

/** The means of the shown measure over the measured texts of a run by layer; null if there are no intervals. */
export function corpusMeans(model: string): Series | null {
  const series = data.curves[state.share.value]?.[model === CHANGE ? "difference" : model];
  return series?.low.some((low) => low !== null) ? series : null;
}

/** The means of the shown measure over the tokens of a block's text by layer; null if no value is known. */
export const textMeans = ({ tokens, model }: Block): Maybe[] => layers.map((layer) => meanOver(tokens, layer, model));

type Point = { layer: number; x: number; y: number };
const isKnown = (point: { x: Maybe }): point is Point => point.x !== null;

/** The positions of the means of each block; blocks of differences have no means. */
export function marginOf({ marginWidth, rowHeight, y }: Layout) {
  const width = marginWidth - LEFT - RIGHT;
  const x = (value: number) => {
    const place = placeOn(shareRange.value, value);
    const part = shareRange.value[0] < 0 ? (place + 1) / 2 : place;
    return LEFT + width * Math.min(Math.max(part, 0), 1);
  };
  const at = (block: Block, values: Maybe[]) =>
    layers
      .map((layer, n) => {
        const value = values[n] ?? null;
        return { layer, x: value === null ? null : x(value), y: y(block, layer) + (rowHeight * (1 - GAP)) / 2 };
      })
      .filter(isKnown);
  const shown = blocks.value.filter(({ isDifference }) => !isDifference);
  return shown.map((block) => {
    const corpus = corpusMeans(block.model);
    const ofText = textMeans(block);
    return {
      block,
      corpus,
      ofText,
      means: at(block, corpus?.values ?? []),
      band: [...at(block, corpus?.low ?? []), ...at(block, corpus?.high ?? []).toReversed()],
      text: at(block, ofText),
      scale: shareRange.value.map((value) => ({ value, x: x(value) })),
    };
  });
}
