// The paragraphs below the picture of two texts: tokens that differ, means over both texts, and largest differences.

import { type Column, isSame } from "./alignment";
import { type Comparison, comparison, largestDifferences, meanOf } from "./comparison";
import { layerName, valueText } from "./chosen";
import { data, isWord, type Maybe } from "./data";
import { points } from "./format";
import * as measures from "./measures";
import { set, state } from "./state";
import { nameInText } from "./words";

const LISTED = 6; // maximum number of listed differences
const NAMED = 8; // maximum number of listed columns with different tokens

const nameOfText = (text: number) => data.documents[text].title;
const said = (token: number) => `“${nameInText(token)}”`;

/** The token of the selected text in a column; the other text's token if it has none. */
const tokenOf = ({ first, second }: Column) =>
  ((state.document.value === comparison.value!.first ? first : second) ?? first ?? second)!;

/** The names of the tokens of a column; one name if they are the same. */
const namesIn = (column: Column) =>
  isSame(column) ? nameInText(tokenOf(column)) : `${nameInText(column.first!)} → ${nameInText(column.second!)}`;

/** A sentence on the tokens that differ between both texts. */
function unlikeText({ first, second, columns, alike }: Comparison): string {
  const unlike = columns.filter((column) => !isSame(column));
  if (unlike.length === 0) return "Both texts have the same tokens.";
  if (!alike) {
    const same = `${columns.length - unlike.length} of ${columns.length} columns`;
    return `These texts have few tokens in common. Both have the same token in ${same}; differences are shown in these columns only.`;
  }
  const alone = (token: Maybe, text: number, other: number) =>
    `${said(token!)} in ${nameOfText(text)}, no token in ${nameOfText(other)}`;
  const places = unlike.slice(0, NAMED).map((column) => {
    if (column.second === null) return alone(column.first, first, second);
    if (column.first === null) return alone(column.second, second, first);
    return `${said(column.first)} in ${nameOfText(first)}, ${said(column.second)} in ${nameOfText(second)}`;
  });
  const rest = unlike.length > NAMED ? [`and ${unlike.length - NAMED} more columns`] : [];
  const where = `in ${unlike.length} of ${columns.length} columns`;
  return `Tokens that differ (framed), ${where}: ${[...places, ...rest].join("; ")}.`;
}

function wholeText({ first, second }: Comparison): string {
  const [one, other] = [first, second].map((text) => meanOf(text, state.layer.value));
  if (one === null || other === null) return "";
  const means = `${valueText(one)} in ${nameOfText(first)}, ${valueText(other)} in ${nameOfText(second)}`;
  return `${measures.isOfOneLayer() ? "In" : "After"} ${layerName(state.layer.value)}, ${measures.shareStatement(`mean ${measures.shareKind()} of all tokens`)} ${means}, a difference of ${points(other - one)}.`;
}

/** The differences between two texts as paragraphs; buttons select the cells with the largest differences. */
export function Differences() {
  if (comparison.value === null) return null;
  const { first, second } = comparison.value;
  const hasWord = (column: Column) => [column.first, column.second].some((token) => token !== null && isWord(token));
  const listed = largestDifferences.value.filter(({ column }) => hasWord(column)).slice(0, LISTED);
  return (
    <div id="differences">
      <p class="chosen-text" id="unlike">
        <bdi>{unlikeText(comparison.value)}</bdi>
      </p>
      <p class="chosen-text" id="whole">
        {wholeText(comparison.value)}
      </p>
      {listed.length > 0 && (
        <p class="changes noprint" id="largest">
          Words with the largest differences, {nameOfText(second)} minus {nameOfText(first)}:{" "}
          {listed.map(({ column, layer, value }) => (
            <button onClick={() => set({ token: tokenOf(column), layer })}>
              <bdi>{namesIn(column)}</bdi> <small>layer {layer}</small> {points(value)}
            </button>
          ))}
        </p>
      )}
    </div>
  );
}
