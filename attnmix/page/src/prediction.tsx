// What the classifier predicts for a text, and whether a single token matters for that, in words.

import { data, isWord } from "./data";
import { largestEffect, leastEffect, logOdds } from "./effects";
import { minusSign, percent } from "./format";
import { nameInText } from "./words";

/** A text's label, where it is known, and its predicted class with the probability; nothing without a classifier. */
export function Prediction({ text }: { text: number }) {
  const { label, predicted, probability } = data.documents[text];
  if (predicted === null || probability === null) return null;
  return (
    <span class="prediction">
      {label !== null && (
        <>
          label <bdi>{label}</bdi>,{" "}
        </>
      )}
      predicted <bdi>{predicted}</bdi> ({percent(probability)})
    </span>
  );
}

const inLogits = (effect: number) => minusSign(String(Number(effect.toPrecision(2))));

/** The largest effect of a token on the predicted class, or that no single token matters. */
export function effectText(text: number, score: string): string {
  const largest = largestEffect(text, score);
  if (largest === null) return "No effect was measured in this text.";
  const token = isWord(largest.token) ? `“${nameInText(largest.token)}”` : "a special token or punctuation mark";
  const effect = `${inLogits(largest.effect)}, of ${token}`;
  if (Math.abs(largest.effect) >= leastEffect(text))
    return `The largest effect in this text is ${effect}; above 0, a token speaks for the predicted class.`;
  const odds = logOdds(text)!.toFixed(1);
  return `No single token matters for this prediction: the largest effect is ${effect}, less than a tenth of the log-odds of the predicted class (${odds}).`;
}
