// The pane of the map: which capture point and layout, how far to trust it, and the nearest words in the full space.

import { Canvas, KINDS, nameHere, playing, shown, SOFT, textColour, viridis, zoomBy } from "./canvas";
import * as run from "./data";
import { captured, checkpoints, data, documentOf, layouts, nearestTo, placesOf, positionOf } from "./data";
import { percent } from "./format";
import { set, state } from "./state";
import { Pane, Ramp, type Rows, Select, Slider, Term } from "./ui";
import { TokenLink } from "./words";

let timer = 0;
/** Walk through the capture points to the last, from the first if it stands there. */
function play(on = !playing.peek()): void {
  clearInterval(timer);
  playing.value = on;
  if (!on) return;
  const last = data.sites.length - 1;
  if (state.point.peek() === last) set({ point: 0 });
  timer = window.setInterval(() => {
    if (state.point.peek() >= last) play(false);
    else set({ point: state.point.peek() + 1 });
  }, 1000 / data.pointsPerSecond);
}

const HOW: Record<string, string> = {
  separate: "each point laid out alone (UMAP)",
  pca: "each point's two principal components (PCA)",
  aligned: "each point laid out near the one before (aligned UMAP)",
  joint: "all points in one plane (UMAP)",
};
const model = run.modelText(captured);
const textName = (token: number) => data.documents[documentOf[token]].name;
/** How many tokens lie nearer on the map than one of the nearest in the full space does, and it. */
function rankOnMap(token: number, other: number): string {
  const [x, y] = placesOf(state.layout.value, state.point.value);
  const far = (each: number) => (x[each] - x[token]) ** 2 + (y[each] - y[token]) ** 2;
  const nearer = shown.value.filter((each) => each !== token && far(each) < far(other));
  return Number.isNaN(far(other)) ? "" : `no. ${nearer.length + 1} on the map`;
}

const Nearest = ({ token }: { token: number }) => (
  <>
    <h4>
      Nearest to “<bdi>{nameHere(token)}</bdi>” in the full space
    </h4>
    <ol class="near" id="nearest">
      {nearestTo(token, state.point.value).map((other) => (
        <li>
          <TokenLink token={other} name={nameHere(other)}>
            {documentOf[other] !== documentOf[token] && ` of ${textName(other)}`}
          </TokenLink>
          <span class="small">{rankOnMap(token, other)}</span>
        </li>
      ))}
    </ol>
  </>
);

/** What share of neighbours the map keeps at this point, and what chance would keep. */
function Badge() {
  const [share, chance] = data.neighboursKept[state.layout.value][state.point.value];
  if (share === null) return null;
  return (
    <span class="badge" id="badge">
      <Term name="neighbours kept">keeps {percent(share, 0)} of neighbours</Term>
      {chance !== null && ` (chance ${percent(chance, 0)})`}
    </span>
  );
}

function Legend() {
  const scale = run.range(6).map((n) => viridis(n / 5));
  const { colour, document, method, point } = state;
  const keys = (entries: [string, string][]) =>
    entries.map(([name, each]) => (
      <span class="key">
        <i style={`background: ${each}`} />
        {name}
      </span>
    ));
  if (colour.value === "position") return <Ramp low="first word" high="last word" colours={scale.join()} />;
  if (colour.value === "class")
    return <>{keys(data.classNames.map((name, n): [string, string] => [name, KINDS[n]]).filter(([name]) => name))}</>;
  if (colour.value === "document") {
    const few = data.documents.length <= KINDS.length;
    const named = data.documents.map(({ name }, n): [string, string] => [name, textColour(n)]);
    return <>{keys(few ? named : [named[document.value], ["all others", SOFT]])}</>;
  }
  if (data.sites[point.value].layer === 0) return <>Before the first layer nothing is mixed yet.</>;
  const most = percent(run.largestRatio(captured, method.value));
  return (
    <>
      <Ramp low="mixing ratio 0%" high={most} colours={scale.join()} /> ({model}, {data.labels.methods[method.value]})
    </>
  );
}

const rows = (): Rows => {
  const [point, layout] = [state.point.value, state.layout.value];
  const [x, y] = placesOf(layout, point);
  const near = (token: number) => nearestTo(token, point).map((each) => `${nameHere(each)} (${positionOf(each)})`);
  return {
    columns: ["text", "position", "token", "x", "y", "nearest in the full space (position)"],
    rows: shown.value.map((token) => [
      ...[textName(token), positionOf(token), nameHere(token)],
      ...[x[token], y[token], near(token).join(" ")],
    ]),
    note: `${model}, ${layout} map, ${data.sites[point].label}; places on a map have no unit`,
  };
};

const Controls = () => (
  <div class="controls">
    <button id="play" aria-pressed={playing.value} onClick={() => play()}>
      {playing.value ? "Stop" : "Play"}
    </button>
    <Slider
      choice="point"
      class="wide"
      label={data.sites[state.point.value].label}
      between={[0, data.sites.length - 1]}
      on={() => play(false)}
    >
      <span class="unseen">Capture point, in forward order</span>
    </Slider>
    <Select choice="layout" label="Layout" options={layouts.map((each) => [each, `${each}: ${HOW[each]}`] as const)} />
    <Select
      choice="colour"
      label="Colour"
      options={[
        ["position", "position in the text"],
        ["class", "kind of word"],
        ...(checkpoints.includes(captured) ? [["ratio", "mixing ratio"] as const] : []),
        ["document", "text"],
      ]}
    />
  </div>
);

export function MapPane() {
  const { layout, point, token, whole, checkpoint } = state;
  const { label } = data.sites[point.value];
  const look = (all: boolean) => {
    set({ whole: all });
    zoomBy(0);
  };
  const title = (
    <>
      {label}, {HOW[layout.value]} <Badge />
    </>
  );
  return (
    <section id="map" aria-labelledby="map-title">
      <h2 id="map-title">
        Map <small>{model}</small>
      </h2>
      <p>
        Each point is a word's vector at one <Term name="capture point" />; near points are similar vectors, as far as
        two dimensions allow. Move through the model with the slider.
      </p>
      {checkpoint.value !== captured && (
        <p class="note" id="map-model">
          <b>The vectors of the {model} alone were captured</b>: this map, its neighbours and its colours are of that
          model, not of the {run.modelName(checkpoint.value)} one.
        </p>
      )}
      <Pane id="map-pane" title={title} file={`${layout.value} map, ${label}, ${model}`} rows={rows}>
        <Controls />
        <div class="side">
          <div>
            <Canvas />
            <p class="controls">
              <button aria-label="Zoom in" onClick={() => zoomBy(1.5)}>
                +
              </button>
              <button aria-label="Zoom out" onClick={() => zoomBy(1 / 1.5)}>
                −
              </button>
              {["Zoom to this text", "Show everything"].map((name, n) => (
                <button aria-pressed={whole.value === (n === 1)} onClick={() => look(n === 1)}>
                  {name}
                </button>
              ))}
              <span class="small">
                Drag to move. To zoom: + and −, two fingers, Ctrl with the wheel, or click the map first and use the
                wheel.
              </span>
            </p>
            <p class="legend" id="map-legend">
              <Legend />{" "}
              {token.value !== null &&
                `Thick ring: the selected word${run.inOnePlane(layout.value) ? ", the line its way here, numbered by layer" : ""}; thin rings: its nearest in the full space. `}
              {layout.value === "joint" &&
                data.ownBasis.length > 0 &&
                "Head outputs have a basis of their own, so their places do not compare with the rest."}
            </p>
            <p class="small">
              {!run.onMap(layout.value, point.value)
                ? `The ${layout.value} layout leaves this capture point out.`
                : shown.value.length < run.tokenCount &&
                  `${shown.value.length} of ${run.tokenCount} tokens are on this map (umap.max_points).`}
            </p>
          </div>
          <aside aria-label="Nearest words">{token.value !== null && <Nearest token={token.value} />}</aside>
        </div>
      </Pane>
    </section>
  );
}
