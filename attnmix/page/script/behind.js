// From what a head has gathered to the vector in which attention's part of the layer ends.

import { HEADS } from "./attention.js";
import { shownHead } from "./chosen.js";
import { byId, element } from "./elements.js";
import { state } from "./state.js";
import { figures, normOf, strip, usualOf } from "./vectors.js";

const FIRST = 8; // of the steps

const STEP_WORDS = {
  attended: ["sum of the weighted values", "what the head has gathered"],
  given: ["× W_O of this head", "what it gives; W_O is the model's, not on the page"],
  output: [`+ the other ${HEADS - 1} heads + bias`, "attention's output"],
  output_norm: ["norm of that", "what attention adds"],
  input: ["xᵢ, the layer's input", "what the skip connection brings"],
  skip: ["attention + xᵢ", "after the skip connection"],
  norm: ["LayerNorm", "what leaves attention's part of the layer"],
  stored: ["the model's own vector", "as it was stored"],
};

export function drawBehind({ behind, heads, i }) {
  const list = byId("neuron-flow");
  list.hidden = !behind;
  const ends = byId("neuron-ends");
  if (!behind) {
    const at = ((state.layer - 1) * HEADS + shownHead()) * heads.length + i;
    ends.textContent =
      `The weighted values, through W_O, add up to a vector of length ${figures(heads.given_norms[at])}. ` +
      `What follows the softmax, vector by vector, is on this page for short texts alone, as ` +
      `there every head gives every token a vector of its own; this text has ${heads.length}. ` +
      'The command make show TEXT="time flies like an arrow" makes a page that has it.';
    return;
  }
  const rows = behind.steps.map(([name, vector], n) => {
    const [title, meaning] = STEP_WORDS[name];
    const number = name === "stored" ? "✓" : String(FIRST + n);
    const size = `${vector.length} numbers, length ${figures(normOf(vector))}`;
    const words = element(
      "span",
      {},
      element("b", { class: "number" }, number),
      " ",
      title,
      element("small", {}, meaning),
    );
    return element("li", {}, words, strip(vector, usualOf(vector), title), element("small", {}, size));
  });
  list.replaceChildren(...rows);
  const off = [behind.off.attended, behind.off.stored].map((each) => (each === 0 ? "0" : each.toExponential(1)));
  ends.textContent =
    `Computed here from the numbers above, step 8 is off the model's own by ${off[0]} at most, and the last step by ` +
    `${off[1]} at most.`;
}
