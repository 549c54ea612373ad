// The charts: what the run found, every measure by layer, and what is shared and read of classes.

import * as Plot from "@observablehq/plot";
import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { Chart, type Line } from "./chart";
import { checkpoints, data, layers, type Maybe, modelText, ratioOf, reviewRatios } from "./data";
import { Grid } from "./grid";
import { pointsAlike } from "./format";
import { set, state } from "./state";
import { type GLOSSARY, Term } from "./ui";
import { nameOf } from "./words";

const GREY = "var(--before)";
const COLOURS = ["after", "shared", "shuffled", "mark", "random", "ink", "before"].map((name) => `var(--${name})`);
/** The colours of both models, by the names of their lines: in all views the same. */
const MODEL_COLOURS: Record<string, string> = { "Before fine-tuning": GREY, "After fine-tuning": COLOURS[0] };
const MAX_DOTS = 150; // reviews in the chart

const hasInterval = ({ low }: Line) => low?.some((each) => each !== null);
/** Lines by their names; what is named `… : …` is a control of the line before. */
const linesOf = (series: Record<string, { values: Maybe[] }> = {}) => {
  const measured = (name: string) => name.split(":")[0];
  const names = [...new Set(Object.keys(series).map(measured))];
  return Object.entries(series).map(([name, each]): Line => {
    const n = names.indexOf(measured(name));
    const other = name.includes(":") || n >= COLOURS.length ? "dotted" : undefined;
    const dash = /^(Random|The head)/.test(name) ? "dashed" : other;
    const colour = MODEL_COLOURS[name] ?? COLOURS[n % COLOURS.length];
    return { ...each, name, colour, dash };
  });
};

/** A sentence whose words in braces are terms of the glossary. */
const Sentence = ({ text }: { text: string }) => (
  <>
    {text
      .split(/[{}]/)
      .map((part, n) => (n % 2 ? <Term name={part.toLowerCase() as keyof typeof GLOSSARY}>{part}</Term> : part))}
  </>
);

export const Answer = () => (
  <section id="answer" aria-labelledby="headline">
    <h1 id="headline">{data.answer.headline}</h1>
    <ul class="lead">
      {data.answer.sentences.map((text) => (
        <li>
          <Sentence text={text} />
        </li>
      ))}
    </ul>
    <Grid />
  </section>
);

/** What the run found, by layer: before, after and by chance; or the models, and the same with a control. */
function AnswerChart() {
  const { title, series, unit, means } = data.answer.chart;
  const lines = series.map((each, n): Line => ({
    ...each,
    colour: series.length === 1 ? COLOURS[0] : [GREY, COLOURS[0]][n % 2],
    dash: n < 2 ? undefined : "dashed",
  }));
  return (
    <Chart id="answer-chart" title={title} lines={lines} height={290} bounds={[0, 1]}>
      <p class="small">
        {unit}. {means} {lines.some(hasInterval) && `Bands show 95% intervals over ${data.wording.texts}. `}
        <span class="noprint">Click a layer to select it everywhere.</span>
      </p>
    </Chart>
  );
}

const CONTROLS: [name: string, colour: string, dash: Line["dash"]][] = [
  ["text_mean_value", COLOURS[1], "dashed"],
  ["corpus_value", COLOURS[1], "dotted"],
  ["shuffled_words", COLOURS[2], "dotted"],
  ["random_weights", COLOURS[4], "dotted"],
];
const CONTROL_TERMS: Record<string, Parameters<typeof Term>[0]["name"]> = {
  text_mean_value: "shared value",
  corpus_value: "other texts' values",
  shuffled_words: "words shuffled",
};

function ControlName({ control }: { control: string }) {
  const label = data.labels.controls[control]!;
  const name = label[0]!.toLowerCase() + label.slice(1);
  const term = CONTROL_TERMS[control];
  return term ? <Term name={term}>{name}</Term> : <>{name}</>;
}

const isDerivative = (measure: string) => measure in data.labels.derivatives;
const measureName = (measure: string) => data.labels.derivatives[measure] ?? data.labels.methods[measure];

const meanLines = (measure: string) =>
  checkpoints.map((checkpoint): Line => {
    const colour = checkpoint === checkpoints.at(-1) ? COLOURS[0] : GREY;
    return { name: data.labels.checkpoints[checkpoint], colour, ...data.curves[measure][checkpoint] };
  });

/** A ratio's means with the reviews of the chosen model, its controls, and the selected token's own course. */
function ratioLines(measure: string): Line[] {
  const [model, token] = [state.checkpoint.value, state.token.value];
  const dots = layers.map((layer) => reviewRatios(layer, model, measure).slice(0, MAX_DOTS));
  const hasDots = (n: number) => checkpoints[n] === model && data.reviews.names.length > 1;
  const means = meanLines(measure).map((line, n) => (hasDots(n) ? { ...line, dots } : line));
  const controls = CONTROLS.map(([control, colour, dash]): Line => {
    const { values = [] } = data.controls[control]?.[measure]?.[control === "random_weights" ? "random" : model] ?? {};
    return { name: data.labels.controls[control], colour, dash, values };
  });
  if (token === null) return [...means, ...controls];
  const values = layers.map((layer) => ratioOf(token, layer, model, measure));
  return [...means, ...controls, { name: `“${nameOf(token)}”`, colour: COLOURS[3], dash: "dotted", values }];
}

/** What fine-tuning changed in the chosen layer, in one sentence. */
function changeText(measure: string): string {
  const layer = state.layer.value;
  const { values, low, high, texts } = data.curves[measure].difference ?? { values: [] };
  const [change, from] = [values[layer - 1], low?.[layer - 1]];
  if (typeof change !== "number") return "";
  const counted = `${texts} ${texts === 1 ? data.wording.texts.replace(/s$/, "") : data.wording.texts}`;
  const ends = typeof from === "number" ? [from, high[layer - 1]!] : [];
  const [mean, start, end] = pointsAlike([change, ...ends], ends.length > 0 ? ends : [change]);
  const interval = start ? `95% interval ${start} to ${end}, ${counted}` : `${counted}, too few for an interval`;
  const what = isDerivative(measure) ? "the other tokens' share of the derivative" : "this ratio";
  return `In layer ${layer}, ${data.wording.change} changes ${what} by ${mean} percentage points (${interval}).`;
}

/** A measure's means by layer as a small picture, by which it is chosen. */
function Thumb({ measure }: { measure: string }) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const lines = meanLines(measure).map(({ values, colour }) =>
      Plot.lineY(values, { stroke: colour, strokeWidth: 2 }),
    );
    const looks = { width: 132, height: 46, margin: 4, axis: null, y: { zero: true } };
    box.current!.replaceChildren(Plot.plot({ ...looks, marks: lines }));
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
  const model = state.checkpoint.value;
  const lines = linesOf(data.sources[measure]?.[model]);
  if (lines.length === 0) return null;
  const title = `Own text and other text: ${measureName(measure)}, ${modelText(model)}`;
  return (
    <Chart id="sources-chart" title={title} lines={lines} bounds={[0, 1]}>
      <p class="small">
        Each line is the ratio with only these tokens counted as others, so the three do not add up to the whole ratio.
        Means over the tokens of both texts of each pair.
      </p>
    </Chart>
  );
}

export function Layers() {
  const measure = state.measure.value;
  const lines = isDerivative(measure) ? meanLines(measure) : ratioLines(measure);
  const model = modelText(state.checkpoint.value);
  return (
    <section id="layers" aria-labelledby="layers-title">
      <h2 id="layers-title">Layers</h2>
      <AnswerChart />
      <p>
        {isDerivative(measure) ? (
          <>
            <Term name="derivative">Derivatives</Term> show how strongly a token's output depends on the other tokens'
            inputs within one layer.
          </>
        ) : (
          <>
            The chart below shows the <Term name="mixing ratio of one layer">mixing ratio</Term> by layer
            {CONTROLS.filter(([control]) => data.controls[control]).map(([control], n) => (
              <>
                {n === 0 ? ", with its controls: " : ", "}
                <ControlName control={control} />
              </>
            ))}
            .
          </>
        )}{" "}
        <span aria-live="polite" id="difference">
          {changeText(measure)}
        </span>
      </p>
      <Chart
        id="layers-chart"
        title={measureName(measure) + (isDerivative(measure) ? "" : `; controls and token: ${model}`)}
        lines={lines}
        height={380}
        bounds={[0, 1]}
      >
        {lines.some(({ dots }) => dots) && (
          <p class="small">
            Each dot is one of {Math.min(data.reviews.total, MAX_DOTS)} measured {data.wording.texts} ({model}), the
            mean over its tokens. Lines are means over the tokens of all {data.wording.texts}, of which long ones count
            more{state.token.value !== null && ", except the line of the selected token"}
            {lines.some(hasInterval) && `; bands are 95% intervals over ${data.wording.texts}`}.
          </p>
        )}
      </Chart>
      <p class="small">
        This chart opens with “{measureName(data.method)}”, the ratio that covers most of what attention does to a
        vector. Other norm-based ratios stop earlier or go on to the layer's end. Attention weights ignore the vectors'
        lengths.
        {Object.keys(data.labels.derivatives).length > 0 && " Derivatives show what the output depends on."}
      </p>
      <div class="thumbs" role="group" aria-label="Measures">
        {[...data.ratios.methods, ...Object.keys(data.labels.derivatives)].map((each) => (
          <Thumb measure={each} />
        ))}
      </div>
      <PairSources measure={measure} />
    </section>
  );
}

/** What linear probes, and the head itself, read off single tokens of held-out reviews. */
function Probes() {
  const model = state.checkpoint.value;
  const title = `Probes: what a single token's vector tells, ${modelText(model)}`;
  const lines = linesOf(data.probes[model]);
  return (
    <Chart id="probes" title={title} lines={lines} bounds={[0, 1]}>
      <p>
        Solid lines show how often a linear probe, fitted to tokens of training reviews, is right on tokens of test
        reviews: about the review's class, which of the most frequent tokens it is, and its group of positions (0, 1, 2
        to 3, 4 to 7, and so on). Dotted lines show the same with labels dealt out at random, as a control.{" "}
        {lines.some(({ dash }) => dash === "dashed") &&
          "The dashed line shows how often the fine-tuned model's own head, applied to the token, names the review's predicted class. "}
        {lines.some(hasInterval) && `Bands show 95% intervals over ${data.wording.texts}. `}A probe shows what could be
        read off a vector, not what the model uses.
      </p>
    </Chart>
  );
}

const ClassShares = () => (
  <Chart
    id="class-shares"
    title="The predicted class in contributions of other tokens"
    lines={linesOf(data.classShares)}
    bounds={[0, 1]}
  >
    <p>
      Lines show the share of the squared length of the contributions of other tokens that is common to the texts of a
      predicted class, excluding the share common to all texts. Bands show 95% intervals over reviews, for this one
      training run.
    </p>
  </Chart>
);

/** What is drawn only once it is unfolded; nothing without classes. */
export function More() {
  const open = useSignal(false);
  if (Object.keys({ ...data.classShares, ...data.probes }).length === 0) return null;
  return (
    <details class="fold" id="more" onToggle={(e) => (open.value = e.currentTarget.open)}>
      <summary>More: the predicted class in what tokens give, and what probes read</summary>
      {open.value && (
        <>
          {Object.keys(data.classShares).length > 0 && <ClassShares />}
          {Object.keys(data.probes).length > 0 && <Probes />}
        </>
      )}
    </details>
  );
}
