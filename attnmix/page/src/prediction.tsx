// The prediction for a text, and a sentence on the token with the largest effect on it.

import { data, isWord } from "./data";
import { largestEffect, leastEffect, logOdds } from "./effects";
import { minusSign, percent } from "./format";
import { nameInText } from "./words";

/** A text's label, if it is known, and its predicted class with the probability; nothing if there is no classifier. */
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

/** A sentence on the largest effect of a token on the predicted class, and on whether it is important. */
export function effectText(text: number, score: string): string {
  const largest = largestEffect(text, score);
  if (largest === null) return "No effect was measured in this text.";
  const token = isWord(largest.token) ? `“${nameInText(largest.token)}”` : "a special token or punctuation mark";
  const effect = `${inLogits(largest.effect)}, by ${token}`;
  if (Math.abs(largest.effect) >= leastEffect(text))
    return `The largest effect in this text is ${effect}; positive effects support the predicted class.`;
  const odds = logOdds(text)!.toFixed(1);
  return `By this measure, no single token matters for the prediction: the largest effect is ${effect}, less than a tenth of the log-odds of the predicted class (${odds}). Positive effects support this class.`;
}
