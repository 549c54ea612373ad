// The layout of the picture of tokens by layers: blocks of rows, one below the other, and their columns.

import { computed, signal } from "@preact/signals";
import { CHANGE, drawnModels, wordsModel } from "./measures";
import { columnOf, comparison } from "./comparison";
import { data, documentOf, layerCount, type Maybe, range, tokensOf } from "./data";
import { printing, state } from "./state";
import { PRINTED_WIDTH } from "./ui";
import { nameOf } from "./words";

export const LEVELS_WIDTH = 44; // pixels, width of the layer numbers
const CELL_WIDTH = { least: 15, leastCompared: 12, most: 120 }; // pixels; two texts have more columns
const ROOM = { text: 0.38, comparison: 0.42, paper: 330 }; // for all rows, in window heights; on paper in pixels
const ABOVE_PICTURE = 290; // pixels of a wide window above the picture, excluded from the space for a comparison
const ROW_HEIGHT = [9, 30]; // pixels, minimum and maximum, including the gap
export const GAP = 0.28; // gap between rows for the lines, as a fraction of a row
const TITLE_HEIGHT = 24; // pixels, above the rows of a block
const MARGIN_WIDTH = 108; // pixels, for the means at the right
const LEAST_WITH_MARGIN = 600; // pixels, minimum width of a picture with means
const INDENT = 5; // pixels left of the first token, for its name and frame
export const NAME_SIZE = 12; // pixels
export const LETTERS = 13; // maximum number of characters of a name
const NAMES_HEIGHT = { level: 24, upright: 92 }; // pixels

/** A text in a model, or the difference between two texts; layer 0 is the input. */
export type Block = {
  title: string;
  model: string;
  tokens: Maybe[]; // by column
  lowest: 0 | 1; // lowest layer
  hasNames: boolean; // true if token names are shown below its rows
  isDifference: boolean;
};

export const modelTitle = (model: string) =>
  model === CHANGE ? `Change ${data.wording.by_change}` : data.labels.checkpoints[model];
export const textTitle = (text: number) => data.documents[text].heading;

/** The selected text in each model, or two texts in one model and their difference. */
export const blocks = computed((): Block[] => {
  const shown = { lowest: 0, hasNames: true, isDifference: false } as const;
  if (comparison.value === null) {
    const [tokens, models] = [tokensOf(state.document.value), drawnModels.value];
    return models.map((model, n): Block => {
      const hasNames = n === models.length - 1; // the blocks have the same tokens
      return { ...shown, title: modelTitle(model), model, tokens, hasNames };
    });
  }
  const [{ first, second, columns }, model] = [comparison.value, wordsModel.value];
  const title = `Difference: ${data.documents[second].title} minus ${data.documents[first].title}`;
  const tokens = columns.map((column) => column.first ?? column.second);
  return [
    { ...shown, title: textTitle(first), model, tokens: columns.map((column) => column.first) },
    { ...shown, title: textTitle(second), model, tokens: columns.map((column) => column.second) },
    { title, model, tokens, lowest: 1, hasNames: false, isDifference: true },
  ];
});

/** A block's text or model, for use within a sentence. */
export function titleInText({ model, tokens, isDifference }: Block): string {
  if (comparison.value === null) return modelTitle(model).toLowerCase();
  const { first, second } = comparison.value;
  const [one, other] = [first, second].map((text) => data.documents[text].title);
  if (isDifference) return `${other} minus ${one}`;
  return tokens === blocks.value[0].tokens ? one : other;
}

/** The block of the selected text in the selected model. */
export const chosenBlock = computed(() =>
  blocks.value.find(
    ({ model, tokens }) =>
      model === wordsModel.value &&
      tokens.some((token) => token !== null && documentOf[token] === state.document.value),
  )!,
);

/** The column of the selected token; null if no token is selected. */
export const chosenColumn = computed((): Maybe => {
  const token = state.token.value;
  return token === null ? null : columnOf(token);
});

/** A cell of the picture. */
export type Cell = { block: Block; column: number; layer: number };

/** The sizes and positions in a picture of a given width. */
function layoutOf(width: number) {
  const shown = blocks.value;
  const columnCount = shown[0].tokens.length;
  const leastOnScreen = comparison.value ? CELL_WIDTH.leastCompared : CELL_WIDTH.least;
  const least = printing.value ? 0 : leastOnScreen;
  const marginWidth = width < LEAST_WITH_MARGIN ? 0 : MARGIN_WIDTH;
  const room = width - LEVELS_WIDTH - marginWidth - 2 * INDENT;
  const cellWidth = Math.min(CELL_WIDTH.most, Math.max(least, room / columnCount));
  const rowsOf = ({ lowest }: Block) => layerCount + 1 - lowest;
  const rightToLeft = data.documents[state.document.value].direction === "rtl";
  const tokens = shown.flatMap((block) => block.tokens).filter((token) => token !== null);
  const ruler = Math.max(...tokens.map((token) => nameOf(token).length));
  const upright = cellWidth < Math.min(ruler, LETTERS) * NAME_SIZE * 0.62;
  const namesHeight = NAMES_HEIGHT[upright ? "upright" : "level"];
  const rowCount = shown.reduce((total, block) => total + rowsOf(block), 0);
  const between = shown.reduce((total, { hasNames }) => total + TITLE_HEIGHT + (hasNames ? namesHeight : 0), 0);
  const onScreen = comparison.value
    ? Math.min(innerHeight - ABOVE_PICTURE - between, ROOM.comparison * innerHeight)
    : ROOM.text * innerHeight;
  const rowsRoom = printing.value ? ROOM.paper : onScreen;
  const rowHeight = Math.floor(Math.min(ROW_HEIGHT[1], Math.max(ROW_HEIGHT[0], rowsRoom / rowCount)));
  const tops = new Map<Block, number>();
  let height = 0;
  for (const block of shown) {
    tops.set(block, height);
    height += TITLE_HEIGHT + rowsOf(block) * rowHeight + (block.hasNames ? namesHeight : 0);
  }
  const place = (column: number) => (rightToLeft ? columnCount - 1 - column : column);
  const y = (block: Block, layer: number) => tops.get(block)! + TITLE_HEIGHT + (layerCount - layer) * rowHeight;
  return {
    ...{ cellWidth, rowHeight, upright, namesHeight, columnCount, height, marginWidth, rightToLeft, y },
    width: 2 * INDENT + cellWidth * columnCount,
    x: (column: number) => INDENT + place(column) * cellWidth,
    top: (block: Block) => tops.get(block)!,
    namesTop: (block: Block) => y(block, block.lowest - 1),
    cellAt(left: number, top: number): Cell | null {
      const column = place(Math.floor((left - INDENT) / cellWidth));
      const block = shown.findLast((each) => tops.get(each)! <= top);
      if (column < 0 || column >= columnCount || !block || block.tokens[column] === null) return null;
      const layer = layerCount - Math.floor((top - tops.get(block)! - TITLE_HEIGHT) / rowHeight);
      if (layer > layerCount) return null; // on the block's title
      return { block, column, layer: Math.max(layer, block.lowest) }; // a token's name selects the lowest layer
    },
  };
}
export type Layout = ReturnType<typeof layoutOf>;

/** The width of the picture on the screen, which is that of the page's column. */
export const screenWidth = signal(document.getElementById("app")!.clientWidth || 900);
export const layout = computed(() => layoutOf(printing.value ? PRINTED_WIDTH : screenWidth.value));

/** The layers of a block in ascending order. */
export const layersOf = ({ lowest }: Block) => range(layerCount + 1, lowest);
