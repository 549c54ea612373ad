// Every measure by layer: ratios with controls and reviews, derivatives, and the selected word's course.

import type { Line } from "./chart";
import { byLayer, CurvePane } from "./curves";
import { captured, checkpoints, data, layers, modelName, ratioOf, reviewRatios, range } from "./data";
import { points } from "./format";
import { set, state } from "./state";
import { colourOf } from "./text";
import { nameThere } from "./words";
import { Term } from "./ui";

type Row = (typeof data.curves)[number];
/** A table's rows of one method and checkpoint, by layer. */
export const curve = (rows: Row[], method: string, checkpoint: string) =>
  byLayer(rows.filter((row) => row.method === method && row.checkpoint === checkpoint));

const CONTROLS: [name: string, colour: string, dash: string][] = [
  ["text_mean_value", "var(--shared)", "6 4"],
  ["shuffled_words", "var(--shuffled)", "2 3"],
  ["random_weights", "var(--random)", "1 4"],
];
const MAX_DOTS = 150; // reviews in the chart

const isDerivative = (measure: string) => measure in data.labels.derivatives;
const nameOf = (measure: string) => data.labels.derivatives[measure] ?? data.labels.methods[measure];

function linesOf(measure: string, whole: boolean): Line[] {
  const rows: Row[] = isDerivative(measure) ? data.derivatives : data.curves;
  const model = state.checkpoint.value;
  const few = range(Math.min(data.reviews.names.length, MAX_DOTS));
  const main = checkpoints.map((checkpoint): Line => {
    const dots = layers.map((layer) => {
      const all = reviewRatios(layer, checkpoint, measure);
      return few.map((i) => all[i]);
    });
    const shown = whole && !isDerivative(measure) && checkpoint === model && few.length > 1;
    return {
      name: data.labels.checkpoints[checkpoint],
      colour: colourOf(checkpoint),
      ...curve(rows, measure, checkpoint),
      dots: shown ? dots : undefined,
    };
  });
  if (!whole || isDerivative(measure)) return main;
  const controls = CONTROLS.map(([control, colour, dash]): Line => {
    const of = data.controls.filter((row) => row.control === control);
    const checkpoint = control === "random_weights" ? "random" : model;
    return {
      name: data.labels.controls[control],
      colour,
      dash,
      width: 1.6,
      values: curve(of, measure, checkpoint).values,
    };
  });
  const token = state.token.value;
  if (token === null) return [...main, ...controls];
  const values = layers.map((layer) => ratioOf(token, layer, model, measure));
  return [
    ...main,
    ...controls,
    { name: `“${nameThere(token)}”`, colour: "var(--mark)", dash: "1.5 3", width: 1.8, values },
  ];
}

/** What fine-tuning changed in the chosen layer, in one sentence. */
function change(measure: string): string {
  const rows = isDerivative(measure)
    ? data.derivatives.filter(({ checkpoint }) => checkpoint === "difference")
    : data.differences;
  const row = rows.find(({ layer, method }) => layer === state.layer.value && method === measure);
  if (!row) return "";
  const interval =
    row.ci_low === null
      ? ""
      : ` (95% interval ${points(row.ci_low).replace(" points", "")} to ${points(row.ci_high!)})`;
  return `In layer ${row.layer}, fine-tuning changes it by ${points(row.mean)}${interval}.`;
}

function Small({ measure }: { measure: string }) {
  const [wide, tall] = [132, 46];
  const lines = linesOf(measure, false);
  const most = Math.max(...lines.flatMap(({ values }) => values.map((each) => each ?? 0)), 1e-9);
  const x = (i: number) => 4 + (i * (wide - 8)) / Math.max(layers.length - 1, 1);
  const y = (value: number) => tall - 3 - (value / most) * (tall - 8);
  return (
    <button
      type="button"
      class="thumb"
      aria-pressed={state.measure.value === measure}
      data-measure={measure}
      onClick={() => set({ measure })}
    >
      <svg width={wide} height={tall} aria-hidden="true">
        {lines.map(({ values, colour }) => (
          <polyline
            points={values.flatMap((each, i) => (each === null ? [] : [`${x(i)},${y(each)}`])).join(" ")}
            fill="none"
            stroke={colour}
            stroke-width="2"
          />
        ))}
      </svg>
      {nameOf(measure)}
    </button>
  );
}

export function Layers() {
  const measure = state.measure.value;
  const derivatives = Object.keys(data.labels.derivatives).filter((each) =>
    data.derivatives.some((row) => row.method === each),
  );
  const lines = linesOf(measure, true);
  const model = modelName(state.checkpoint.value);
  const dots = lines.some((each) => each.dots);
  const banded = lines.some(({ low }) => low?.some((each) => each !== null));
  return (
    <section id="layers" aria-labelledby="layers-title">
      <h2 id="layers-title">Layers</h2>
      <p>
        {isDerivative(measure) ? (
          <>
            By <Term name="derivative">derivatives</Term>: how strongly a token's output depends on the other tokens'
            inputs within one layer.
          </>
        ) : (
          <>
            The <Term name="mixing ratio" /> by layer, with its controls:{" "}
            <Term name="shared value">one value shared by all tokens</Term>, <Term name="words in random order" />, and
            random weights.
          </>
        )}{" "}
        <span aria-live="polite" id="difference">
          {change(measure)}
        </span>
      </p>
      <CurvePane
        id="layers-chart"
        title={nameOf(measure) + (lines.length > checkpoints.length ? `; controls and word: ${model} model` : "")}
        lines={lines}
        height={380}
        bounds={[0, 1]}
      >
        {dots && (
          <p class="small">
            Each dot is one of {Math.min(data.reviews.total, MAX_DOTS)} measured reviews ({model} model). Lines are
            means over all tokens
            {banded && "; bands are 95% intervals over reviews"}.
          </p>
        )}
      </CurvePane>
      <div class="thumbs" role="group" aria-label="Measures">
        {[...data.ratios.methods, ...derivatives].map((each) => (
          <Small measure={each} />
        ))}
      </div>
      {!checkpoints.includes(captured) && <p class="note">The captured model was not measured.</p>}
    </section>
  );
}
