// How far to trust the map: its scores beside chance, and what its moves have to do with those in the full space.

import { data, inOnePlane } from "./data.js";
import { byId, decimals, element, inText } from "./elements.js";
import { state } from "./state.js";

const score = (found) => (found === null ? "–" : decimals(found));

export function drawQuality() {
  const { whole, points } = data.quality[state.layout];
  const rowOf = (name) => {
    const [here] = points[state.point][name] || [null]; // the joint map has scores by point within points alone
    const cells = [whole[name][0], here, whole[name][1]].map((found) => element("td", {}, score(found)));
    return element(
      "tr",
      { "data-measure": name },
      element("th", { scope: "row" }, data.labels.mapMeasures[name]),
      ...cells,
    );
  };
  const rows = Object.keys(data.labels.mapMeasures).filter((name) => name in whole);
  byId("quality").tBodies[0].replaceChildren(...rows.map(rowOf));
}

const STEPS = { attention: "the attention step", ffn: "the feed-forward step", layer: "the whole" };
const PROJECTIONS = { pca: "PCA", random_projection: "random" };
const MEASURES = { partial_full_space: "given the moves in the full space", partial_position: "given the positions" };
const fixed = (low, high) => `${decimals(low, 2)} to ${decimals(high, 2)}`;

/** A mean rank correlation with its interval over texts; of one text, with its range over the seeds. */
function correlation(row) {
  if (row.mean === null) return "none (not defined)";
  const spread =
    row.ci_low !== null
      ? ` (95 % interval ${fixed(row.ci_low, row.ci_high)})`
      : row.seeds > 1
        ? ` (${fixed(row.lowest_seed, row.highest_seed)} with ${row.seeds} seeds)`
        : "";
  return decimals(row.mean, 2) + spread;
}

/** What moves on the map in one step have to do with a variable, and what stands against that. */
function against(here, name) {
  const own = here.filter((row) => row.against === name);
  const of = (layout, measure) => own.find((row) => row.layout === layout && row.measure === measure);
  const plain = of(state.layout, "spearman");
  if (!plain) return null;
  const others = [
    ...Object.entries(MEASURES).map(([measure, label]) => [label, of(state.layout, measure)]),
    ...Object.entries(PROJECTIONS).map(([layout, label]) => [`on the ${label} projection`, of(layout, "spearman")]),
  ].filter(([, row]) => row && row.mean !== null);
  const chance = of(state.layout, "permutation_null");
  const said = others.map(([label, row]) => `${label} ${decimals(row.mean, 2)}`);
  if (chance && chance.mean !== null) said.push(`by chance ${fixed(chance.ci_low, chance.ci_high)}`);
  return { row: plain, text: correlation(plain) + (said.length ? `; ${said.join(", ")}` : "") };
}

/** A sentence for each step of the layer, and one on how many texts they are about. */
function movement() {
  if (!inOnePlane(state.layout)) return ["Separate maps share no plane, so there is no trail from one to the next."];
  const { layer } = data.sites[state.point];
  const here = data.movement.filter((row) => row.layer === layer);
  const found = Object.entries(STEPS).map(([step, label]) => {
    const [full, mixed] = ["full_space", state.method].map((name) =>
      against(
        here.filter((row) => row.step === step),
        name,
      ),
    );
    return { label, full, mixed };
  });
  const captured = found.filter(({ full }) => full); // of the others a point before or after was not
  const sentences = captured.map(({ label, full, mixed }) => {
    const of = mixed ? ` With the mixing ratio: ${mixed.text}.` : "";
    const where = `In ${label} of ${inText(data.labels.layers[layer])}`;
    return `${where}, moves on this map have a rank correlation with moves in the full space of ${full.text}.${of}`;
  });
  if (sentences.length === 0) return [];
  const texts = Math.max(...captured.map(({ full }) => full.row.documents));
  const interval = "intervals are over texts";
  const said = texts > 1 ? `Means over ${texts} texts; ${interval}.` : "Of one text: there is no interval over texts.";
  return [...sentences, said];
}

export function drawMovement() {
  byId("movement").replaceChildren(...movement().map((text) => element("p", { class: "small" }, text)));
}
