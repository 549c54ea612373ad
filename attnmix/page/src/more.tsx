// What is measured besides: the steps of a layer, the geometry of its vectors, and what removing words does.

import type { Line } from "./chart";
import { byLayer, CurvePane, plain } from "./curves";
import { captured, cosinesOf, data, modelName } from "./data";
import { set, state } from "./state";
import { nameThere } from "./words";
import { Select } from "./ui";

const headsCompared = data.steps.some(({ step, measure }) => step === "heads" && measure === "cosine_input");
const headsNote = headsCompared
  ? "The heads live in a basis of their own, so their cosine says little."
  : "The heads side by side have another number of dimensions than the layer's input, so they have no cosine to it.";

function Steps() {
  const { stepMeasure, checkpoint, token } = state;
  const rows = data.steps.filter((row) => row.checkpoint === checkpoint.value && row.measure === stepMeasure.value);
  const steps = Object.keys(data.stepColors).filter((step) => rows.some((row) => row.step === step));
  const own = token.value !== null && stepMeasure.value === "cosine_input" && checkpoint.value === captured;
  const lines = steps.flatMap((step): Line[] => {
    const colour =
      data.stepColors[step] === "#000000"
        ? "var(--ink)"
        : `color-mix(in oklab, ${data.stepColors[step]} 78%, var(--ink))`;
    const mean = { name: data.labels.steps[step], colour, ...byLayer(rows.filter((row) => row.step === step)) };
    const values = own ? cosinesOf(token.value!, step) : [];
    return values.length > 0
      ? [
          mean,
          {
            name: `“${nameThere(token.value!)}”, ${data.labels.steps[step]}`,
            colour,
            dash: "1.5 3",
            width: 1.3,
            values,
            quiet: true,
          },
        ]
      : [mean];
  });
  const label = data.labels.stepMeasures[stepMeasure.value];
  const title = `Steps of a layer: ${label}, ${modelName(checkpoint.value)} model`;
  return (
    <CurvePane
      id="steps"
      title={title}
      lines={lines}
      height={340}
      format={plain}
      bounds={stepMeasure.value.startsWith("cosine") ? [-1, 1] : [0, Infinity]}
      above={
        <>
          <p>
            What each part of a layer does to a vector. Cosine 1: direction unchanged; 0: orthogonal. {headsNote}
            {own && ` Dotted: “${nameThere(token.value!)}”.`}
            {checkpoint.value !== captured &&
              ` The selected word's own values are of the ${modelName(captured)} model alone.`}
          </p>
          <div class="controls">
            <Select
              id="step-measure"
              label="Measure"
              value={stepMeasure.value}
              options={Object.entries(data.labels.stepMeasures)}
              on={(value) => set({ stepMeasure: value })}
            />
          </div>
        </>
      }
    />
  );
}

const POINT_COLOURS = ["before", "shared", "after", "shuffled", "mark", "random", "ink"].map(
  (name) => `var(--${name})`,
);

function Geometry() {
  const measure = state.geometry.value;
  const rows = data.geometry.filter((row) => row.checkpoint === state.checkpoint.value && row.measure === measure);
  const points = Object.keys(data.labels.points).filter((point) =>
    rows.some((row) => row.point === point && row.layer > 0),
  );
  if (rows.length === 0) return null;
  const lines = points.map((point, n) => ({
    name: data.labels.points[point],
    colour: POINT_COLOURS[n % 7],
    ...byLayer(rows.filter((row) => row.point === point)),
  }));
  const title = `Geometry: ${data.labels.geometry[measure]}, ${modelName(state.checkpoint.value)} model`;
  return (
    <CurvePane
      id="geometry"
      title={title}
      lines={lines}
      height={320}
      format={plain}
      above={
        <>
          <p>How the vectors of a text lie to each other at each capture point.</p>
          <div class="controls">
            <Select
              id="geometry-measure"
              label="Measure"
              value={measure}
              options={Object.entries(data.labels.geometry)}
              on={(value) => set({ geometry: value })}
            />
          </div>
        </>
      }
    />
  );
}

function Removal() {
  if (data.removal.length === 0) return null;
  const shares = [...new Set(data.removal.map(({ share }) => share))].filter((share) => share !== "all");
  const methods = [...new Set(data.removal.map(({ method }) => method))];
  const total = (method: string) => data.removal.find((row) => row.method === method && row.share === "all")?.drop ?? 0;
  const name = (method: string) =>
    data.labels.matrices[method] ??
    data.labels.importance[method] ??
    { random: "Random words", decompx: "DecompX", gradient_norm: "Gradient norm" }[method] ??
    method;
  const lines = methods
    .toSorted((a, b) => total(b) - total(a))
    .map((method, n): Line => {
      const rows = data.removal.filter((row) => row.method === method);
      const values = shares.map((share) => rows.find((row) => row.share === share)?.drop ?? null);
      const looks = method === "random" ? { colour: "var(--ink)", dash: "4 4" } : { colour: POINT_COLOURS[n % 7] };
      return { name: name(method), values, ...looks };
    });
  const title = "Removal test: do the words that a measure ranks first matter to the prediction?";
  return (
    <CurvePane
      id="removal"
      title={title}
      lines={lines}
      height={340}
      format={plain}
      x={shares.map((each) => `${Math.round(100 * Number(each))}%`)}
      axis="words masked"
      above={
        <p>
          The fall of the predicted class's logit when the words that a measure ranks first are masked, fine-tuned
          model. The higher, the better the measure finds the words that matter; random words are the baseline.
        </p>
      }
    />
  );
}

export const More = () => (
  <details class="fold" id="more">
    <summary>More: steps of a layer, geometry, removal test</summary>
    <Steps />
    <Geometry />
    <Removal />
  </details>
);
