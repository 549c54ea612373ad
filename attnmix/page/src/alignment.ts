// Alignment of two texts: the columns of their tokens.

import { data, once, range, tokensOf, type Maybe } from "./data";

/** The tokens of a column; null if a text has none. Different tokens can be in the same column. */
export type Column = { first: Maybe; second: Maybe };

const nameOf = (token: number) => data.readings[0].names[token];
/** True if both texts have the same token in a column. */
export const isSame = ({ first, second }: Column) =>
  first !== null && second !== null && nameOf(first) === nameOf(second);

/** The lengths `[i][j]` of the longest common subsequences of two lists of names from the indices i and j on. */
function commonLengths(first: string[], second: string[]): Uint16Array[] {
  const lengths = range(first.length + 1).map(() => new Uint16Array(second.length + 1));
  for (let i = first.length - 1; i >= 0; i--)
    for (let j = second.length - 1; j >= 0; j--) {
      const isCommon = first[i] === second[j];
      lengths[i][j] = isCommon ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  return lengths;
}

/** Columns for tokens outside of the common subsequence, paired in order. */
const unlike = (first: number[], second: number[]): Column[] =>
  range(Math.max(first.length, second.length)).map((n) => ({ first: first[n] ?? null, second: second[n] ?? null }));

/** The columns of two texts, aligned by the longest common subsequence of their tokens. */
export const columnsOf = once((one: number, other: number): Column[] => {
  const [first, second] = [tokensOf(one), tokensOf(other)];
  const lengths = commonLengths(first.map(nameOf), second.map(nameOf));
  const columns: Column[] = [];
  let [i, j, startI, startJ] = [0, 0, 0, 0];
  const endOfUnlike = () => columns.push(...unlike(first.slice(startI, i), second.slice(startJ, j)));
  while (i < first.length && j < second.length) {
    if (nameOf(first[i]) === nameOf(second[j])) {
      endOfUnlike();
      columns.push({ first: first[i++], second: second[j++] });
      [startI, startJ] = [i, j];
    } else if (lengths[i + 1][j] >= lengths[i][j + 1]) i++;
    else j++;
  }
  [i, j] = [first.length, second.length];
  endOfUnlike();
  return columns;
});

/** True if two texts have most of their tokens in common, as in a minimal pair. */
export function areAlike(one: number, other: number): boolean {
  const columns = columnsOf(one, other);
  return columns.filter(isSame).length > columns.length / 2;
}
