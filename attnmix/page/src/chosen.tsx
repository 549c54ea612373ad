// The words below the picture of tokens by layers: the chosen cell, its sources, and what changed most.

import { canChange, set, state } from "./state";
import { data, type Maybe } from "./data";
import { percent, points } from "./format";
import * as measures from "./measures";
import { CHANGE, shownModels } from "./measures";
import { nameInText } from "./words";

const NAMED_SOURCES = 4; // in the sentence below the picture
const LISTED_CHANGES = 6; // below the picture

export const modelTitle = (model: string) =>
  model === CHANGE ? "Change by fine-tuning" : data.labels.checkpoints[model];
export const layerName = (layer: number) => (layer === 0 ? "input" : data.labels.layers[layer].toLowerCase());
export const valueText = (value: Maybe) => (value === null ? "not known" : measures.shareText(value));
/** The models whose sources are drawn; of a change, the chosen one. */
export const sourceModel = (model: string) => (model === CHANGE ? state.checkpoint.value : model);

/** The largest sources of the chosen vector in a model, in words, by the chosen measure. */
function SourcesOf({ model, token }: { model: string; token: number }) {
  const all = measures.sourcesOf(token, state.layer.value, sourceModel(model));
  const sources = all.filter((each) => each.token !== token).slice(0, NAMED_SOURCES);
  if (sources.length === 0) return null;
  return (
    <>
      Largest sources in the {measures.sourcesIn.value === "input" ? "input" : "layer below"}
      {canChange && `, ${data.labels.checkpoints[sourceModel(model)].toLowerCase()}`}:{" "}
      {sources.map((each, n) => (
        <>
          {n > 0 && ", "}
          <bdi>{nameInText(each.token)}</bdi> {percent(each.share)}
        </>
      ))}
      .{" "}
    </>
  );
}

/** The cells that fine-tuning changed most, by which they are chosen. */
export function Changes() {
  const changes = measures.largestChanges.value.slice(0, LISTED_CHANGES);
  if (changes.length === 0) return null;
  return (
    <p class="changes noprint" id="changes">
      Largest changes by fine-tuning, of each token the layer with its largest:{" "}
      {changes.map(({ token, layer, value }) => (
        <button onClick={() => set({ token, layer })}>
          <bdi>{nameInText(token)}</bdi> <small>layer {layer}</small> {points(value)}
        </button>
      ))}
    </p>
  );
}

/** What the chosen cell is and where its vector comes from, in words. */
export function ChosenText() {
  const token = state.token.value;
  if (token === null)
    return (
      <p class="chosen-text" id="chosen-text">
        Click a cell to see where that vector comes from.
      </p>
    );
  const layer = state.layer.value;
  const inModels = shownModels.value.map((model) => {
    const value = valueText(measures.valueOf(token, layer, model));
    return shownModels.value.length > 1 ? `${value} ${modelTitle(model).toLowerCase()}` : value;
  });
  return (
    <p class="chosen-text" id="chosen-text" aria-live="polite">
      <b>
        “<bdi>{nameInText(token)}</bdi>”
      </b>{" "}
      after {layerName(layer)}: {measures.shareKind()} {inModels.join(", ")}.{" "}
      {shownModels.value.map((model) => (
        <SourcesOf model={model} token={token} />
      ))}
    </p>
  );
}
