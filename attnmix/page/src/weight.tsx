// The computation of one weight: query, key, product, score, softmax and, for short texts, value and further steps.

import { useSignal } from "@preact/signals";
import { afterSoftmax, headCount, type Heads, largestOf, lengthOf, meeting, type Vector } from "./attention";
import { data, modelText } from "./data";
import { figures, percent } from "./format";
import { headsLayer, position, set, shownHead, state } from "./state";
import { Cells, Pane, rowsOf, Term } from "./ui";
import { nameOf } from "./words";

const LISTED = 9; // maximum number of listed sources of longer texts
const WHOLE = 16; // up to this number, all sources are listed
const USUAL = 0.98; // quantile of a vector's absolute components that has the strongest colour

/** A strip with a cell for each dimension; the strongest colour stands for ±`most`. */
function Strip({ values, most, label }: { values: Vector; most: number; label: string }) {
  const strengths = () => [values.map((value) => (most > 0 ? Math.max(-1, Math.min(1, value / most)) : 0))];
  return <Cells rows={strengths} by={[values, most]} class="strip" label={label} title={label} />;
}

const usual = (vector: Vector) =>
  Float64Array.from(vector, Math.abs).toSorted()[Math.floor(USUAL * (vector.length - 1))];

const STEPS: Record<string, string> = {
  attended: "Sum of the weighted values: the output of the head",
  given: "× W_O of this head: its contribution to the attention output (W_O is not on the page)",
  output: `+ the other ${headCount - 1} heads and the bias: the attention output`,
  output_norm: "After the norm layer on the attention output: the vector added by attention",
  input: "The layer's input, added by the skip connection",
  skip: "Attention + input: after the skip connection",
  norm: "After LayerNorm: the output of the attention block",
  stored: "The same vector in the model's forward pass",
};

/** The columns that identify a head in csv files; heads are numbered from 0. */
export const headColumns = (layer: number, head: number) => ({
  model: modelText(state.checkpoint.value),
  layer,
  head,
});

export function Weight({ heads }: { heads: Heads }) {
  const open = useSignal(false);
  const unfolded = open.value || state.source.value !== null;
  return (
    <details class="fold" id="weight" open={unfolded} onToggle={(e) => (open.value = e.currentTarget.open)}>
      <summary>Computation of one weight: query, key, product, softmax{heads.vectors && ", value"}</summary>
      {unfolded && <Numbers heads={heads} />}
    </details>
  );
}

/** The tables of a token's query, keys, scores and weights in one head, and of the further steps. */
function Numbers({ heads }: { heads: Heads }) {
  const { start, name: text } = data.documents[state.document.value];
  const [layer, head] = [headsLayer.value, shownHead.value];
  const i = position.value ?? Math.min(2, heads.length - 1);
  const name = (j: number) => nameOf(start + j);
  const met = meeting(heads, layer, head, i);
  const after = afterSoftmax(heads, layer, head, i, met);
  const { query, sources, scaling, softcap, logSum } = met;
  const byWeight = sources.toSorted((a, b) => b.weight - a.weight);
  const chosen = state.source.value === null ? byWeight[0] : sources[state.source.value - start];
  const first = [chosen, sources[i], ...byWeight].slice(0, sources.length <= WHOLE ? undefined : LISTED);
  const listed = [...new Set(first)].toSorted((a, b) => a.j - b.j);
  const mostKeys = largestOf([query, ...listed.map(({ key }) => key)]);
  const mostProducts = largestOf(listed.map(({ product }) => product));
  const mostValues = after ? largestOf(listed.map(({ j }) => after.values[j])) : 0;
  const where = `${data.labels.layers[layer]}, head ${head}, ${modelText(state.checkpoint.value)}`;
  const of = { ...headColumns(layer, head), "query position": i, "query token": name(i) };
  const weights = () =>
    rowsOf(of, {
      columns: ["position", "token", "q.k", "score", "weight"],
      rows: sources.map(({ j, seen, dot, score, weight }) => [
        ...[j, name(j)],
        ...[seen ? dot : null, seen ? score : null, weight],
      ]),
      digits: 6,
    });
  const parts = Object.entries({ query, key: chosen.key, product: chosen.product });
  const vectors = after ? [...parts, ["value", after.values[chosen.j]] as const, ...after.steps] : [];
  const numbers = () =>
    rowsOf(of, {
      columns: ["step", "dimension", "value"],
      rows: vectors.flatMap(([step, vector]) => Array.from(vector, (value, n) => [step, n + 1, value])),
      digits: 6,
    });
  const columns = [
    "token",
    `key, ${query.length} numbers`,
    "query × key",
    "sum",
    `score: × ${figures(scaling)}`,
    "weight",
  ];
  const strip = (label: string, values: Vector, most: number) => (
    <td>
      <Strip values={values} most={most} label={label} />
    </td>
  );
  const file = `${text}, query of ${name(i)}, ${where}`;
  return (
    <>
      <Pane id="weights" title={<bdi>{`Query of “${name(i)}”, ${where}`}</bdi>} file={file} rows={weights}>
        <p id="pair">
          For the <Term name="query" /> of “<bdi>{name(i)}</bdi>” and the <Term name="key" /> of “
          <bdi>{name(chosen.j)}</bdi>”,{" "}
          {chosen.seen ? (
            <>
              the dot product is {figures(chosen.dot)}, scaled by {figures(scaling)} to {figures(chosen.dot * scaling)}
              {softcap ? `, capped to ${figures(chosen.score)}` : ""}, and the <Term name="softmax" /> weight is{" "}
              <b>{figures(chosen.weight)}</b> = exp({figures(chosen.score)} − {figures(logSum)}).
            </>
          ) : (
            "the key is masked, so its weight is 0."
          )}
        </p>
        <div class="scroll" tabIndex={0} role="region" aria-label="Query, keys, scores and weights">
          <table id="weight-rows">
            <tr>
              {[...columns, ...(after ? ["value", "weight × value"] : [])].map((each) => (
                <th scope="col">{each}</th>
              ))}
            </tr>
            <tr>
              <th scope="row">
                <bdi>{`query of “${name(i)}”`}</bdi>
              </th>
              {strip(`Query of ${name(i)}`, query, mostKeys)}
              <td colSpan={after ? 6 : 4} class="small">
                length {figures(lengthOf(query))}
              </td>
            </tr>
            {listed.map(({ j, seen, key, product, dot, score, weight }) => (
              <tr class={j === chosen.j ? "chosen" : ""}>
                <th scope="row">
                  <button aria-pressed={j === chosen.j} onClick={() => set({ source: start + j })}>
                    <bdi>{name(j)}</bdi>
                  </button>
                </th>
                {strip(`Key of ${name(j)}`, key, mostKeys)}
                {strip(`Product of ${name(j)}`, product, mostProducts)}
                <td class="number">{seen ? figures(dot) : "–"}</td>
                <td class="number">{seen ? figures(score) : "mask"}</td>
                <td class="number weighted">
                  <i style={`width: ${100 * weight}%`} aria-hidden="true" />
                  <span>{percent(weight)}</span>
                </td>
                {after && strip(`Value of ${name(j)}`, after.values[j], mostValues)}
                {after && strip(`Weighted value of ${name(j)}`, after.weighted[j], mostValues)}
              </tr>
            ))}
          </table>
        </div>
        <p class="small">
          Blue cells are above 0 and orange cells are below 0. The strongest colour stands for ±{figures(mostKeys)} in
          query and keys, and for ±{figures(mostProducts)} in products.{" "}
          {sources.length > listed.length &&
            `The table lists the tokens with the largest weights, the token itself and the selected source; the csv file lists all ${sources.length} tokens. `}
          {!after && "The steps after the softmax are shown only for short texts, to keep the file small."}
        </p>
      </Pane>
      {after && (
        <Pane id="steps-of-weight" title="From the weights to the layer's vector" file={file} rows={numbers}>
          <ol id="flow">
            {after.steps.map(([step, vector], n) => (
              <li>
                <span>
                  {n + 1}. {STEPS[step]}
                </span>
                <Strip values={vector} most={usual(vector)} label={STEPS[step]} />
                <small>
                  {vector.length} numbers, length {figures(lengthOf(vector))}
                </small>
              </li>
            ))}
          </ol>
          <p class="small" id="off">
            The largest differences between these numbers and the model's forward pass are{" "}
            {after.off.attended.toExponential(1)} for the output of the head and {after.off.stored.toExponential(1)} for
            the last vector.
          </p>
        </Pane>
      )}
    </>
  );
}
