// Why an own share by exchange is not known, which leaves a cell of the picture empty.

import { checkpoints, data, documentOf, isSpecial, layers, OWN_SHARE, ratioOf, tokensOf } from "./data";
import { state } from "./state";

const isKnown = (token: number) =>
  checkpoints.some((model) => layers.some((layer) => ratioOf(token, layer, model, OWN_SHARE) !== null));

/** Why a token has no own share by exchange, within a sentence. */
function whyNoExchange(token: number): string {
  const tokens = tokensOf(documentOf[token]);
  const exchangeable = tokens.filter((each) => !isSpecial(each));
  if (isSpecial(token)) return "special tokens are not exchanged";
  if (isKnown(token)) return "the exchanges move this vector by no more than rounding errors";
  if (!tokens.some(isKnown)) return "no token of this text was exchanged";
  if (exchangeable.length > data.exchangeLimit) return `only ${data.exchangeLimit} tokens of this text were exchanged`;
  return "the texts that replace it have the same token here";
}

/** What is said of a token where the chosen measure is not known. */
export const missingText = (token: number | null) =>
  token !== null && state.share.value === OWN_SHARE ? `not known, as ${whyNoExchange(token)}` : "not known";

/** Why some cells of texts are empty, as a sentence; an empty text where none is, or for another measure. */
export function emptyCellsText(texts: number[]): string {
  if (state.share.value !== OWN_SHARE) return "";
  const empty = texts.flatMap(tokensOf).filter((token) => !isKnown(token));
  const reasons = [...new Set(empty.map(whyNoExchange))];
  return reasons.length > 0 ? `Empty columns: ${reasons.join("; ")}.` : "";
}
