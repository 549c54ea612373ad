// One weight unfolded: query, key, product, score, softmax, value, and for a short text what follows.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { afterSoftmax, headCount, type Heads, largestOf, lengthOf, meeting, type Vector } from "./attention";
import { data, modelName } from "./data";
import { figures, percent } from "./format";
import { dark, headsLayer, position, set, shownHead, state } from "./state";
import { nameThere } from "./words";
import { Pane, type Rows, Select, Term } from "./ui";

const LISTED = 9; // sources of a longer text: the strongest, the word itself and the chosen one
const WHOLE = 16; // sources of a short text, all of which are listed
const TOP = 4; // dimensions
const USUAL = 0.98; // of a vector's numbers, whose largest has the strongest colour

/** A cell for each dimension: blue above 0, orange below, the stronger the further. */
function Strip({ values, most, label }: { values: Vector; most: number; label: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const night = dark.value;
  useEffect(() => {
    const image = new ImageData(values.length, 1);
    values.forEach((value, n) => {
      const colour = value < 0 ? (night ? [255, 157, 77] : [179, 74, 0]) : night ? [110, 195, 245] : [0, 96, 160];
      image.data.set([...colour, Math.round(255 * Math.min(1, most > 0 ? Math.abs(value) / most : 0))], 4 * n);
    });
    canvas.current!.width = values.length;
    canvas.current!.height = 1;
    canvas.current!.getContext("2d")!.putImageData(image, 0, 0);
  }, [values, most, night]);
  return (
    <canvas
      ref={canvas}
      class="strip"
      role="img"
      aria-label={label}
      title={most > 0 && largestOf([values]) < 0.02 * most ? "almost 0 everywhere" : label}
    />
  );
}

const usual = (vector: Vector) =>
  Float64Array.from(vector, Math.abs).toSorted()[Math.floor(USUAL * (vector.length - 1))];

const STEPS: Record<string, string> = {
  attended: "Sum of the weighted values: what the head gathers",
  given: "× W_O of this head: what it gives (W_O is the model's, not on the page)",
  output: `+ the other ${headCount - 1} heads and the bias: attention's output`,
  output_norm: "Its norm: what attention adds",
  input: "The layer's input, which the skip connection brings",
  skip: "Attention + input: after the skip connection",
  norm: "LayerNorm: what leaves attention's part of the layer",
  stored: "The model's own vector, as it was stored",
};

export function Weight({ heads }: { heads: Heads }) {
  const open = useSignal(false);
  const unfolded = open.value || state.source.value !== null;
  return (
    <details class="fold" id="weight" open={unfolded} onToggle={(e) => (open.value = e.currentTarget.open)}>
      <summary>One weight, number by number: query, key, product, softmax, value</summary>
      {unfolded &&
        (heads.ranks ? (
          <p class="note">
            This text is long: its queries and keys are on the page in fewer dimensions than the model has, so their
            numbers are not shown.
          </p>
        ) : (
          <Numbers heads={heads} />
        ))}
    </details>
  );
}

function Numbers({ heads }: { heads: Heads }) {
  const { start, name: text } = data.documents[state.document.value];
  const [layer, head] = [headsLayer.value, shownHead.value];
  const i = position.value ?? Math.min(2, heads.length - 1);
  const met = meeting(heads, layer, head, i);
  const after = afterSoftmax(heads, layer, head, i, met);
  const { query, sources, scaling, softcap, logSum } = met;
  const strongest = sources.reduce((most, each) => (each.weight > most.weight ? each : most));
  const chosen = (state.source.value !== null && sources[state.source.value - start]) || strongest;
  const name = (j: number) => nameThere(start + j);
  const order = sources.toSorted(
    (a, b) => Number(b === chosen || b.j === i) - Number(a === chosen || a.j === i) || b.weight - a.weight,
  );
  const listed = sources.length <= WHOLE ? sources : order.slice(0, LISTED).toSorted((a, b) => a.j - b.j);
  const [mostKeys, mostProducts] = [
    largestOf([query, ...listed.map(({ key }) => key)]),
    largestOf(listed.map(({ product }) => product)),
  ];
  const mostValues = after ? largestOf(listed.map(({ j }) => after.values[j])) : 0;
  const decisive = Array.from(chosen.product.keys())
    .toSorted((a, b) => Math.abs(chosen.product[b]) - Math.abs(chosen.product[a]))
    .slice(0, TOP);
  const where = `${data.labels.layers[layer]}, head ${head + 1}, ${modelName(state.checkpoint.value)} model`;
  const rows = (): Rows => ({
    columns: ["position", "token", "q.k", "score", "weight"],
    rows: sources.map((each) => [
      each.j,
      name(each.j),
      each.seen ? each.dot : null,
      each.seen ? each.score : null,
      each.weight,
    ]),
    note: `query of ${name(i)}, ${where}`,
    digits: 6,
  });
  const vectors = (): Rows => {
    const parts: [string, Vector][] = [
      ["query", query],
      ["key", chosen.key],
      ["product", chosen.product],
    ];
    if (after) parts.push(["value", after.values[chosen.j]], ...after.steps);
    return {
      digits: 6,
      columns: ["step", "dimension", "value"],
      rows: parts.flatMap(([step, vector]) => Array.from(vector, (value, n) => [step, n + 1, value])),
    };
  };
  return (
    <>
      <Pane
        id="weights"
        title={
          <>
            Query of “<bdi>{name(i)}</bdi>”, {where}
          </>
        }
        file={`${text}, query of ${name(i)}, ${where}`}
        rows={rows}
      >
        <p id="pair">
          <Term name="query">Query</Term> “<bdi>{name(i)}</bdi>”, <Term name="key" /> “<bdi>{name(chosen.j)}</bdi>”:{" "}
          {chosen.seen ? (
            <>
              dot product {figures(chosen.dot)}, scaled by {figures(scaling)} to {figures(chosen.dot * scaling)}
              {softcap ? `, capped to ${figures(chosen.score)}` : ""}, <Term name="softmax" /> weight{" "}
              <b>{figures(chosen.weight)}</b> = exp({figures(chosen.score)} − {figures(logSum)}). Dimensions that
              contribute most:{" "}
              {decisive
                .map(
                  (n) => `${n + 1} (${figures(query[n])} × ${figures(chosen.key[n])} = ${figures(chosen.product[n])})`,
                )
                .join(", ")}
              .
            </>
          ) : (
            "the mask hides it, so its weight is 0."
          )}
          {after &&
            chosen.weight > 0.3 &&
            largestOf([after.values[chosen.j]]) < 0.1 * largestOf(after.values) &&
            " Its value is near 0: this weight gives almost nothing (an attention sink)."}
        </p>
        <div class="controls">
          <Select
            id="source"
            label="Key of"
            value={String(chosen.j)}
            options={sources.map(({ j }) => [String(j), `${j} ${name(j)}`] as const)}
            on={(value) => set({ source: start + Number(value) })}
          />
        </div>
        <div class="scroll" tabIndex={0} role="region" aria-label="Query, keys, scores and weights">
          <table id="weight-rows">
            <thead>
              <tr>
                {[
                  "word",
                  `key, ${query.length} numbers`,
                  "query × key",
                  "sum",
                  `score: × ${figures(scaling)}`,
                  "weight",
                  ...(after ? ["value", "weight × value"] : []),
                ].map((each) => (
                  <th scope="col">{each}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              <tr class="query">
                <th scope="row">
                  query of “<bdi>{name(i)}</bdi>”
                </th>
                <td>
                  <Strip values={query} most={mostKeys} label={`Query of ${name(i)}`} />
                </td>
                <td colSpan={after ? 6 : 4} class="small">
                  length {figures(lengthOf(query))}
                </td>
              </tr>
              {listed.map(({ j, seen, key, product, dot, score, weight }) => (
                <tr class={j === chosen.j ? "chosen" : ""}>
                  <th scope="row">
                    <button
                      type="button"
                      aria-pressed={j === chosen.j}
                      data-source={j}
                      onClick={() => set({ source: start + j })}
                    >
                      <bdi>{name(j)}</bdi>
                    </button>
                  </th>
                  <td>
                    <Strip values={key} most={mostKeys} label={`Key of ${name(j)}`} />
                  </td>
                  <td>
                    <Strip values={product} most={mostProducts} label={`Product of ${name(j)}`} />
                  </td>
                  <td class="number">{seen ? figures(dot) : "–"}</td>
                  <td class="number">{seen ? figures(score) : "mask"}</td>
                  <td class="number weighted">
                    <i style={`width: ${100 * weight}%`} aria-hidden="true" />
                    <span>{percent(weight)}</span>
                  </td>
                  {after && (
                    <>
                      <td>
                        <Strip values={after.values[j]} most={mostValues} label={`Value of ${name(j)}`} />
                      </td>
                      <td>
                        <Strip values={after.weighted[j]} most={mostValues} label={`Weighted value of ${name(j)}`} />
                      </td>
                    </>
                  )}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        <p class="small">
          Blue above 0, orange below; strongest ±{figures(mostKeys)} in query and keys, ±{figures(mostProducts)} in
          products. {sources.length > listed.length && `Of ${sources.length} words the strongest; the csv has all.`}
        </p>
      </Pane>
      <Pane
        id="steps-of-weight"
        title="From the weights to the layer's vector"
        file={`${text}, ${name(i)}, ${where}`}
        rows={vectors}
      >
        {after ? (
          <>
            <ol id="flow">
              {after.steps.map(([step, vector]) => (
                <li>
                  <span>{STEPS[step]}</span>
                  <Strip values={vector} most={usual(vector)} label={STEPS[step]} />
                  <small>
                    {vector.length} numbers, length {figures(lengthOf(vector))}
                  </small>
                </li>
              ))}
            </ol>
            <p class="small" id="off">
              Computed here, the gathered vector differs from the model's own by {exponent(after.off.attended)} at most,
              the last by {exponent(after.off.stored)}.
            </p>
          </>
        ) : (
          <p class="note">
            The weighted values, through W_O, add up to a vector of length{" "}
            {figures(heads.given_norms[((layer - 1) * headCount + head) * heads.length + i])}. The remaining steps are
            shown only for short texts, to keep the file small.
          </p>
        )}
      </Pane>
    </>
  );
}

const exponent = (value: number) => (value === 0 ? "0" : value.toExponential(1));
