// Six steps that stay on the screen while they drive the views; each is a link.

import { effect } from "@preact/signals";
import { mean } from "d3";
import { useEffect, useRef } from "preact/hooks";
import { captured, checkpoints, data, layers, type Maybe } from "./data";
import { points, wholePercent } from "./format";
import type { Series } from "./payload";
import { type Choice, set, state } from "./state";

type Step = { title: string; body: string; view: string; choose?: Partial<Choice> };

const { method, answer, curves } = data;
const at = data.layer;
const model = checkpoints.includes(captured) ? captured : checkpoints.at(-1)!;
const weights = data.ratios.methods.includes("attn_w") ? "attn_w" : method;
const derivatives = Object.keys(data.labels.derivatives);
const derivative = derivatives.find((each) => each === "norm_of_block") ?? derivatives[0];

const text = (value: Maybe = null) => (value === null ? "–" : wholePercent(value));
/** A number of the chosen layer in each model. */
const inModels = (series: Record<string, Series> = {}) => checkpoints.map((each) => series[each]?.values[at - 1]);
const [before, after = before] = inModels(curves[method]);
const shared = inModels(data.controls.text_mean_value?.[method]);
const rise = ([from, to]: Maybe[]) => (typeof from === "number" && typeof to === "number" ? points(to - from) : "–");

const BEGIN: Step[] = [
  {
    title: "Attention weights say: almost everything comes from others",
    body: `By attention weights, ${text(mean(curves[weights][model].values))} of what attention adds to a token comes from other tokens (mean over ${layers.length} layers). A weight ignores how long the vector is that it multiplies.`,
    view: "answer",
    choose: { shade: "ratio", measure: weights },
  },
  {
    title: "Vectors say: much less",
    body: `Count lengths of vectors, and the skip connection that carries each token past attention. Then the ratio others / (others + own) is ${text(after)} after layer ${at}. This is the mixing ratio: it compares two lengths, and is no share of the vector.`,
    view: "answer",
    choose: { shade: "ratio" },
  },
];
const FINE_TUNED: Step[] = [
  {
    title: "Fine-tuning changes it",
    body: `In layer ${at} the ratio goes from ${text(before)} to ${text(after)}. Each dot is one review.`,
    view: "layers-chart",
  },
  {
    title: "Your guess",
    body: "Did tokens learn to take more information from each other?",
    view: "layers-chart",
  },
  {
    title: "Look at the controls",
    body: `Give every token the same vector to pass on, which says nothing of any single token: the ratio still goes from ${shared.map(text).join(" to ")}, a rise of ${rise(shared)} beside ${rise([before, after])} of the ratio itself. Shuffle the words: ${inModels(data.controls.shuffled_words?.[method]).map(text).join(" to ")}.`,
    view: "layers-chart",
  },
  {
    title: "What this run found",
    body: `${answer.headline}: the chart shows it layer by layer.${derivative ? ` Derivatives say how strongly a token's output depends on the others' inputs: ${inModels(curves[derivative]).map(text).join(" before, ")} after, in layer ${at}.` : ""}`,
    view: "answer",
  },
];
const ONE_MODEL: Step[] = [
  {
    title: "Every layer is different",
    body: "Here is the ratio by layer. Dashed lines are controls: what it would be with one value shared by all tokens, or with random weights.",
    view: "layers-chart",
  },
  {
    title: "One token",
    body: "Select a token to see which tokens contributed to it, and which received from it.",
    view: "inside",
  },
  {
    title: "Where the vectors are",
    body: "The same tokens as dots. The badge says what share of neighbours the map keeps.",
    view: "map",
  },
  {
    title: "What to take home",
    body: `${answer.headline}. A ratio of lengths is no causal effect: look at the controls before you read it as one.`,
    view: "answer",
  },
];
const steps = [...BEGIN, ...(checkpoints.length > 1 ? FINE_TUNED : ONE_MODEL)];
const OPENING: Partial<Choice> = {
  ...{ ...data.opens, layer: at, checkpoint: model, change: false, measure: method },
  shade: data.matrices.length > 0 ? "sources" : "ratio",
};
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function Tour() {
  const card = useRef<HTMLDivElement>(null);
  const opener = useRef<HTMLElement | null>(null);
  const drive = () => {
    const step = steps[state.tour.value - 1];
    if (!step) {
      // Before the card goes, and the keyboard's place with it.
      if (card.current?.contains(document.activeElement)) opener.current?.focus({ preventScroll: true });
      return;
    }
    if (card.current === null) opener.current = document.activeElement as HTMLElement;
    set({ ...OPENING, ...step.choose });
    queueMicrotask(() => {
      const behavior = calm.matches ? "instant" : "smooth";
      document.getElementById(step.view)?.scrollIntoView({ block: "start", behavior });
      card.current?.focus({ preventScroll: true });
    });
  };
  useEffect(() => effect(drive), []);
  const number = state.tour.value;
  if (number === 0) return null;
  const { title, body } = steps[number - 1];
  const button = (name: string, tour: number, looks = "") => (
    <button class={looks} onClick={() => set({ tour })}>
      {name}
    </button>
  );
  return (
    <div
      id="tour"
      ref={card}
      role="dialog"
      aria-labelledby="tour-title"
      tabIndex={-1}
      onKeyDown={(e) => e.key === "Escape" && set({ tour: 0 })}
    >
      <p class="small">
        Step {number} of {steps.length}
      </p>
      <h2 id="tour-title">{title}</h2>
      <p aria-live="polite">{body}</p>
      <p class="buttons">
        {number > 1 && button("Back", number - 1)}
        {button(number < steps.length ? "Next" : "Done", (number + 1) % (steps.length + 1), "strong")}
        {number < steps.length && button("Close", 0)}
      </p>
    </div>
  );
}
