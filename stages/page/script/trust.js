// How far to trust the map: its scores, and whether moves on it are those of the vectors.

import { data, inOnePlane } from "./data.js";
import { byId, element } from "./elements.js";
import { state } from "./state.js";

const MEASURES = data.labels.mapMeasures;

const number = (found) => (found === null ? "–" : found.toFixed(3));

export function drawQuality() {
  const { whole, points } = data.quality[state.layout];
  const rowOf = (name) => {
    const [here] = points[state.point][name] || [null]; // the joint map has no seeds' scores by point
    const cells = [whole[name][0], here, whole[name][1]].map((found) => element("td", {}, number(found)));
    return element("tr", { "data-measure": name }, element("th", { scope: "row" }, MEASURES[name]), ...cells);
  };
  const rows = Object.keys(MEASURES).filter((name) => name in whole);
  byId("quality").tBodies[0].replaceChildren(...rows.map(rowOf));
}

/** A rank correlation, that of the shown seed first, and its range over the seeds. */
function correlation([shown, ...refits]) {
  if (shown.spearman === null) return "none (constant)";
  const all = [shown, ...refits].map((row) => row.spearman).filter((each) => each !== null);
  const ends = [Math.min(...all), Math.max(...all)].map((each) => each.toFixed(2));
  const range = all.length > 1 ? ` (${ends.join(" to ")} with ${all.length} seeds)` : "";
  return shown.spearman.toFixed(2) + range;
}

function movement() {
  if (!inOnePlane(state.layout)) return "Separate maps share no plane, so there is no trail from one to the next.";
  const { layer } = data.sites[state.point];
  const step = data.wholeLayer.includes(state.method) ? "layer" : "attention";
  const moves = data.movement.filter((row) => row.layout === state.layout && row.layer === layer && row.step === step);
  const [full, mixed] = ["full_space", state.method].map((name) => moves.filter((row) => row.against === name));
  if (full.length === 0) return ""; // the points before and after the step were not captured
  const where = `In ${step === "layer" ? "the whole" : "the attention step"} of layer ${layer}`;
  const against = mixed.length === 0 ? "" : `, and of ${correlation(mixed)} with the mixing ratio`;
  return `${where}, moves on this map have a rank correlation of ${correlation(full)} with moves in the full space${against}.`;
}

export function drawMovement() {
  byId("movement").textContent = movement();
}
