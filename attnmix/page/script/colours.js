// The colours of the tokens on the map, and what they mean.

import { CAPTURED, checkpoints, data, documentOf, largestRatio, positionOf, ratioOf, readings } from "./data.js";
import { byId, element, inText, percent, ramp } from "./elements.js";
import { state } from "./state.js";

const VIRIDIS = ["#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725"].map(
  (colour) => [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16)),
);
// Okabe and Ito's colours, which people with any common colour blindness tell apart.
const KINDS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#B8A600"];

const luminance = (colour) => {
  const { r, g, b } = d3.rgb(colour);
  const [red, green, blue] = [r, g, b].map((each) => {
    const share = Math.min(Math.max(each, 0), 255) / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};

/** WCAG's contrast of a colour with the paper. */
function contrast(colour) {
  const [dark, light] = [luminance(colour), luminance(state.colours.paper)].toSorted((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

/** A colour, darker or lighter where it would not stand out from the paper by so much. */
export function legible(colour, least = 3) {
  const found = d3.lab(colour);
  while (contrast(found) < least && found.l > 0 && found.l < 100) found.l += state.dark ? 2 : -2;
  return found.toString();
}

/** A colour of the scale; the end that the paper would swallow is left out. */
function viridis(share) {
  const at = (state.dark ? 0.2 + 0.8 * share : 0.88 * share) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const mixed = VIRIDIS[low].map((from, i) => Math.round(from + (at - low) * (VIRIDIS[low + 1][i] - from)));
  return `rgb(${mixed.join(",")})`;
}

function ofDocument(number) {
  if (data.documents.length <= KINDS.length) return KINDS[number];
  return number === state.document ? KINDS[0] : state.colours.soft; // more texts than colours to tell apart
}

export function colourOf(token) {
  const number = documentOf[token];
  if (state.colour === "position") return viridis(positionOf(token) / Math.max(data.documents[number].length - 1, 1));
  if (state.colour === "class") return KINDS[readings[data.sites[state.point].reading].classes[token]];
  if (state.colour === "document") return ofDocument(number);
  const share = ratioOf(token, data.sites[state.point].layer, CAPTURED, state.method);
  return share === null ? state.colours.soft : viridis(share / largestRatio(CAPTURED, state.method));
}

function dotted(name, colour) {
  return element("span", {}, element("i", { style: `background: ${colour}` }), name);
}

function documentLegend() {
  if (data.documents.length <= KINDS.length)
    return data.documents.map((each, number) => dotted(each.name, KINDS[number]));
  return [dotted(data.documents[state.document].name, KINDS[0]), dotted("all others", state.colours.soft)];
}

function ratioLegend(scale) {
  if (!checkpoints.includes(CAPTURED)) return ["No ratios of the fine-tuned model: it was not measured."];
  if (data.sites[state.point].layer === 0) return ["Before the first layer nothing is mixed yet."];
  const how = `(${inText(data.labels.methods[state.method])}, ${inText(data.labels.checkpoints[CAPTURED])})`;
  return [
    ...ramp("length ratio of others 0 %", percent(largestRatio(CAPTURED, state.method)), scale),
    element("span", {}, how),
  ];
}

export function drawMapLegend() {
  const scale = VIRIDIS.map((_, i) => viridis(i / (VIRIDIS.length - 1)));
  const legends = {
    position: () => ramp("first token", "last token", scale),
    class: () => data.classNames.flatMap((name, kind) => (name ? [dotted(name, KINDS[kind])] : [])),
    document: documentLegend,
    ratio: () => ratioLegend(scale),
  };
  byId("map-legend").replaceChildren(...legends[state.colour]());
}
