// The first screen: what the run found, the chart that shows it, and one sentence to touch.

import { Chart } from "./chart";
import { data, layers } from "./data";
import { percent } from "./format";
import { set, state } from "./state";
import { KeptBar } from "./text";
import { sentence, Words } from "./words";
import { shadeName, shownModel } from "./measures";
import { openTour } from "./tour";
import { Pane, Term } from "./ui";

const COLOURS = ["var(--before)", "var(--after)", "var(--before)", "var(--shared)", "var(--shuffled)", "var(--random)"];
const SINGLE = ["var(--after)", "var(--shared)", "var(--shuffled)", "var(--random)"];

/** A sentence whose numbers stay with their signs. */
const whole = (said: string) => said.replaceAll(" %", "\u00a0%");

export function Answer() {
  const { headline, sentences, chart } = data.answer;
  const colours = chart.series.length < 4 ? SINGLE : COLOURS;
  const lines = chart.series.map(({ name, values, low, high }, n) => ({
    name,
    colour: colours[n % colours.length],
    values,
    low,
    high,
    dash: n < chart.series.length / 2 ? undefined : "5 4",
  }));
  const token = state.token.value;
  return (
    <section id="answer" aria-labelledby="headline">
      <h1 id="headline">{whole(headline)}</h1>
      <div class="first">
        <div>
          <ul class="lead">
            {sentences.map((each) => (
              <li>{whole(each)}</li>
            ))}
          </ul>
          <p class="noprint">
            <button type="button" class="strong" onClick={() => openTour(1)}>
              Show me, in six steps
            </button>{" "}
            <span class="small">
              Words to know: <Term name="mixing ratio" />, <Term name="shared value" />, <Term name="derivative" />,{" "}
              <Term name="interval">95% interval</Term>
            </span>
          </p>
        </div>
        <Pane
          id="answer-chart"
          first
          title={chart.title}
          file={chart.title}
          rows={() => ({
            columns: ["layer", ...lines.flatMap(({ name }) => [name, `${name}, 95% from`, `${name}, 95% to`])],
            rows: layers.map((layer, i) => [
              layer,
              ...lines.flatMap(({ values, low, high }) => [values[i], low[i] ?? null, high[i] ?? null]),
            ]),
          })}
        >
          <Chart
            label={`${chart.title}. ${lines.map(({ name, values }) => `${name}: ${values.map((each) => (each === null ? "–" : percent(each, 0))).join(", ")}`).join(". ")}`}
            x={layers.map(String)}
            title="layer"
            height={290}
            format={(value) => percent(value, 0)}
            bounds={[0, 1]}
            chosen={state.layer.value - 1}
            choose={(place) => set({ layer: place + 1 })}
            lines={lines}
          />
          <p class="small">
            {chart.unit}.{" "}
            {lines.some(({ low }) => low.some((each) => each !== null)) && "Bands: 95% intervals over reviews. "}
            <span class="noprint">Click a layer to select it everywhere.</span>
          </p>
        </Pane>
      </div>
      <div class="sentence">
        <p class="small">
          One sentence of <bdi>{data.documents[state.document.value].name}</bdi>, layer {state.layer.value},{" "}
          {shownModel()}: the darker a word, the larger its {shadeName()}. <span class="noprint">Click a word.</span>
        </p>
        <Words
          id="sentence"
          tokens={sentence.value}
          prefix="word-"
          label="One sentence"
          checkpoint={state.checkpoint.value}
          change={state.change.value}
        />
        {token !== null && <KeptBar token={token} />}
      </div>
    </section>
  );
}
