// The head and the token that the views of heads show, and canvases to draw them on.

import { attentionRow, headMatrix, HEADS, headsOf } from "./attention.js";
import { data, documentOf, once, positionOf, readingOf } from "./data.js";
import { state } from "./state.js";

const ROWS_ASKED = 32; // of a head, by which it is chosen

/** How much the tokens of a text take from the others that are neither its first nor its last. */
function lookingAround(heads, layer, head) {
  const every = Math.ceil(heads.length / ROWS_ASKED);
  let found = 0;
  for (let i = 0; i < heads.length; i += every) {
    const { first, weights } = attentionRow(heads, layer, head, i);
    found += weights
      .filter((_, n) => ![0, i, heads.length - 1].includes(first + n))
      .reduce((most, each) => Math.max(most, each), 0);
  }
  return found;
}

const tellingHead = once((key) => {
  const [number, checkpoint, layer] = key.split(" ");
  const heads = headsOf(Number(number), checkpoint);
  const found = Array.from({ length: HEADS }, (_, head) => (heads ? lookingAround(heads, Number(layer), head) : 0));
  return found.indexOf(Math.max(...found));
});

/** The head that is shown: the chosen one, and where the text shows the mean of all, one that looks at other words. */
export const shownHead = () =>
  state.head === "mean" ? tellingHead(`${state.document} ${state.checkpoint} ${state.layer}`) : state.head;
const positionHere = (token) => (token !== null && documentOf[token] === state.document ? positionOf(token) : null);
export const selectedPosition = () => positionHere(state.token);
/** The position whose lines are shown, of the token under the mouse or the selected one. */
export const lookedPosition = () => positionHere(state.hovered ?? state.token);
/** What the tokens of the chosen text are called in the chosen layer. */
export const namesHere = () => {
  const { start, length } = data.documents[state.document];
  return readingOf(state.layer).names.slice(start, start + length);
};
/** `[i][j]` of the shown head; null where its text's queries and keys are not on the page. */
export const matrixHere = () => headMatrix(state.document, state.checkpoint, state.layer, shownHead(), state.headValue);
export const largestOfRows = once(
  (rows) => rows.reduce((most, row) => row.reduce((more, each) => Math.max(more, each), most), 0) || 1,
);

/** The drawing context of a canvas that has this size on the screen and is sharp there. */
export function clean(canvas, width, height) {
  const sharp = state.printing ? 2 : Math.max(1, devicePixelRatio);
  [canvas.width, canvas.height] = [Math.round(width * sharp), Math.round(height * sharp)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(sharp, sharp);
  return context;
}
