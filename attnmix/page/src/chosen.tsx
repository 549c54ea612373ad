// The paragraphs below the picture of tokens by layers: the selected cell, its sources, and the largest changes.

import { type Block, blocks, chosenColumn, titleInText } from "./blocks";
import { sourceModel, valueIn } from "./cells";
import { comparison, differenceOf, unlikeTokens } from "./comparison";
import { data, isWord, type Maybe, OWN_SHARE, type Share } from "./data";
import { percent, points } from "./format";
import * as measures from "./measures";
import { missingText } from "./missing";
import { canChange, set, state } from "./state";
import { nameInText, SourcesName } from "./words";

const NAMED_SOURCES = 4; // maximum number in the sentence below the picture
const LISTED_CHANGES = 6; // maximum number of buttons below the picture

export const layerName = (layer: number) => (layer === 0 ? "input" : data.labels.layers[layer].toLowerCase());
export function valueText(value: Maybe, isDifference = false, token: Maybe = null): string {
  if (value === null) return missingText(token);
  return isDifference ? points(value) : measures.shareText(value);
}

/** The end of a sentence on the summed share of special tokens and punctuation among the largest sources. */
function marksText(sources: Share[]): string {
  const marks = sources.filter(({ token }) => !isWord(token));
  if (marks.length === 0) return "";
  const sum = marks.reduce((total, { share }) => total + share, 0);
  return `; special tokens and punctuation among the ${data.sourcesKept} largest sources contribute ${percent(sum)}`;
}

/** A sentence on the words that are the largest sources of the selected vector in a block. */
function SourcesOf({ block, token }: { block: Block; token: number }) {
  const all = measures.sourcesOf(token, state.layer.value, sourceModel(block.model));
  const others = all.filter((each) => each.token !== token);
  const sources = others.filter((each) => isWord(each.token)).slice(0, NAMED_SOURCES);
  if (sources.length === 0) return null;
  const compared = comparison.value ? ` (${titleInText(block)})` : "";
  return (
    <>
      {state.share.value === OWN_SHARE ? (
        <>
          By <SourcesName />, the
        </>
      ) : (
        "The"
      )}{" "}
      largest contributions of other words in the {measures.sourcesIn.value === "input" ? "input" : "layer below"}
      {compared || (canChange && ` (${data.labels.checkpoints[sourceModel(block.model)].toLowerCase()})`)} are{" "}
      {sources.map((each, n) => (
        <>
          {n > 0 && ", "}
          <bdi>{nameInText(each.token)}</bdi> {percent(each.share)}
        </>
      ))}
      {marksText(others)}.{" "}
    </>
  );
}

/** Buttons that select the words with the largest changes between both models. */
export function Changes() {
  const changes = measures.largestChanges.value.filter(({ token }) => isWord(token)).slice(0, LISTED_CHANGES);
  if (changes.length === 0) return null;
  return (
    <p class="changes noprint" id="changes">
      Words that change most {data.wording.by_change}, each with the layer of its largest change:{" "}
      {changes.map(({ token, layer, value }) => (
        <button onClick={() => set({ token, layer })}>
          <bdi>{nameInText(token)}</bdi> <small>layer {layer}</small> {points(value)}
        </button>
      ))}
    </p>
  );
}

/** The value of the selected cell in a block, with the text or model of the block if there are several blocks. */
function valueOfBlock(block: Block, column: number): string {
  const value = valueText(valueIn(block, column, state.layer.value), block.isDifference, block.tokens[column]);
  return blocks.value.length > 1 ? `${value} ${comparison.value ? "in " : ""}${titleInText(block)}` : value;
}

/** The sentence on the values of a column; if all values are missing for the same reason, it is given once. */
function valuesText(shown: Block[], column: number): string {
  const isMissing = shown.every((block) => valueIn(block, column, state.layer.value) === null);
  const reasons = new Set(shown.map((block) => missingText(block.tokens[column])));
  if (isMissing && reasons.size === 1) return `the ${measures.shareKind()} is ${[...reasons][0]}`;
  const values = shown.map((block) => valueOfBlock(block, column)).join(", ");
  return `${measures.shareStatement()} ${values}${differenceText(column)}`;
}

/** The difference between both texts in the selected cell, if both have a token in its column. */
function differenceText(column: number): string {
  if (comparison.value === null) return "";
  const value = differenceOf(comparison.value.columns[column], state.layer.value);
  return value === null ? "" : `, a difference of ${points(value)}`;
}

/** A paragraph on the selected cell: its token, value and largest sources. */
export function ChosenText() {
  const column = chosenColumn.value;
  if (column === null)
    return (
      <p class="chosen-text" id="chosen-text">
        Click a cell to see the sources of its vector.
      </p>
    );
  const ofTexts = blocks.value.filter(({ isDifference }) => !isDifference);
  const isAbsent = (block: Block) => block.tokens[column] === null;
  const present = ofTexts.filter((block) => !isAbsent(block));
  const tokens = present.map((block) => block.tokens[column]!);
  const shownTokens = tokens.filter((token, n) => n === 0 || unlikeTokens.value.has(token));
  return (
    <p class="chosen-text" id="chosen-text" aria-live="polite">
      <b>
        {shownTokens.map((token, n) => (
          <>
            {n > 0 && " / "}“<bdi>{nameInText(token)}</bdi>”
          </>
        ))}
      </b>{" "}
      {measures.isOfOneLayer() ? "in" : "after"} {layerName(state.layer.value)}: {valuesText(present, column)}.{" "}
      {ofTexts.filter(isAbsent).map((block) => `${titleInText(block)} has no token in this column. `)}
      {present.map((block) => (
        <SourcesOf block={block} token={block.tokens[column]!} />
      ))}
    </p>
  );
}
