// The charts: what the run found, every measure by layer, and what else is measured: steps, geometry, removal.

import * as Plot from "@observablehq/plot";
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { byLayer, Chart, type Line } from "./chart";
import { captured, checkpoints, cosinesOf, data, layers, modelText, ratioOf, reviewRatios } from "./data";
import { points, shortFigures } from "./format";
import { shadeName, shownModel } from "./measures";
import { set, state } from "./state";
import { KeptBar } from "./text";
import { Select, Term } from "./ui";
import { nameOf, sentence, Words } from "./words";

const GREY = "var(--before)";
const COLOURS = ["after", "shared", "shuffled", "mark", "random", "ink", "before"].map((name) => `var(--${name})`);

/** A sentence whose numbers stay with their signs. */
const unbroken = (text: string) => text.replaceAll(" %", "\u00a0%");

export function Answer() {
  const { headline, sentences, chart } = data.answer;
  const { series } = chart;
  // Before, after and by chance; else the models, and the same with a control; of one model, it and the control.
  const colours = series.length === 3 ? [GREY, COLOURS[0], COLOURS[4]] : [GREY, COLOURS[0], GREY, COLOURS[1]];
  const lines = series.map((each, n): Line => ({
    ...each,
    colour: series.length < 3 ? COLOURS[n] : colours[n],
    dash: n < series.length / 2 ? undefined : "dashed",
  }));
  const { token, document, layer } = state;
  return (
    <section id="answer" aria-labelledby="headline">
      <h1 id="headline">{unbroken(headline)}</h1>
      <div class="first">
        <div>
          <ul class="lead">
            {sentences.map((each) => (
              <li>{unbroken(each)}</li>
            ))}
          </ul>
          <p class="noprint">
            <button class="strong" onClick={() => set({ tour: 1 })}>
              Show me, in six steps
            </button>{" "}
            <span class="small">
              Words to know: <Term name="mixing ratio" />, <Term name="shared value" />, <Term name="derivative" />,{" "}
              <Term name="interval">95% interval</Term>
            </span>
          </p>
        </div>
        <Chart id="answer-chart" first title={chart.title} lines={lines} height={290} bounds={[0, 1]}>
          <p class="small">
            {chart.unit}. {lines.some(hasInterval) && "Bands: 95% intervals over reviews. "}
            <span class="noprint">Click a layer to select it everywhere.</span>
          </p>
        </Chart>
      </div>
      <div class="sentence">
        <p class="small">
          One sentence of <bdi>{data.documents[document.value].name}</bdi>, layer {layer.value}, {shownModel()}: the
          darker a word, the larger its {shadeName()}. <span class="noprint">Click a word.</span>
        </p>
        <Words id="sentence" tokens={sentence.value} prefix="word-" label="One sentence" />
        {token.value !== null && <KeptBar token={token.value} />}
      </div>
    </section>
  );
}

type Row = (typeof data.curves)[number];
/** A table's rows of one method and checkpoint, by layer. */
export const curve = (rows: Row[], method: string, checkpoint: string) =>
  byLayer(rows.filter((row) => row.method === method && row.checkpoint === checkpoint));
export const controlCurve = (control: string, method: string, checkpoint: string) =>
  curve(
    data.controls.filter((row) => row.control === control),
    method,
    checkpoint,
  );

const CONTROLS: [name: string, colour: string, dash: Line["dash"]][] = [
  ["text_mean_value", COLOURS[1], "dashed"],
  ["shuffled_words", COLOURS[2], "dotted"],
  ["random_weights", COLOURS[4], "dotted"],
];
const MAX_DOTS = 150; // reviews in the chart
const hasInterval = ({ low }: Line) => low?.some((each) => each !== null);
const isDerivative = (measure: string) => measure in data.labels.derivatives;
const measureName = (measure: string) => data.labels.derivatives[measure] ?? data.labels.methods[measure];
const colourOf = (checkpoint: string) => (checkpoint === checkpoints.at(-1) ? COLOURS[0] : GREY);

const meanLines = (measure: string) =>
  checkpoints.map((checkpoint): Line => {
    const rows: Row[] = isDerivative(measure) ? data.derivatives : data.curves;
    const line = curve(rows, measure, checkpoint);
    return { name: data.labels.checkpoints[checkpoint], colour: colourOf(checkpoint), ...line };
  });

/** A ratio's means with the reviews of the chosen model, its controls, and the selected word's own course. */
function ratioLines(measure: string): Line[] {
  const model = state.checkpoint.value;
  const dots = layers.map((layer) => reviewRatios(layer, model, measure).slice(0, MAX_DOTS));
  const hasDots = (n: number) => checkpoints[n] === model && data.reviews.names.length > 1;
  const means = meanLines(measure).map((line, n) => (hasDots(n) ? { ...line, dots } : line));
  const controls = CONTROLS.map(([control, colour, dash]): Line => {
    const { values } = controlCurve(control, measure, control === "random_weights" ? "random" : model);
    return { name: data.labels.controls[control], colour, dash, values };
  });
  const token = state.token.value;
  if (token === null) return [...means, ...controls];
  const values = layers.map((layer) => ratioOf(token, layer, model, measure));
  return [...means, ...controls, { name: `“${nameOf(token)}”`, colour: COLOURS[3], dash: "dotted", values }];
}

/** What fine-tuning changed in the chosen layer, in one sentence. */
function changeText(measure: string): string {
  const rows = [...data.differences, ...data.derivatives.filter(({ checkpoint }) => checkpoint === "difference")];
  const row = rows.find(({ layer, method }) => layer === state.layer.value && method === measure);
  if (!row) return "";
  const interval = row.ci_low === null ? "" : ` (95% interval ${points(row.ci_low)} to ${points(row.ci_high!)})`;
  return `In layer ${row.layer}, fine-tuning changes it by ${points(row.mean)}${interval}.`;
}

/** A measure's means by layer as a small picture, by which it is chosen. */
function Thumb({ measure }: { measure: string }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const marks = meanLines(measure).map(({ values, colour }) =>
      Plot.lineY(values, { stroke: colour, strokeWidth: 2 }),
    );
    box.current!.replaceChildren(
      Plot.plot({ width: 132, height: 46, margin: 4, axis: null, y: { zero: true }, marks }),
    );
  }, []);
  return (
    <button
      class="thumb"
      aria-pressed={state.measure.value === measure}
      data-measure={measure}
      onClick={() => set({ measure })}
    >
      <div ref={box} aria-hidden="true" />
      {measureName(measure)}
    </button>
  );
}

/** Of pairs of texts, the ratio with only the tokens of one text, or only special ones, as the others. */
function PairSources({ measure }: { measure: string }) {
  const rows = data.sources.filter((row) => row.method === measure && row.checkpoint === state.checkpoint.value);
  if (rows.length === 0) return null;
  const lines = [...new Set(rows.map(({ source }) => source))].map((source, n): Line => {
    const name = `From ${source === "special tokens" ? source : `the ${source}`}`;
    return { name, colour: COLOURS[n], ...byLayer(rows.filter((row) => row.source === source)) };
  });
  return (
    <Chart
      id="sources-chart"
      title={`Own text and other text: ${measureName(measure)}, ${modelText(state.checkpoint.value)}`}
      lines={lines}
      bounds={[0, 1]}
    >
      <p class="small">
        Each line is the ratio with only these tokens counted as others, so the three do not add up to the whole ratio.
        Means over the tokens of both texts of each pair.
      </p>
    </Chart>
  );
}

export function Layers() {
  const measure = state.measure.value;
  const derivatives = Object.keys(data.labels.derivatives).filter((each) =>
    data.derivatives.some((row) => row.method === each),
  );
  const lines = isDerivative(measure) ? meanLines(measure) : ratioLines(measure);
  const model = modelText(state.checkpoint.value);
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
          {changeText(measure)}
        </span>
      </p>
      <Chart
        id="layers-chart"
        title={measureName(measure) + (isDerivative(measure) ? "" : `; controls and word: ${model}`)}
        lines={lines}
        height={380}
        bounds={[0, 1]}
      >
        {lines.some(({ dots }) => dots) && (
          <p class="small">
            Each dot is one of {Math.min(data.reviews.total, MAX_DOTS)} measured reviews ({model}). Lines are means over
            all tokens{lines.some(hasInterval) && "; bands are 95% intervals over reviews"}.
          </p>
        )}
      </Chart>
      <div class="thumbs" role="group" aria-label="Measures">
        {[...data.ratios.methods, ...derivatives].map((each) => (
          <Thumb measure={each} />
        ))}
      </div>
      <PairSources measure={measure} />
    </section>
  );
}

type VectorRow = Parameters<typeof byLayer>[0][number] & { checkpoint: string; measure: string };
/** A measure of vectors by layer, chosen among several, with a line for each step or capture point. */
function VectorChart<R extends VectorRow>(props: {
  choice: "stepMeasure" | "geometryMeasure";
  name: string;
  note: string;
  labels: Record<string, string>; // of the measures
  rows: R[];
  lineOf: (row: R) => string;
  names: Record<string, string>; // of the lines
}) {
  const { choice, name, note, labels, lineOf, names } = props;
  const [measure, checkpoint, token] = [state[choice].value, state.checkpoint.value, state.token.value];
  const rows = Map.groupBy(
    props.rows.filter((row) => row.checkpoint === checkpoint && row.measure === measure),
    lineOf,
  );
  const own = token !== null && measure === "cosine_input" && checkpoint === captured;
  const present = Object.entries(names).filter(([each]) => rows.has(each));
  const lines = present.flatMap(([each, label], n): Line[] => {
    const colour = COLOURS[n % COLOURS.length];
    const mean = { name: label, colour, ...byLayer(rows.get(each)!) };
    if (!own) return [mean];
    return [mean, { name: `“${nameOf(token)}”, ${label}`, colour, dash: "dotted", values: cosinesOf(token, each) }];
  });
  return (
    <Chart
      id={name.split(" ")[0].toLowerCase()}
      title={`${name}: ${labels[measure]}, ${modelText(checkpoint)}`}
      lines={lines}
      format={shortFigures}
      bounds={measure.startsWith("cosine") ? [-1, 1] : undefined}
      above={
        <>
          <p>{note}</p>
          <div class="controls">
            <Select choice={choice} label="Measure" options={Object.entries(labels)} />
          </div>
        </>
      }
    />
  );
}

const headsNote = data.steps.some(({ step, measure }) => step === "heads" && measure === "cosine_input")
  ? "The heads side by side have a basis of their own, so their cosine says little."
  : "The heads side by side have another number of dimensions than the layer's input, so they have no cosine to it.";

const OTHER_SCORES = { random: "Random words", decompx: "DecompX", gradient_norm: "Gradient norm" };

function Removal() {
  const names: Record<string, string> = { ...OTHER_SCORES, ...data.labels.matrices, ...data.labels.importance };
  const shares = [...new Set(data.removal.map(({ share }) => share))].filter((share) => share !== "all");
  const methods = [...new Set(data.removal.map(({ method }) => method))];
  const lines = methods.map((method, n): Line => {
    const drops = new Map(data.removal.filter((row) => row.method === method).map((row) => [row.share, row.drop]));
    const dash = method === "random" ? "dashed" : n < COLOURS.length ? undefined : "dotted";
    const values = shares.map((share) => drops.get(share) ?? null);
    return { name: names[method] ?? method, colour: COLOURS[n % COLOURS.length], dash, values };
  });
  return (
    <Chart
      id="removal"
      title="Removal test: do the words that a measure ranks first matter to the prediction?"
      lines={lines}
      format={shortFigures}
      bounds={[-Infinity, Infinity]}
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

/** What linear probes, and the head itself, read off single tokens of held-out reviews. */
function Probes() {
  const model = state.checkpoint.value;
  const lines = Object.entries(data.labels.probes).flatMap(([method, name], n): Line[] => {
    const line = { colour: COLOURS[n], ...curve(data.probes, method, model) };
    if (method.startsWith("lens")) return [{ ...line, name, dash: "dashed" }];
    const { values } = curve(data.probes, method.replace(" ", "_control "), model);
    return [
      { ...line, name },
      { name: `${name}: labels at random`, colour: COLOURS[n], dash: "dotted", values },
    ];
  });
  const has = (start: string) => data.probes.some(({ method }) => method.startsWith(start));
  const missing = has("probe_class read")
    ? []
    : has("probe_class")
      ? ["The head reads several tokens, so no line is that of the one that it reads."]
      : ["No probe of the class: that takes training reviews of two classes."];
  return (
    <Chart
      id="probes"
      title={`Probes: what a single token's vector tells, ${modelText(model)}`}
      lines={lines}
      bounds={[0, 1]}
      above={
        <p>
          How often a linear probe, fitted to tokens of training reviews, is right on tokens of test reviews: about the
          review's class, which of the most frequent tokens it is, and where in the text it stands. Dotted: the same
          with labels dealt out at random, which is what a probe makes of nothing. Dashed: how often the fine-tuned
          model's own head, put on the token, names the class that it names for the review. A probe shows what could be
          read off a vector, not what the model uses. {missing}
        </p>
      }
    />
  );
}

/** What is drawn only once it is unfolded. */
export function More() {
  const open = useSignal(false);
  return (
    <details class="fold" id="more" onToggle={(e) => (open.value = e.currentTarget.open)}>
      <summary>More: steps of a layer, geometry, probes, removal test</summary>
      {open.value && (
        <>
          <VectorChart
            choice="stepMeasure"
            name="Steps of a layer"
            note={`What each part of a layer does to a vector. Cosine 1: direction unchanged; 0: orthogonal. ${headsNote} The selected word's own values are of the ${modelText(captured)} alone.`}
            labels={data.labels.stepMeasures}
            rows={data.steps}
            lineOf={({ step }) => step}
            names={data.labels.steps}
          />
          <VectorChart
            choice="geometryMeasure"
            name="Geometry"
            note="How the vectors of a text lie to each other at each capture point."
            labels={data.labels.geometry}
            rows={data.geometry}
            lineOf={({ point }) => point}
            names={data.labels.points}
          />
          {data.probes.length > 0 && <Probes />}
          {data.removal.length > 0 && <Removal />}
        </>
      )}
    </details>
  );
}
