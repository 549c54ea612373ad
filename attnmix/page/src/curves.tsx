// The charts: the main result, all measures by layer, class shares, and probes.

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
/** The colours of both models by the names of their lines; they are the same in all views. */
const MODEL_COLOURS: Record<string, string> = { "Before fine-tuning": GREY, "After fine-tuning": COLOURS[0] };
const MAX_DOTS = 150; // reviews in the chart

const hasInterval = ({ low }: Line) => low?.some((each) => each !== null);
/** The lines of named series. A name with a colon, `A: B`, is dotted, in the colour of `A`. */
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

/** A sentence; terms in braces are links to the glossary. */
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
    <p class="small cautions">{data.cautions.answer}</p>
    <Grid />
  </section>
);

/** The chart of the main result by layer, with one line per model. */
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

/** The lines of a ratio: means over texts, with dots for the texts of the selected model; controls; selected token. */
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

/** A sentence on the change between both models in the selected layer; an empty string if it is not known. */
function changeText(measure: string): string {
  const layer = state.layer.value;
  const { values, low, high, texts } = data.curves[measure].difference ?? { values: [] };
  const [change, from] = [values[layer - 1], low?.[layer - 1]];
  if (typeof change !== "number") return "";
  const counted = `${texts} ${texts === 1 ? data.wording.texts.replace(/s$/, "") : data.wording.texts}`;
  const ends = typeof from === "number" ? [from, high[layer - 1]!] : [];
  const [mean, start, end] = pointsAlike([change, ...ends], ends.length > 0 ? ends : [change]);
  const interval = start
    ? `95% interval for this layer alone ${start} to ${end}, ${counted}`
    : `${counted}, too few for an interval`;
  const what = isDerivative(measure) ? "the other tokens' share of the derivative" : "this ratio";
  return `In layer ${layer}, ${data.wording.change} changes ${what} by ${mean} percentage points (${interval}).`;
}

/** A button that selects a measure, with a small chart of its means by layer. */
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

/** For pairs of texts: the ratio if only the tokens of one text, or only special tokens, count as other tokens. */
function PairSources({ measure }: { measure: string }) {
  const model = state.checkpoint.value;
  const lines = linesOf(data.sources[measure]?.[model]);
  if (lines.length === 0) return null;
  const title = `Own text and other text: ${measureName(measure)}, ${modelText(model)}`;
  return (
    <Chart id="sources-chart" title={title} lines={lines} bounds={[0, 1]}>
      <p class="small">
        Each line shows the ratio if only these tokens count as other tokens, so the lines do not add up to the whole
        ratio. Lines are means over the tokens of both texts of each pair.
      </p>
    </Chart>
  );
}

export function Layers() {
  const measure = state.measure.value;
  const lines = isDerivative(measure) ? meanLines(measure) : ratioLines(measure);
  const model = modelText(state.checkpoint.value);
  const controls = CONTROLS.filter(([control]) => data.controls[control]);
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
            {controls.length > 0 && " with its controls: "}
            {controls.map(([control], n) => (
              <>
                <span class="listed">
                  <ControlName control={control} />
                  {n < controls.length - 1 && ","}
                </span>
                {n < controls.length - 1 && " "}
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
            Each dot is the mean over the tokens of one of {Math.min(data.reviews.total, MAX_DOTS)} measured{" "}
            {data.wording.texts} ({model}). Lines are means over the tokens of all {data.wording.texts}, weighted by
            length{state.token.value !== null && ", except the line of the selected token"}
            {lines.some(hasInterval) && `; bands are 95% intervals over ${data.wording.texts}`}.
          </p>
        )}
      </Chart>
      <p class="small">
        By default, this chart shows “{measureName(data.method)}”, the ratio that covers most steps of attention. Other
        norm-based ratios cover fewer steps or the whole layer. Attention weights ignore the lengths of vectors.
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

/** The accuracies of linear probes, and of the classifier's head itself, on single tokens of test reviews. */
function Probes() {
  const model = state.checkpoint.value;
  const title = `Probes of single tokens' vectors, ${modelText(model)}`;
  const lines = linesOf(data.probes[model]);
  return (
    <Chart id="probes" title={title} lines={lines} bounds={[0, 1]}>
      <p>
        Solid lines show the test accuracy of linear probes that predict three labels from a token's vector: the class
        of its review, its identity among the most frequent tokens, and its position (0, 1, 2 to 3, 4 to 7, and so on).
        They are fitted to tokens of training reviews. Dotted lines are controls with permuted labels.{" "}
        {lines.some(({ dash }) => dash === "dashed") &&
          "The dashed line shows how often the fine-tuned model's classification head, applied to the vectors of tokens that it does not read, predicts the same class as the model predicts for the review. "}
        {lines.some(hasInterval) && `Bands show 95% intervals over ${data.wording.texts}. `}A probe shows which
        information a vector contains, not which information the model uses.
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

/** Charts of class shares and probes, drawn after unfolding; nothing if there are no classes. */
export function More() {
  const open = useSignal(false);
  if (Object.keys({ ...data.classShares, ...data.probes }).length === 0) return null;
  return (
    <details class="fold" id="more" onToggle={(e) => (open.value = e.currentTarget.open)}>
      <summary>More: the predicted class in contributions of other tokens, and probes of vectors</summary>
      {open.value && (
        <>
          {Object.keys(data.classShares).length > 0 && <ClassShares />}
          {Object.keys(data.probes).length > 0 && <Probes />}
        </>
      )}
    </details>
  );
}
