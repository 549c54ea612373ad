// Which tokens the lines of a head end at, and what the strongest line stands for.

import { largestOfRows, lookedPosition, selectedPosition } from "./chosen.js";
import { state } from "./state.js";

const TALLEST = { screen: 540, print: 900 }; // pixels
export const STRONGEST_ENDS = 24; // rows on each side, where the text has more than are seen and a token is selected
export const PALEST = 0.3; // of the ink, for the lines of one token, which do not lie on each other

/** What a token takes and what others take from it. */
export function linesOf(rows, position) {
  const taken = [...rows[position].entries()].map(([j, value]) => [position, j, value]);
  const given = rows.map((row, i) => [i, position, row[position]]).filter(([i]) => i !== position);
  return { taken, given };
}

export const rowHeight = (length) => (length <= 16 ? 30 : length <= 48 ? 22 : 18);
export const tallest = () => (state.printing ? TALLEST.print : TALLEST.screen);
const everyPosition = (length) => Array.from({ length }, (_, i) => i);

/**
 * The tokens in the two columns, by position. All of them; of a text of which not all are seen, where a token is
 * selected, those that take most from it and those that it takes most from, so that its lines end where one sees it.
 */
export function endsOf(rows) {
  const chosen = selectedPosition();
  const all = everyPosition(rows.length);
  if (chosen === null || rows.length * rowHeight(rows.length) <= tallest()) return { left: all, right: all };
  const strongest = (strength) => {
    const linked = all.filter((each) => each === chosen || strength(each) > 0); // a mask leaves others out
    const order = linked.toSorted((a, b) => (b === chosen) - (a === chosen) || strength(b) - strength(a));
    return order.slice(0, STRONGEST_ENDS).toSorted((a, b) => a - b);
  };
  return {
    left: strongest((i) => rows[i][chosen]),
    right: strongest((j) => rows[chosen][j]),
    folded: true,
  };
}

/** The token that lines are of; those of a selected one stay where the rows are chosen by it. */
export const ownerOf = ({ folded }) => (folded ? selectedPosition() : lookedPosition());

/** What the strongest line stands for: of a token's own lines, or of the whole head's. */
export function scaleOf(rows, looked) {
  if (looked === null) return largestOfRows(rows);
  const { taken, given } = linesOf(rows, looked);
  return [...taken, ...given].reduce((most, [, , value]) => Math.max(most, value), 0) || 1;
}
