// What is measured besides: the steps of a layer, the geometry of its vectors, and what removing words does.

import { Chart, type Line } from "./chart";
import { captured, cosinesOf, data, layers, type Maybe, modelName } from "./data";
import { figures } from "./format";
import { set, state } from "./state";
import { nameThere } from "./words";
import { Pane, type Rows, Select } from "./ui";

type Row = { layer: number; mean: number; ci_low: Maybe; ci_high: Maybe };
const overLayers = (rows: Row[], from = 1) => {
  const of = (key: "mean" | "ci_low" | "ci_high") =>
    [...(from === 0 ? [0] : []), ...layers].map((layer) => rows.find((row) => row.layer === layer)?.[key] ?? null);
  return { values: of("mean"), low: of("ci_low"), high: of("ci_high") };
};
const tableOf = (lines: Line[], x: string[], title: string): Rows => ({
  columns: [
    title,
    ...lines.flatMap(({ name, low }) => (low ? [name, `${name}, 95% from`, `${name}, 95% to`] : [name])),
  ],
  rows: x.map((each, i) => [
    each,
    ...lines.flatMap(({ values, low, high }) => (low ? [values[i], low[i], high![i]] : [values[i]])),
  ]),
});
const described = (lines: Line[]) =>
  lines
    .map(({ name, values }) => `${name}: ${values.map((each) => (each === null ? "–" : figures(each))).join(", ")}`)
    .join(". ");

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
    const mean = { name: data.labels.steps[step], colour, ...overLayers(rows.filter((row) => row.step === step)) };
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
    <Pane id="steps" title={title} file={title} rows={() => tableOf(lines, layers.map(String), "layer")}>
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
      <Chart
        label={`${title}. ${described(lines)}`}
        x={layers.map(String)}
        title="layer"
        height={340}
        lines={lines}
        format={(value) => figures(value).replace(/0+$/, "").replace(/\.$/, "")}
        chosen={state.layer.value - 1}
        choose={(place) => set({ layer: place + 1 })}
        bounds={stepMeasure.value.startsWith("cosine") ? [-1, 1] : [0, Infinity]}
      />
    </Pane>
  );
}

const POINT_COLOURS = [
  "var(--before)",
  "var(--shared)",
  "var(--after)",
  "var(--shuffled)",
  "var(--mark)",
  "var(--random)",
  "var(--ink)",
];

function Geometry() {
  const measure = state.geometry.value;
  const rows = data.geometry.filter((row) => row.checkpoint === state.checkpoint.value && row.measure === measure);
  const points = Object.keys(data.labels.points).filter((point) =>
    rows.some((row) => row.point === point && row.layer > 0),
  );
  if (rows.length === 0) return null;
  const lines = points.map((point, n) => ({
    name: data.labels.points[point],
    colour: POINT_COLOURS[n % POINT_COLOURS.length],
    ...overLayers(rows.filter((row) => row.point === point)),
  }));
  const title = `Geometry: ${data.labels.geometry[measure]}, ${modelName(state.checkpoint.value)} model`;
  return (
    <Pane id="geometry" title={title} file={title} rows={() => tableOf(lines, layers.map(String), "layer")}>
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
      <Chart
        label={`${title}. ${described(lines)}`}
        x={layers.map(String)}
        title="layer"
        height={320}
        lines={lines}
        format={(value) => figures(value).replace(/\.?0+$/, "")}
        chosen={state.layer.value - 1}
        choose={(place) => set({ layer: place + 1 })}
      />
    </Pane>
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
      const at = (key: "drop" | "ci_low" | "ci_high") =>
        shares.map((share) => data.removal.find((row) => row.method === method && row.share === share)?.[key] ?? null);
      const plain = method === "random";
      return {
        name: name(method),
        colour: plain ? "var(--ink)" : POINT_COLOURS[n % POINT_COLOURS.length],
        dash: plain ? "4 4" : undefined,
        values: at("drop"),
      };
    });
  const title = "Removal test: do the words that a measure ranks first matter to the prediction?";
  const x = shares.map((share) => `${Math.round(100 * Number(share))}%`);
  return (
    <Pane id="removal" title={title} file="Removal test" rows={() => tableOf(lines, x, "words removed")}>
      <p>
        The fall of the predicted class's logit when the words that a measure ranks first are masked, fine-tuned model.
        The higher, the better the measure finds the words that matter; random words are the baseline.
      </p>
      <Chart
        label={`${title} ${described(lines)}`}
        x={x}
        title="words masked"
        height={340}
        lines={lines}
        format={(value) => figures(value).replace(/\.?0+$/, "")}
        choose={() => {}}
      />
    </Pane>
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
