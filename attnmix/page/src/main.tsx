// The page: one bar of choices above four panes.

import { render } from "preact";
import { headCount } from "./attention";
import { Answer, Layers, More } from "./curves";
import { checkpoints, data, layerCount, positionOf } from "./data";
import { Heads } from "./heads";
import { MapPane } from "./map";
import { canChange, followAddress, printing, set, state } from "./state";
import { Text } from "./text";
import { Tour } from "./tour";
import { Select, Slider } from "./ui";
import { nameOf } from "./words";

const Models = () => (
  <fieldset>
    <legend class="unseen">Model</legend>
    {checkpoints.map((each) => (
      <label class="segment">
        <input
          type="radio"
          name="checkpoint"
          value={each}
          checked={state.checkpoint.value === each}
          onChange={() => set({ checkpoint: each })}
        />
        <span>{data.labels.checkpoints[each]}</span>
      </label>
    ))}
  </fieldset>
);

const Selected = ({ token }: { token: number }) => (
  <>
    <small>Word</small> “
    <b>
      <bdi>{nameOf(token)}</bdi>
    </b>
    ” <small>position {positionOf(token)}</small>{" "}
    <button id="clear" onClick={() => set({ token: null })}>
      Clear
    </button>
  </>
);

const Bar = () => (
  <div id="bar" role="region" aria-label="What is shown">
    {data.documents.length > 1 && (
      <Select
        choice="document"
        label="Text"
        options={data.documents.map(({ name, begins }, n) => [n, `${name}: ${begins}`] as const)}
      />
    )}
    {canChange && <Models />}
    <Slider choice="layer" class="depth" label={data.labels.layers[state.layer.value]} between={[1, layerCount]}>
      Layer <b>{data.encoder === null ? state.layer.value : data.labels.layers[state.layer.value]}</b>
    </Slider>
    <span id="selected" aria-live="polite">
      {state.token.value === null ? (
        <span class="small noprint">no word selected</span>
      ) : (
        <Selected token={state.token.value} />
      )}
    </span>
    <button id="tour-button" onClick={() => set({ tour: 1 })}>
      Tour
    </button>
  </div>
);

const Page = () => (
  <>
    <Bar />
    <Answer />
    <Layers />
    <section id="inside" aria-labelledby="inside-title">
      <h2 id="inside-title">Text{headCount > 0 && " and heads"}</h2>
      <Text />
      {headCount > 0 && <Heads />}
    </section>
    <MapPane />
    <More />
    <Tour />
  </>
);

followAddress();
render(<Page />, document.getElementById("app")!);
const root = document.documentElement;
root.dataset.drawn = "";
requestAnimationFrame(() => setTimeout(() => (root.dataset.ready = "yes")));
addEventListener("beforeprint", () => {
  printing.value = true;
  document.getElementById("printed")!.textContent = `Printed ${new Date().toISOString().slice(0, 10)}.`;
  for (const each of document.querySelectorAll<HTMLDetailsElement>("details.run")) each.open = true;
});
addEventListener("afterprint", () => (printing.value = false));
