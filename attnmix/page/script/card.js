// The card of the selected token: what it kept, took and gave, by the measure that shades the words, and its course.

import { checkpoints, data, positionOf, ratioOf } from "./data.js";
import { byId, drawing, element, inText, percent, signed } from "./elements.js";
import { exchanged, measureName, minus, modelName, othersByMeasure, tookFrom } from "./measures.js";
import { register } from "./panes.js";
import { change, state } from "./state.js";
import { lookedAt, nameThere, tokenAt } from "./words.js";

const LISTED = 8;
const NOT_HERE =
  "What this text's words took from each other is not on the page, which would grow too large; " +
  "it is in features/measure/contributions.";
const NOT_MEASURED = "Contribution matrices were not measured (measure.matrices).";
const NOT_TRUSTED = "The row of this token is too small to be told from rounding, so it is not shown.";
const WIDE = 300; // pixels of the course
const TALL_COURSE = 84;
const COURSE = { left: 34, right: 112, top: 8, bottom: 20 };
const layersThere = Array.from({ length: data.ratios.layers }, (_, i) => i + 1);

const asShare = (share) => (state.difference ? `${signed(100 * share, 0)} points` : percent(share));
const rollout = () => state.matrix.endsWith("_rollout");

/** Of the model that is shown, or what fine-tuning changed. */
function othersNow(token, layer) {
  if (!state.difference) return othersByMeasure(token, layer, state.checkpoint);
  return minus(...checkpoints.toReversed().map((each) => othersByMeasure(token, layer, each)));
}

function keptLine(looked) {
  const where = `${rollout() ? "from the embedding to" : "in"} ${inText(data.labels.layers[state.layer])}`;
  const by = `By ${measureName()}, ${where}, ${modelName()}`;
  const others = othersNow(looked, state.layer);
  if (state.difference) return element("p", {}, `${by}: `, element("b", {}, asShare(others)), " from others.");
  return element(
    "p",
    {},
    `${by}: `,
    element("b", {}, `kept ${percent(1 - others)}`),
    ` itself, ${percent(others)} from others.`,
  );
}

/** Words are shaded by the ratio then, which is another measure than that of the shares. */
function ratioLine(looked) {
  const share = ratioOf(looked, state.layer, state.checkpoint, state.method);
  if (state.shade !== "ratio" || share === null) return [];
  const by = inText(data.labels.methods[state.method]);
  return [
    element(
      "p",
      { class: "small" },
      `Its shade is another measure, the length ratio of others: ${percent(share)} (${by}).`,
    ),
  ];
}

function listed(found, kind) {
  const most = Math.abs(found[0].share);
  const items = found.slice(0, LISTED).map(({ token, share }) => {
    const bar = element("i", {
      "aria-hidden": "true",
      class: kind,
      style: `width: ${(100 * Math.abs(share)) / most}%`,
    });
    const position = element("small", {}, ` ${positionOf(token)}`);
    const name = element("span", {}, element("bdi", {}, nameThere(token)), position);
    return element("li", { "data-token": token }, bar, name, element("span", {}, asShare(share)));
  });
  return element("ol", {}, ...items);
}

const small = (text) => element("p", { class: "small" }, text);

function tookList(looked, took) {
  if (took.length === 0) return [small("Nothing from others.")];
  if (state.difference)
    return [listed(took, "took"), small("Of the words that are among its largest sources in both models.")];
  const rest =
    othersByMeasure(looked, state.layer, state.checkpoint) -
    took.slice(0, LISTED).reduce((sum, { share }) => sum + share, 0);
  return [listed(took, "took"), small(`All others: ${percent(Math.max(0, rest))}.`)];
}

function gaveList(gave) {
  if (gave.length === 0) return [small("It is among the largest sources of no other word.")];
  return [
    listed(gave, "gave"),
    small("Of the words that have it among their largest sources, in shares of what they took."),
  ];
}

/** What stands instead of a card without numbers. */
function missing(looked) {
  if (looked === null) return small("Select a word.");
  const found = tookFrom(looked);
  if (found === null) return element("p", { class: "note" }, data.matrices.length > 0 ? NOT_HERE : NOT_MEASURED);
  return found.length === 0 ? element("p", { class: "note" }, NOT_TRUSTED) : null;
}

const quoted = (looked) => ["“", element("bdi", {}, nameThere(looked)), "”"];

export function drawCard() {
  const looked = lookedAt();
  const none = missing(looked);
  byId("sources-title").replaceChildren(...(looked === null ? ["Took from"] : [...quoted(looked), " took from"]));
  byId("gave-title").replaceChildren(...(looked === null ? ["Gave to"] : [...quoted(looked), " gave to"]));
  byId("card-body").hidden = none !== null;
  byId("card-course").hidden = none !== null;
  const about = looked === null ? [] : ratioLine(looked);
  byId("kept").replaceChildren(...(none ? [none, ...about] : [keptLine(looked), ...about]));
  if (none) return;
  const { took, gave } = exchanged(looked);
  byId("sources").replaceChildren(...tookList(looked, took));
  byId("gave").replaceChildren(...gaveList(gave));
}

// Its course through the layers.

const courseOf = (token, checkpoint) =>
  layersThere.map((layer) => [layer, othersByMeasure(token, layer, checkpoint)]).filter(([, share]) => share !== null);

function courseLine(points, chosen, x, y, name) {
  if (points.length === 0) return [];
  const colour = chosen ? state.colours.mark : state.colours.soft;
  const d = points.map(([layer, share], i) => `${i ? "L" : "M"}${x(layer).toFixed(1)} ${y(share).toFixed(1)}`).join("");
  const looks = { fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": chosen ? "none" : "4 3" };
  const here = points.find(([layer]) => layer === state.layer);
  const dot = here ? [drawing("circle", { cx: x(here[0]), cy: y(here[1]), r: 4, fill: colour })] : [];
  const end = points.at(-1)[1];
  const label = { x: WIDE - COURSE.right + 8, y: y(end) + 4, fill: colour, "font-size": 12 };
  return [drawing("path", { ...looks, d }), ...dot, drawing("text", label, `${name} ${percent(end)}`.trim())];
}

export function drawCourse() {
  const looked = lookedAt();
  const courses = looked === null ? [] : checkpoints.map((each) => [each, courseOf(looked, each)]);
  const most = Math.max(0.02, ...courses.flatMap(([, points]) => points.map(([, share]) => share)));
  const [width, height] = [WIDE - COURSE.left - COURSE.right, TALL_COURSE - COURSE.top - COURSE.bottom];
  const x = (layer) =>
    COURSE.left + (layersThere.length > 1 ? (width * (layer - 1)) / (layersThere.length - 1) : width / 2);
  const y = (share) => COURSE.top + height * (1 - share / most);
  const text = { fill: state.colours.soft, "font-size": 11 };
  const axis = [0, most].map((share) =>
    drawing("text", { ...text, x: COURSE.left - 6, y: y(share) + 4, "text-anchor": "end" }, percent(share)),
  );
  const ends = [...new Set([1, layersThere.length])].map((layer) =>
    drawing(
      "text",
      { ...text, x: x(layer), y: TALL_COURSE - 4, "text-anchor": "middle" },
      layer === 1 ? "layer 1" : layer,
    ),
  );
  const lines = courses.flatMap(([each, points]) =>
    courseLine(
      points,
      each === state.checkpoint,
      x,
      y,
      courses.length > 1 ? inText(data.labels.checkpoints[each]) : "",
    ),
  );
  const said = courses.map(
    ([each, points]) =>
      `${data.labels.checkpoints[each]}: ${points.map(([layer, share]) => `layer ${layer} ${percent(share)}`).join(", ")}`,
  );
  const chart = byId("course");
  chart.setAttribute("aria-label", `Share from others by layer. ${said.join(". ")}.`);
  chart.replaceChildren(...axis, ...ends, ...lines);
}

byId("card").addEventListener("mouseover", (event) => change({ pointed: tokenAt(event) }));
byId("card").addEventListener("mouseleave", () => change({ pointed: null }));
byId("card").addEventListener("click", (event) => change({ token: tokenAt(event) ?? state.token }));

const cardRows = (kind, found) => found.map(({ token, share }) => [kind, positionOf(token), nameThere(token), share]);

register(
  "card-body",
  () => {
    const looked = lookedAt();
    const { took, gave } = looked === null ? { took: [], gave: [] } : exchanged(looked);
    return {
      columns: ["what", "position", "token", `share (${measureName()})`],
      rows: [...cardRows("took from", took), ...cardRows("gave to", gave)],
    };
  },
  null,
);
register("course", () => {
  const looked = lookedAt();
  const row = (layer) => [
    layer,
    ...checkpoints.map((each) => (looked === null ? null : othersByMeasure(looked, layer, each))),
  ];
  return { columns: ["layer", ...checkpoints.map((each) => `share from others, ${each}`)], rows: layersThere.map(row) };
});
