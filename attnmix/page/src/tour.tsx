// Six steps that stay on the screen while they drive the views; each is a link.

import { effect, signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { captured, checkpoints, data, layers, mean, type Maybe } from "./data";
import { percent, points } from "./format";
import { curve } from "./layers";
import { initial, set, state } from "./state";

const LAYER = data.layer;
const text = (value: Maybe) => (value === null ? "–" : percent(value, 0));
const ratio = (method: string, checkpoint: string) => curve(data.curves, method, checkpoint).values[LAYER - 1];
const control = (name: string, checkpoint: string) =>
  curve(
    data.controls.filter((row) => row.control === name),
    data.method,
    checkpoint,
  ).values[LAYER - 1];
const model = checkpoints.includes(captured) ? captured : checkpoints.at(-1)!;
const guess = signal<string | null>(null);

type Step = { title: string; body: () => ComponentChildren; view: string; choose: Parameters<typeof set>[0] };
const start = { document: initial.document, token: initial.token, layer: LAYER, checkpoint: model, change: false };

function steps(): Step[] {
  const weights = data.ratios.methods.includes("attn_w") ? mean(curve(data.curves, "attn_w", model).values) : null;
  const first: Step[] = [
    {
      title: "Attention weights say: almost everything comes from others",
      body: () => (
        <>
          By attention weights, {text(weights)} of what attention adds to a word comes from other words (mean over{" "}
          {layers.length} layers). A weight ignores how long the vector is that it multiplies.
        </>
      ),
      view: "answer",
      choose: { ...start, shade: "ratio", method: data.ratios.methods.includes("attn_w") ? "attn_w" : data.method },
    },
    {
      title: "Vectors say: much less",
      body: () => (
        <>
          Count lengths of vectors, and the skip connection that carries each word past attention. Then{" "}
          {text(ratio(data.method, model))} of a word's vector comes from others after layer {LAYER}. This is the mixing
          ratio.
        </>
      ),
      view: "answer",
      choose: { ...start, shade: "ratio", method: data.method },
    },
  ];
  const last: Step = {
    title: "What to take home",
    body: () => (
      <>
        <b>{data.answer.headline}.</b> A ratio of lengths is no causal effect: look at the controls before you read it
        as one.
      </>
    ),
    view: "answer",
    choose: { ...start, shade: initial.shade },
  };
  if (checkpoints.length < 2)
    return [
      ...first,
      {
        title: "Every layer is different",
        body: () => (
          <>
            Here is the ratio by layer. Dashed lines are controls: what it would be with one value shared by all words,
            or with random weights.
          </>
        ),
        view: "layers",
        choose: { ...start, measure: data.method },
      },
      {
        title: "One word",
        body: () => <>Select a word to see which words contributed to it, and which received from it.</>,
        view: "inside",
        choose: { ...start, shade: initial.shade },
      },
      {
        title: "Where the vectors are",
        body: () => <>The same words as points. The badge says what share of neighbours the map keeps.</>,
        view: "map",
        choose: start,
      },
      last,
    ];
  const [before, after] = checkpoints.map((each) => ratio(data.method, each));
  const rise = after !== null && before !== null ? after - before : null;
  const [sharedBefore, sharedAfter] = checkpoints.map((each) => control("text_mean_value", each));
  const shuffled = checkpoints.map((each) => control("shuffled_words", each));
  const derivative = ["norm_of_block", ...Object.keys(data.labels.derivatives)].find((each) =>
    data.derivatives.some((row) => row.method === each),
  );
  const moves = checkpoints.map((each) =>
    derivative ? curve(data.derivatives, derivative, each).values[LAYER - 1] : null,
  );
  return [
    ...first,
    {
      title: "Fine-tuning changes it",
      body: () => (
        <>
          In layer {LAYER} the ratio goes from {text(before)} to {text(after)}. Each dot is one review.
        </>
      ),
      view: "layers",
      choose: { ...start, measure: data.method },
    },
    {
      title: "Your guess",
      body: () => (
        <>
          Did words learn to take more <i>information</i> from each other?{" "}
          {["Yes", "No"].map((each) => (
            <button
              type="button"
              aria-pressed={guess.value === each}
              onClick={() => {
                guess.value = each;
                openTour(5);
              }}
            >
              {each}
            </button>
          ))}
        </>
      ),
      view: "layers",
      choose: { ...start, measure: data.method },
    },
    {
      title: "Look at the controls",
      body: () => (
        <>
          {guess.value && `You said ${guess.value.toLowerCase()}. `}Give every word the same vector to pass on, which
          says nothing of any single word: the ratio still goes from {text(sharedBefore)} to {text(sharedAfter)}
          {rise !== null && sharedAfter !== null && sharedBefore !== null && (
            <>
              , a rise of {points(sharedAfter - sharedBefore)} beside {points(rise)} of the ratio itself
            </>
          )}
          . Shuffle the words: {text(shuffled[0])} to {text(shuffled[1])}.
        </>
      ),
      view: "layers",
      choose: { ...start, measure: data.method },
    },
    derivative
      ? {
          title: "And what the output depends on",
          body: () => (
            <>
              Derivatives measure how strongly a word's output depends on the others' inputs: {text(moves[0])} before,{" "}
              {text(moves[1])} after, in layer {LAYER}. <b>{data.answer.headline.replace(/\.$/, "")}.</b>
            </>
          ),
          view: "layers",
          choose: { ...start, measure: derivative },
        }
      : last,
  ];
}

export function openTour(step: number): void {
  set({ tour: step });
}
const clear = () => openTour(0);

export function Tour() {
  const all = steps();
  const number = Math.min(state.tour.value, all.length);
  const card = useRef<HTMLDivElement>(null);
  useEffect(
    () =>
      effect(() => {
        const step = all[Math.min(state.tour.value, all.length) - 1];
        if (!step) return;
        set(step.choose);
        queueMicrotask(() => {
          document.getElementById(step.view)?.scrollIntoView({
            block: "start",
            behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "instant" : "smooth",
          });
          card.current?.focus({ preventScroll: true });
        });
      }),
    [],
  );
  if (number === 0) return null;
  const { title, body } = all[number - 1];
  return (
    <div
      id="tour"
      ref={card}
      role="dialog"
      aria-labelledby="tour-title"
      tabIndex={-1}
      onKeyDown={(e) => e.key === "Escape" && clear()}
    >
      <p class="small">
        Step {number} of {all.length}
      </p>
      <h2 id="tour-title">{title}</h2>
      <p aria-live="polite">{body()}</p>
      <p class="buttons">
        <button type="button" disabled={number === 1} onClick={() => openTour(number - 1)}>
          Back
        </button>{" "}
        {number < all.length ? (
          <button type="button" class="strong" onClick={() => openTour(number + 1)}>
            Next
          </button>
        ) : (
          <button type="button" class="strong" onClick={clear}>
            Done
          </button>
        )}{" "}
        <button type="button" onClick={clear}>
          Close
        </button>
      </p>
    </div>
  );
}
