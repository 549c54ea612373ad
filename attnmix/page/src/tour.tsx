// Six steps that stay on the screen while they drive the views; each is a link.

import { effect, signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { controlCurve, curve } from "./curves";
import { captured, checkpoints, data, layers, mean, type Maybe } from "./data";
import { points, wholePercent } from "./format";
import { type Choice, set, state } from "./state";

type Step = { title: string; body: string; view: string; choose?: Partial<Choice>; asks?: boolean };

const text = (value: Maybe) => (value === null ? "–" : wholePercent(value));
const at = data.layer;
const { method, answer } = data;
const model = checkpoints.includes(captured) ? captured : checkpoints.at(-1)!;
const weights = data.ratios.methods.includes("attn_w") ? "attn_w" : method;
/** A number of the chosen layer in each model. */
const inModels = (curveOf: (checkpoint: string) => { values: Maybe[] }) =>
  checkpoints.map((each) => curveOf(each).values[at - 1]);
const [before, after = before] = inModels((each) => curve(data.curves, method, each));
const [sharedBefore, sharedAfter = null] = inModels((each) => controlCurve("text_mean_value", method, each));
const shuffled = inModels((each) => controlCurve("shuffled_words", method, each));
const derivative = ["norm_of_block", ...Object.keys(data.labels.derivatives)].find((each) =>
  data.derivatives.some((row) => row.method === each),
);
const moves = inModels((each) => curve(data.derivatives, derivative ?? "", each));
const rise = (from: Maybe, to: Maybe) => (from === null || to === null ? "–" : points(to - from));

const BEGIN: Step[] = [
  {
    title: "Attention weights say: almost everything comes from others",
    body: `By attention weights, ${text(mean(curve(data.curves, weights, model).values))} of what attention adds to a word comes from other words (mean over ${layers.length} layers). A weight ignores how long the vector is that it multiplies.`,
    view: "answer",
    choose: { shade: "ratio", method: weights },
  },
  {
    title: "Vectors say: much less",
    body: `Count lengths of vectors, and the skip connection that carries each word past attention. Then ${text(after)} of a word's vector comes from others after layer ${at}. This is the mixing ratio.`,
    view: "answer",
    choose: { shade: "ratio" },
  },
];
const TAKE_HOME: Step = {
  title: "What to take home",
  body: `${answer.headline}. A ratio of lengths is no causal effect: look at the controls before you read it as one.`,
  view: "answer",
};
const FINE_TUNED: Step[] = [
  {
    title: "Fine-tuning changes it",
    body: `In layer ${at} the ratio goes from ${text(before)} to ${text(after)}. Each dot is one review.`,
    view: "layers-chart",
  },
  {
    title: "Your guess",
    body: "Did words learn to take more information from each other?",
    view: "layers-chart",
    asks: true,
  },
  {
    title: "Look at the controls",
    body: `Give every word the same vector to pass on, which says nothing of any single word: the ratio still goes from ${text(sharedBefore)} to ${text(sharedAfter)}, a rise of ${rise(sharedBefore, sharedAfter)} beside ${rise(before, after)} of the ratio itself. Shuffle the words: ${shuffled.map(text).join(" to ")}.`,
    view: "layers-chart",
  },
  {
    title: "What this run found",
    body: `${answer.headline}: the chart shows it layer by layer.${derivative ? ` Derivatives say how strongly a word's output depends on the others' inputs: ${moves.map(text).join(" before, ")} after, in layer ${at}.` : ""}`,
    view: "answer",
  },
];
const ONE_MODEL: Step[] = [
  {
    title: "Every layer is different",
    body: "Here is the ratio by layer. Dashed lines are controls: what it would be with one value shared by all words, or with random weights.",
    view: "layers-chart",
  },
  {
    title: "One word",
    body: "Select a word to see which words contributed to it, and which received from it.",
    view: "inside",
  },
  {
    title: "Where the vectors are",
    body: "The same words as points. The badge says what share of neighbours the map keeps.",
    view: "map",
  },
  TAKE_HOME,
];
const steps = [...BEGIN, ...(checkpoints.length > 1 ? FINE_TUNED : ONE_MODEL)];
const OPENING = { document: data.opens.document, token: data.opens.token, layer: at, checkpoint: model, change: false };
const SHADE = data.matrices.length > 0 ? "sources" : "ratio";
const guess = signal<string | null>(null);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function Tour() {
  const card = useRef<HTMLDivElement>(null);
  useEffect(
    () =>
      effect(() => {
        const step = steps[state.tour.value - 1];
        if (!step) return;
        set({ ...OPENING, shade: SHADE, method, ...step.choose });
        queueMicrotask(() => {
          const behavior = calm.matches ? "instant" : "smooth";
          document.getElementById(step.view)?.scrollIntoView({ block: "start", behavior });
          card.current?.focus({ preventScroll: true });
        });
      }),
    [],
  );
  const number = state.tour.value;
  if (number === 0) return null;
  const { title, body, asks } = steps[number - 1];
  const go = (tour: number) => () => set({ tour });
  const button = (name: string, onClick: () => void, pressed?: boolean) => (
    <button aria-pressed={pressed} onClick={onClick}>
      {name}
    </button>
  );
  const answerWith = (each: string) => () => {
    guess.value = each;
    set({ tour: number + 1 });
  };
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
      <p aria-live="polite">
        {steps[number - 2]?.asks && guess.value && `You said ${guess.value.toLowerCase()}. `}
        {body}
      </p>
      <p class="buttons">{asks && ["Yes", "No"].map((each) => button(each, answerWith(each), guess.value === each))}</p>
      <p class="buttons">
        {number > 1 && button("Back", go(number - 1))}
        <button class="strong" onClick={go((number + 1) % (steps.length + 1))}>
          {number < steps.length ? "Next" : "Done"}
        </button>
        {number < steps.length && button("Close", go(0))}
      </p>
    </div>
  );
}
