// The view Map: the tokens at one capture point, the way that the selected one took, and its neighbours in full space.

import { besideNow } from "./beside.js";
import { follow } from "./camera.js";
import { PRINTED, keep } from "./charts.js";
import { colourOf } from "./colours.js";
import {
  CAPTURED,
  data,
  documentOf,
  holds,
  inOnePlane,
  limits,
  nearestTo,
  once,
  place,
  placesOf,
  positionOf,
  readings,
  tokens,
} from "./data.js";
import { byId, inText } from "./elements.js";
import { register } from "./panes.js";
import { state } from "./state.js";

const chart = byId("map-chart");
const SURROUNDINGS = 100_000; // points at most
const MARGIN = 12; // pixels around the map
const GAP = 2; // pixels between two maps
const MANY = 1500; // points that are drawn smaller

/** What a token is called at the chosen point. */
const nameHere = (token) => readings[data.sites[state.point].reading].names[token];

/** Not so on the joint map for a point whose vectors have a basis of their own. */
const comparable = (site) => state.layout !== "joint" || !data.ownBasis.includes(site.point);

/** From a place on the layout to pixels of the map without zoom; a unit is as long upwards as sideways. */
function projection(layout, width, height) {
  const [[left, right], [low, high]] = limits(layout);
  const scale = Math.min((width - 2 * MARGIN) / (right - left), (height - 2 * MARGIN) / (high - low));
  return (x, y) => [width / 2 + (x - (left + right) / 2) * scale, height / 2 - (y - (low + high) / 2) * scale];
}

/** Where the vectors of all points lie on a layout. */
const everywhere = once((layout) =>
  data.sites.flatMap((_, point) => {
    const [x, y] = placesOf(layout, point);
    return Array.from(x, (across, token) => [across, y[token]]).filter(([across]) => !Number.isNaN(across));
  }),
);

/** Where they lie on the joint map in pixels, so that the shown ones have their surroundings; of very many, a part. */
const cloudIn = once((size) => {
  const project = projection("joint", ...size.split(" ").map(Number));
  const all = everywhere("joint");
  const number = Math.min(all.length, SURROUNDINGS);
  const places = d3.range(number).map((i) => project(...all[Math.floor((i * all.length) / number)]));
  return { x: Float32Array.from(places, ([x]) => x), y: Float32Array.from(places, ([, y]) => y) };
});

/** The selected token's way to this point along the residual stream, or by every point; the last may be off it. */
function trailOf(project) {
  const { token, point, layout, excursions } = state;
  if (token === null || !inOnePlane(layout)) return [];
  const { reading } = data.sites[point]; // from an encoder's points none leads to a decoder's
  return data.sites.slice(0, point + 1).flatMap((site, number) => {
    const at = place(layout, number, token);
    const inStream = excursions || data.stream.includes(site.point);
    if (!at || site.reading !== reading || !comparable(site) || !(inStream || number === point)) return [];
    const end = site.point === "layer_output" && number !== point;
    return [{ at, place: project(...at), label: site.label, layer: site.layer, end, off: !inStream }];
  });
}

/** Everything that the picture shows of the state; places are pixels without zoom. */
function sceneOf() {
  const beside = textBeside();
  const [width, height] = sizeOfMap(beside !== null);
  const project = projection(state.layout, width, height);
  const [x, y] = placesOf(state.layout, state.point);
  const { token, shape, layout, point } = state;
  const shown = onMap();
  const here = new Set(shown);
  const words = shape === "words";
  const names = readings[data.sites[point].reading].names;
  const scene = {
    width,
    height,
    shown,
    here,
    anywhere: here,
    beside: null,
    title: null,
    layout,
    point,
    words,
    selected: here.has(token) ? token : null,
    cloud: layout === "joint" ? cloudIn(`${width} ${height}`) : null,
    trail: trailOf(project),
    near: here.has(token) ? nearestTo(token, point).filter((each) => here.has(each)) : [],
    byColour: Map.groupBy(shown, colourOf),
    radius: words ? 3.2 : shown.length > MANY ? 2.2 : 4.2,
    colours: state.colours,
    nameHere: (each) => names[each],
    base: once((each) => project(x[each], y[each])),
    continues: inOnePlane(layout),
    sharper: state.printing ? 2 : devicePixelRatio,
    view: state.view,
  };
  return beside === null ? scene : withBeside(scene, beside);
}

/** The number of the text whose map stands beside; of models the captured one alone has maps. */
function textBeside() {
  const shown = besideNow();
  return Number.isInteger(shown) ? shown : null;
}

const STACKED = 560; // pixels of width, below which two maps stand one above the other

/** Of each map; two share the place of one. */
function sizeOfMap(two) {
  const [width, height] = state.printing ? [PRINTED.width, PRINTED.tall] : [chart.clientWidth, chart.clientHeight];
  if (!two) return [width, height];
  return width < STACKED ? [width, (height - GAP) / 2] : [(width - GAP) / 2, height];
}

/** A scene with another text's beside it, in the same plane and through the same zoom. */
function withBeside(scene, number) {
  const shown = tokensOn(number);
  const anywhere = new Set([...scene.shown, ...shown]);
  const other = {
    ...scene,
    shown,
    here: new Set(shown),
    selected: null,
    near: [],
    trail: [],
    byColour: Map.groupBy(shown, colourOf),
    title: data.documents[number].name,
  };
  return { ...scene, anywhere, beside: other, title: data.documents[state.document].name };
}

/** The tokens of a text, or of all, that have a place. */
function tokensOn(number = null) {
  const [x] = placesOf(state.layout, state.point);
  return tokens.filter((each) => !Number.isNaN(x[each]) && (number === null || documentOf[each] === number));
}

/** The tokens that are shown; of a text that has another beside it, its own. */
function onMap() {
  const alone = !state.everyone || textBeside() !== null;
  return tokensOn(alone ? state.document : null);
}

const withBesides = () => [...onMap(), ...(textBeside() === null ? [] : tokensOn(textBeside()))];

/** Of how many vectors the surroundings are a part. */
function saidOfCloud() {
  const all = state.layout === "joint" ? everywhere("joint").length : 0;
  return all > SURROUNDINGS ? `The surroundings are ${SURROUNDINGS} of the ${all} vectors of all points.` : "";
}

/** What the marks are besides the tokens of this point. */
export function drawMapKey() {
  const { token, point, layout } = state;
  const said = layout === "joint" ? ["Grey: the vectors of all capture points."] : [];
  if (token !== null && place(layout, point, token)) {
    const near = nearestTo(token, point).length > 0 ? ", thin rings its nearest in the full space" : "";
    const way = inOnePlane(layout) ? ", the line its way here, numbered by layer" : "";
    said.push(`The thick ring is the selected token${near}${way}.`);
  }
  byId("map-key").textContent = said.join(" ");
}

export function drawNote() {
  const shown = onMap();
  const two = textBeside() !== null;
  const candidates = state.everyone && !two ? tokens.length : data.documents[state.document].length;
  const off = state.token !== null && !shown.includes(state.token) ? " The selected token is not among them." : "";
  const note = holds(state.layout, state.point)
    ? `${shown.length} of ${candidates} tokens are on this map (umap.max_points).${off}`
    : `The ${state.layout} layout leaves this capture point out.`;
  const models =
    besideNow() !== null && !two ? `Maps are of the ${inText(data.labels.checkpoints[CAPTURED])} model alone.` : "";
  byId("map-note").textContent = [shown.length === candidates ? "" : note, saidOfCloud(), models]
    .filter(Boolean)
    .join(" ");
  byId("everyone").disabled = two;
  chart.setAttribute(
    "aria-label",
    `${state.layout} map, ${data.sites[state.point].label}: ${withBesides().length} tokens${two ? " of two texts" : ""}`,
  );
}

/** What is drawn, for who checks it: places on the layout and in pixels. */
function drawnOf({ shown, byColour, trail, near, selected, base, layout, point, beside }, labelled, zoomed) {
  const coloured = [...byColour, ...(beside?.byColour ?? [])];
  const colours = new Map(coloured.flatMap(([colour, all]) => all.map((token) => [token, colour])));
  const of = (name, all) => {
    const [points, pixels] = [all.map((token) => place(layout, point, token)), all.map((token) => zoomed(base(token)))];
    return { name, tokens: all, points, pixels, colours: all.map((token) => colours.get(token)) };
  };
  const words = { ...of("words", [...labelled.keys()]), moved: [...labelled.values()] };
  return [
    of("tokens", shown),
    { ...words, text: words.tokens.map(nameHere) },
    { name: "trail", points: trail.map(({ at }) => at), text: trail.map(({ label }) => label) },
    of("selected", selected === null ? [] : [selected]),
    of("near", near),
    of("beside", beside?.shown ?? []),
  ].filter(({ points }) => points.length > 0);
}

export function drawMap() {
  const scene = sceneOf();
  follow(scene, (labelled, zoomed) => keep(chart, () => drawnOf(scene, labelled, zoomed)));
}

function rowsOfMap() {
  const [x, y] = placesOf(state.layout, state.point);
  return withBesides().map((token) => {
    const near = nearestTo(token, state.point).map((other) => `${nameHere(other)} (${positionOf(other)})`);
    return [
      data.documents[documentOf[token]].name,
      positionOf(token),
      nameHere(token),
      x[token],
      y[token],
      near.join(" "),
    ];
  });
}

register("map-chart", () => ({
  columns: ["text", "position", "token", "x", "y", "nearest in the full space (position)"],
  rows: rowsOfMap(),
}));
