// Effects of single tokens on a text's predicted class.

import { data, importanceOf, type Maybe, tokensOf } from "./data";

const MATTERS = 0.1; // minimum effect of an important token, relative to the predicted class's log-odds
const MAX_PROBABILITY = 1 - 1e-6; // keeps log-odds finite

export type Effect = { token: number; effect: number };
/** The token of a text with the largest absolute effect on the predicted class; null if no effect is known. */
export function largestEffect(text: number, score: string): Effect | null {
  let largest: Effect | null = null;
  for (const token of tokensOf(text)) {
    const effect = importanceOf(token, score);
    if (effect !== null && Math.abs(effect) > Math.abs(largest?.effect ?? 0)) largest = { token, effect };
  }
  return largest;
}

/** The log-odds of a text's predicted class; null if its probability is at most 0.5. */
export function logOdds(text: number): Maybe {
  const { probability } = data.documents[text];
  if (probability === null || probability <= 0.5) return null;
  const bounded = Math.min(probability, MAX_PROBABILITY);
  return Math.log(bounded / (1 - bounded));
}

/** The smallest effect that counts as important for the prediction of a text, in logits. */
export const leastEffect = (text: number) => MATTERS * (logOdds(text) ?? 0);

/**
 * The end of the scale of effects in a text, in logits: its largest effect. If no token is important, it is instead the
 * smallest important effect, so that unimportant differences stay pale, unless colours are stretched.
 */
export function effectLimit(text: number, score: string, stretched: boolean): number {
  const largest = Math.abs(largestEffect(text, score)?.effect ?? 0);
  return (stretched ? largest : Math.max(largest, leastEffect(text))) || data.importance[score].limit;
}
