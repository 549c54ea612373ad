// The pane of the map: controls, quality, legend, and nearest neighbours in the full space.

import { Canvas, classColour, classes, nameHere, playing, shown, SOFT, textColour, viridis, zoomBy } from "./canvas";
import { kindColours } from "./colours";
import * as run from "./data";
import { captured, checkpoints, data, documentOf, layouts, nearestTo, placesOf, positionOf } from "./data";
import { percent } from "./format";
import { ratio, set, state } from "./state";
import { Pane, Ramp, rowsOf, Select, Slider, Term } from "./ui";
import { TokenLink } from "./words";

let timer = 0;
/** Start or stop the animation through the capture points; it starts again after the last one. */
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
  pca: "PCA: two principal components of each capture point",
  aligned: "UMAP, each capture point aligned with the previous one",
  joint: "UMAP, all capture points in one plane",
  separate: "UMAP, each capture point separately",
};
const COLOURS = {
  document: "text",
  ...(classes.length > 0 ? { predicted: "predicted class of the text" } : {}),
  ...(checkpoints.includes(captured) ? { ratio: "mixing ratio" } : {}),
  ...{ class: "kind of token", position: "position in the text" },
};
const model = run.modelText(captured);
const textName = (token: number) => data.documents[documentOf[token]].title;

/** The share of neighbours that the map keeps at the capture point, and the share by chance. */
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
  const { colour, document, point } = state;
  const ramp = run.range(6).map((n) => ({ at: n / 5, colour: viridis(n / 5) }));
  if (colour.value === "position")
    return (
      <>
        <Ramp low="first" high="last" colours={ramp} /> token of the text.
      </>
    );
  if (colour.value === "ratio") {
    if (data.sites[point.value].layer === 0) return <>There is no mixing before the first layer.</>;
    const most = percent(run.largestRatio(captured, ratio.value));
    return (
      <>
        <Ramp low="0%" high={most} colours={ramp} /> mixing ratio ({model}, {data.labels.methods[ratio.value]}).
      </>
    );
  }
  const named = data.documents.map(({ name }, n): [string, string] => [name, textColour(n)]);
  const kinds = kindColours();
  const keys: Record<string, string[][]> = {
    document: named.length <= kinds.length ? named : [named[document.value], ["all others", SOFT]],
    predicted: classes.map((name) => [name, classColour(name)]),
    class: data.classNames.map((name, n) => [name, kinds[n]]).filter(([name]) => name),
  };
  return (
    <>
      {keys[colour.value].map(([name, each]) => (
        <span class="key">
          <i style={`background: ${each}`} />
          {name}
        </span>
      ))}
    </>
  );
}

function rows() {
  const [point, layout] = [state.point.value, state.layout.value];
  const [x, y] = placesOf(layout, point);
  const near = (token: number) => nearestTo(token, point).map((each) => `${nameHere(each)} (${positionOf(each)})`);
  return rowsOf(
    { model, layout, "capture point": data.sites[point].label },
    {
      columns: ["text", "position", "token", "x", "y", "nearest in the full space (position)"],
      rows: shown.value.map((token) => [
        ...[textName(token), positionOf(token), nameHere(token)],
        ...[x[token], y[token], near(token).join(" ")],
      ]),
    },
  );
}

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
    <Select choice="layout" label="Layout" names={HOW} options={layouts} />
    <Select choice="colour" label="Colour" names={COLOURS} />
  </div>
);

export function MapPane() {
  const { layout, point, token, checkpoint } = state;
  const { label } = data.sites[point.value];
  const title = (
    <>
      {label}, {HOW[layout.value].replace(/.*: /, "")} <Badge />
    </>
  );
  return (
    <section id="map" aria-labelledby="map-title">
      <h2 id="map-title">
        Map <small>{model}</small>
      </h2>
      <p>
        Each dot represents a token's vector at one <Term name="capture point" />, which the slider selects. Nearby dots
        represent similar vectors, as far as two dimensions allow. {data.cautions.map[layout.value]}
      </p>
      {data.mapNote && (
        <p class="note" id="map-note">
          {data.mapNote}
        </p>
      )}
      {checkpoint.value !== captured && (
        <p class="note" id="map-model">
          <b>Only the vectors of the {model} were captured</b>. This map, its neighbours and its colours show that
          model, not the {run.modelName(checkpoint.value)} one.
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
              <button onClick={() => zoomBy(0)}>Show all texts</button>
              <span class="small">
                Drag to move the map. To zoom, use + and −, two fingers, or Ctrl with the wheel. After a click on the
                map, the wheel alone suffices.
              </span>
            </p>
            <p class="legend" id="map-legend">
              <Legend />
              {token.value !== null &&
                " Thick ring: the selected token; thin rings: its nearest neighbours in the full space."}
              {layout.value === "pca" &&
                " Each kind of capture point has the same scale in all layers, so the sizes of clouds can be compared."}
              {layout.value === "joint" &&
                data.ownBasis.length > 0 &&
                " The outputs of attention heads have a different basis, so their dots cannot be compared with other dots."}
            </p>
            <p class="small">
              {data.maps[layout.value].absent.includes(point.value)
                ? `The ${layout.value} layout omits this capture point.`
                : shown.value.length < run.tokenCount &&
                  `${shown.value.length} of ${run.tokenCount} tokens are on this map${data.wording.map_limit && ` (${data.wording.map_limit})`}.`}
            </p>
          </div>
          <aside aria-label="Nearest tokens">
            {token.value !== null && (
              <>
                <h4>
                  Nearest to “<bdi>{nameHere(token.value)}</bdi>” in the full space
                </h4>
                <ol class="near" id="nearest">
                  {nearestTo(token.value, point.value).map((other) => (
                    <li>
                      <TokenLink token={other} name={nameHere(other)}>
                        {documentOf[other] !== documentOf[token.value!] && ` in ${textName(other)}`}
                      </TokenLink>
                    </li>
                  ))}
                </ol>
                <p class="small">The number next to a token is its position in its text; positions start at 0.</p>
              </>
            )}
          </aside>
        </div>
      </Pane>
    </section>
  );
}
