// The first screen: what the run found, the chart that shows it, and one sentence to touch.

import { CurvePane } from "./curves";
import { data } from "./data";
import { state } from "./state";
import { KeptBar } from "./text";
import { sentence, Words } from "./words";
import { shadeName, shownModel } from "./measures";
import { openTour } from "./tour";
import { Term } from "./ui";

const COLOURS = ["var(--before)", "var(--after)", "var(--before)", "var(--shared)", "var(--shuffled)", "var(--random)"];
const CLASSES = ["var(--before)", "var(--after)", "var(--random)"]; // before, after, classes dealt out at random
const SINGLE = ["var(--after)", "var(--shared)", "var(--shuffled)", "var(--random)"];

/** A sentence whose numbers stay with their signs. */
const whole = (said: string) => said.replaceAll(" %", "\u00a0%");

export function Answer() {
  const { headline, sentences, chart } = data.answer;
  const colours = chart.series.length === 3 ? CLASSES : chart.series.length < 4 ? SINGLE : COLOURS;
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
        <CurvePane id="answer-chart" first title={chart.title} lines={lines} height={290} bounds={[0, 1]}>
          <p class="small">
            {chart.unit}.{" "}
            {lines.some(({ low }) => low.some((each) => each !== null)) && "Bands: 95% intervals over reviews. "}
            <span class="noprint">Click a layer to select it everywhere.</span>
          </p>
        </CurvePane>
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
