// How to read the page, in steps that set the same views: each says what it shows of the chosen text, in its numbers.

import { checkpoints, data, layouts, once, ownShareOf } from "./data.js";
import { byId, element, inText, percent } from "./elements.js";
import { canDiffer } from "./measures.js";
import { change, state } from "./state.js";

const lastLayer = data.ratios.layers;
const hasMatrices = (...names) => names.every((name) => data.matrices.includes(name));
const within = ["alti", "norm"].find((name) => hasMatrices(name)); // the measure of what arrives, where there is one
const labelOf = (matrix) => data.labels.matrices[matrix];

const meanOf = once((key) => {
  const [number, matrix, layer, checkpoint] = key.split(" ");
  const { start, length } = data.documents[number];
  const owns = Array.from({ length }, (_, i) => ownShareOf(start + i, Number(layer), checkpoint, matrix, "mean"));
  const known = owns.filter((own) => own !== null);
  return known.length === 0 ? NaN : known.reduce((sum, own) => sum + 1 - own, 0) / known.length;
});
const meanHere = (matrix, layer, checkpoint) => meanOf([state.document, matrix, layer, checkpoint].join(" "));
/** What comes from others in a layer, the mean over the words of the chosen text. */
const othersMean = (matrix, layer = state.layer, checkpoint = state.checkpoint) =>
  percent(meanHere(matrix, layer, checkpoint));
const layerHere = () => inText(data.labels.layers[state.layer]);
const someWord = () => {
  const { start, length } = data.documents[state.document];
  return state.token ?? start + Math.min(1, length - 1);
};

const plainView = { head: "mean", shade: "measure", difference: false, beside: "none" };
// Of each step the view that it leads to, whether the run has it, what it sets, and its words.
const STORY = [
  {
    title: "A token is a vector",
    view: "map",
    there: layouts.length > 0,
    sets: () => ({ point: 0, token: someWord() }),
    says: () =>
      "Before the first layer it holds its word, and after the position is added its place. Each point of the map is " +
      "one token there; nothing of any other word is in it yet.",
  },
  {
    title: "Attention weighs",
    view: "text",
    there: hasMatrices("attention"),
    reads: ["attention"],
    sets: () => ({ ...plainView, matrix: "attention", token: someWord() }),
    says: () =>
      "Each head gives a word weights over all words, which sum to 1. The shade is the weight on other words, mean over " +
      `the heads: ${othersMean("attention")} in ${layerHere()}, on average over this text.`,
  },
  {
    title: "Values and the skip connection count too",
    view: "text",
    there: hasMatrices("attention") && within !== undefined,
    reads: ["attention", within],
    sets: () => ({ ...plainView, matrix: within, token: someWord() }),
    says: () =>
      `What a weight brings depends on the vector it weighs${within === "alti" ? ", and the skip connection adds the word's own vector back" : ""}. ` +
      `In the same layer of the same text, weights say ${othersMean("attention")} from others, ${labelOf(within)} ${othersMean(within)}.`,
  },
  {
    title: "Through the layers",
    view: "text",
    there: hasMatrices("alti_rollout") && lastLayer > 1,
    reads: ["alti_rollout"],
    sets: () => ({ ...plainView, matrix: "alti_rollout", layer: lastLayer, token: someWord() }),
    says: () =>
      "Layers build on each other: what a word took from a neighbour holds what that had taken. By " +
      `${labelOf("alti_rollout")}, from the embedding on, ${othersMean("alti_rollout", 1)} comes from others by ${inText(data.labels.layers[1])}, ` +
      `${othersMean("alti_rollout", lastLayer)} by ${inText(data.labels.layers[lastLayer])}.`,
  },
  {
    title: "What fine-tuning changed",
    view: "text",
    there: canDiffer && within !== undefined,
    reads: [within],
    sets: () => ({ ...plainView, difference: true, checkpoint: checkpoints.at(-1), matrix: within, token: someWord() }),
    says: () => {
      const [before, after] = checkpoints.map((each) => othersMean(within, state.layer, each));
      return `The shade is the fine-tuned model's share from others minus the pretrained one's. By ${labelOf(within)}, in ${layerHere()}, its mean over this text is ${before} before and ${after} after.`;
    },
  },
].filter((step) => step.there);

function lead(step) {
  change(step.sets());
  byId(step.view).scrollIntoView();
  if (step.view === "text") byId("words").focus({ preventScroll: true });
}

const storyItems = STORY.map((step) => {
  const button = element("button", { type: "button" }, "Show");
  button.setAttribute("aria-label", `Show: ${step.title}`);
  button.addEventListener("click", () => lead(step));
  const said = element("p");
  return { step, said, item: element("li", {}, element("h3", {}, step.title), said, button) };
});
byId("story-steps").replaceChildren(...storyItems.map(({ item }) => item));
byId("story").hidden = storyItems.length === 0;

/** Numbers of what is chosen. */
export function drawStory() {
  for (const { step, said, item } of storyItems) {
    said.textContent = step.says();
    // A text whose matrices are not on the page has no such numbers.
    item.hidden = (step.reads ?? []).some(
      (matrix) => !Number.isFinite(meanHere(matrix, state.layer, state.checkpoint)),
    );
  }
}
