// How much single tokens matter for a text's predicted class.

import { data, importanceOf, type Maybe, tokensOf } from "./data";

const MATTERS = 0.1; // of the predicted class's log-odds, from which on the effect of a token is worth a colour
const MAX_PROBABILITY = 1 - 1e-6; // whose log-odds are finite

export type Effect = { token: number; effect: number };
/** The token of a text with the largest effect on the predicted class, by its absolute value; null without any. */
export function largestEffect(text: number, score: string): Effect | null {
  let largest: Effect | null = null;
  for (const token of tokensOf(text)) {
    const effect = importanceOf(token, score);
    if (effect !== null && Math.abs(effect) > Math.abs(largest?.effect ?? 0)) largest = { token, effect };
  }
  return largest;
}

/** The log-odds of a text's predicted class; null where it is less probable than the other classes together. */
export function logOdds(text: number): Maybe {
  const { probability } = data.documents[text];
  if (probability === null || probability <= 0.5) return null;
  const bounded = Math.min(probability, MAX_PROBABILITY);
  return Math.log(bounded / (1 - bounded));
}

/** The effect below which no token of a text matters for its prediction, in logits. */
export const leastEffect = (text: number) => MATTERS * (logOdds(text) ?? 0);

/**
 * The end of the scale of effects in a text, in logits: its largest effect. If no token matters, it is the least effect
 * that would, so that differences without a meaning stay pale; stretched, it is the largest effect all the same.
 */
export function effectLimit(text: number, score: string, stretched: boolean): number {
  const largest = Math.abs(largestEffect(text, score)?.effect ?? 0);
  return (stretched ? largest : Math.max(largest, leastEffect(text))) || data.importance[score].limit;
}
