// The pane of the map: which capture point and layout, how far to trust it, and the nearest words in the full space.

import { Canvas, besideText, fitted, kept, KINDS, nameHere, playing, shown, SOFT, viridis } from "./canvas";
import {
  captured,
  checkpoints,
  data,
  documentOf,
  inOnePlane,
  largestRatio,
  layouts,
  modelName,
  nameOf,
  nearestTo,
  onMap,
  placesOf,
  positionOf,
  range,
  tokenCount,
} from "./data";
import { percent } from "./format";
import { set, state } from "./state";
import { Check, Pane, Ramp, type Rows, Select, Term } from "./ui";

const zoomBy = (factor: number) =>
  document.getElementById("map-canvas")!.dispatchEvent(new CustomEvent("mapzoom", { detail: factor }));

let timer = 0;
/** Walk through the capture points to the last, from the first if it stands there. */
export function play(on = !playing.peek()): void {
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
  aligned: "each point laid out near the one before (aligned UMAP)",
  joint: "all points in one plane (UMAP)",
};

/** How many tokens lie nearer on the map than one of the nearest in the full space does. */
function rankOnMap(token: number, other: number): number | null {
  const [x, y] = placesOf(state.layout.value, state.point.value);
  const far = (each: number) => (x[each] - x[token]) ** 2 + (y[each] - y[token]) ** 2;
  const limit = far(other);
  return Number.isNaN(limit)
    ? null
    : x.reduce((count, _, each) => count + Number(each !== token && far(each) < limit), 0) + 1;
}

function Nearest({ token }: { token: number }) {
  const near = nearestTo(token, state.point.value);
  if (near.length === 0) return null;
  return (
    <>
      <h4>
        Nearest to “<bdi>{nameHere(token)}</bdi>” in the full space
      </h4>
      <ol class="near" id="nearest">
        {near.map((other) => {
          const rank = rankOnMap(token, other);
          return (
            <li>
              <button type="button" data-token={other} onClick={() => set({ token: other })}>
                <bdi>{nameHere(other)}</bdi>{" "}
                <small>
                  {positionOf(other)}
                  {documentOf[other] !== documentOf[token] && ` of ${data.documents[documentOf[other]].name}`}
                </small>
              </button>
              <span class="small">{rank !== null && `no. ${rank} on the map`}</span>
            </li>
          );
        })}
      </ol>
    </>
  );
}

function Scores() {
  const quality = data.quality[state.layout.value];
  const here = quality?.points[state.point.value] ?? {};
  const text = (value: number | null | undefined) => (value === null || value === undefined ? "–" : value.toFixed(2));
  return (
    <details class="fold">
      <summary>How far to trust this map</summary>
      <div class="scroll" tabIndex={0} role="region" aria-label="Scores of this map">
        <table id="quality">
          <thead>
            <tr>
              {["measure", "whole map", "this point", "chance"].map((each) => (
                <th scope="col">{each}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {Object.entries(data.labels.mapMeasures)
              .filter(([name]) => quality?.whole[name] || here[name])
              .map(([name, label]) => (
                <tr>
                  <th scope="row">{label}</th>
                  <td class="number">{text(quality.whole[name]?.[0])}</td>
                  <td class="number">{text(here[name]?.[0])}</td>
                  <td class="number">{text((here[name] ?? quality.whole[name])?.[1])}</td>
                </tr>
              ))}
          </tbody>
        </table>
      </div>
      <p class="small">
        Chance: the same map with positions shuffled. The 15 nearest neighbours are compared. Larger is better, except
        for the Procrustes distance.
        {state.layout.value === "joint" &&
          data.ownBasis.length > 0 &&
          " Head outputs live in a different basis, so their position on the joint map is not comparable with the rest."}
      </p>
    </details>
  );
}

export function MapPane() {
  const { layout, point, colour, everyone, words } = state;
  const [at, where] = [data.sites[point.value], layout.value];
  const badge = kept.value;
  const [, model] = [0, modelName(captured)];
  const candidates = everyone.value
    ? tokenCount
    : data.documents[state.document.value].length +
      (besideText.value === null ? 0 : data.documents[besideText.value].length);
  const rows = (): Rows => {
    const [x, y] = placesOf(where, point.value);
    return {
      columns: ["text", "position", "token", "x", "y", "nearest in the full space (position)"],
      rows: shown.value.map((token) => [
        data.documents[documentOf[token]].name,
        positionOf(token),
        nameHere(token),
        x[token],
        y[token],
        nearestTo(token, point.value)
          .map((near) => `${nameOf(near)} (${positionOf(near)})`)
          .join(" "),
      ]),
      note: `${model} model, ${where} map, ${at.label}; places on a map have no unit`,
    };
  };
  const scale = range(6)
    .map((n) => viridis(n / 5))
    .join(", ");
  const dots = (entries: [string, string][]) =>
    entries.map(([name, each]) => (
      <span class="key">
        <i style={`background: ${each}`} />
        {name}
      </span>
    ));
  const ratioKey =
    at.layer === 0 ? (
      <span>Before the first layer nothing is mixed yet.</span>
    ) : (
      <>
        <Ramp low="mixing ratio 0%" high={percent(largestRatio(`${captured} ${state.method.value}`))} colours={scale} />{" "}
        ({model} model, {data.labels.methods[state.method.value]})
      </>
    );
  const keys: Record<string, () => unknown> = {
    position: () => <Ramp low="first word" high="last word" colours={scale} />,
    class: () => dots(data.classNames.flatMap((name, n): [string, string][] => (name ? [[name, KINDS[n]]] : []))),
    document: () =>
      dots(
        data.documents.length <= KINDS.length
          ? data.documents.map(({ name }, n) => [name, KINDS[n]])
          : [
              [data.documents[state.document.value].name, KINDS[0]],
              ["all others", SOFT],
            ],
      ),
    ratio: () => ratioKey,
  };
  return (
    <section id="map" aria-labelledby="map-title">
      <h2 id="map-title">
        Map <small>{model} model</small>
      </h2>
      <p>
        Each point is a word's vector at one <Term name="capture point" />; near points are similar vectors, as far as
        two dimensions allow. Move through the model with the slider.
      </p>
      {state.checkpoint.value !== captured && (
        <p class="note" id="map-model">
          <b>The vectors of the {model} model alone were captured</b>: this map, its neighbours and its colours are of
          that model, not of the {modelName(state.checkpoint.value)} one.
        </p>
      )}
      <Pane
        id="map-pane"
        title={
          <>
            {at.label}, {HOW[where]}{" "}
            {badge && (
              <span class="badge" id="badge">
                <Term name="neighbours kept">keeps {percent(badge.share, 0)} of neighbours</Term>
                {badge.chance !== null && ` (chance ${percent(badge.chance, 0)})`}
              </span>
            )}
          </>
        }
        file={`${where} map, ${at.label}, ${model} model`}
        rows={rows}
      >
        <div class="controls">
          <button type="button" id="play" aria-pressed={playing.value} onClick={() => play()}>
            {playing.value ? "Stop" : "Play"}
          </button>
          <label class="wide">
            <span class="unseen">Capture point, in forward order</span>
            <input
              type="range"
              id="point"
              autocomplete="off"
              min="0"
              max={data.sites.length - 1}
              value={point.value}
              aria-valuetext={at.label}
              onInput={(e) => {
                play(false);
                set({ point: Number(e.currentTarget.value) });
              }}
            />
          </label>
          <Select
            id="layout"
            label="Layout"
            value={where}
            on={(value) => set({ layout: value })}
            options={layouts.map((each) => [each, `${each}: ${HOW[each]}`] as const)}
          />
          <Select
            id="colour"
            label="Colour"
            value={colour.value}
            on={(value) => set({ colour: value })}
            options={[
              ["position", "position in the text"],
              ["class", "kind of word"],
              ...(checkpoints.includes(captured) ? [["ratio", "mixing ratio"] as const] : []),
              ["document", "text"],
            ]}
          />
          <Check label="words" checked={words.value} on={(checked) => set({ words: checked })} />
          {data.documents.length > 1 && (
            <Check label="all texts" checked={everyone.value} on={(checked) => set({ everyone: checked })} />
          )}
        </div>
        <div class="side">
          <div>
            <Canvas />
            <p class="controls">
              <button type="button" aria-label="Zoom in" onClick={() => zoomBy(1.5)}>
                +
              </button>
              <button type="button" aria-label="Zoom out" onClick={() => zoomBy(1 / 1.5)}>
                −
              </button>
              <button
                type="button"
                aria-pressed={fitted.value}
                onClick={() => {
                  fitted.value = true;
                  zoomBy(0);
                }}
              >
                Zoom to this text
              </button>
              <button
                type="button"
                aria-pressed={!fitted.value}
                onClick={() => {
                  fitted.value = false;
                  zoomBy(0);
                }}
              >
                Show everything
              </button>
              <span class="small">
                Drag to move. To zoom: + and −, two fingers, Ctrl with the wheel, or click the map first and use the
                wheel.
              </span>
            </p>
            <p class="legend" id="map-legend">
              {keys[colour.value]() as never} {where === "joint" && "Grey: the vectors of all capture points. "}
              {state.token.value !== null &&
                `Thick ring: the selected word${inOnePlane(where) ? ", the line its way here, numbered by layer" : ""}; thin rings: its nearest in the full space.`}
            </p>
            <p class="small" id="map-note">
              {!onMap(where, point.value)
                ? `The ${where} layout leaves this capture point out.`
                : shown.value.length < candidates &&
                  `${shown.value.length} of ${candidates} tokens are on this map (umap.max_points).`}
            </p>
          </div>
          <aside aria-label="About this map">
            {state.token.value !== null && <Nearest token={state.token.value} />}
            <Scores />
          </aside>
        </div>
      </Pane>
    </section>
  );
}
