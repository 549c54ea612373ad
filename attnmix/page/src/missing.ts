// Reasons for missing own shares by exchange, whose cells are empty in the picture.

import { checkpoints, data, documentOf, isSpecial, layers, OWN_SHARE, ratioOf, tokensOf } from "./data";
import { state } from "./state";

const isKnown = (token: number) =>
  checkpoints.some((model) => layers.some((layer) => ratioOf(token, layer, model, OWN_SHARE) !== null));

/** The reason why a token has no own share by exchange, as a clause. */
function whyNoExchange(token: number): string {
  const tokens = tokensOf(documentOf[token]);
  const exchangeable = tokens.filter((each) => !isSpecial(each));
  if (isSpecial(token)) return "special tokens are not exchanged";
  if (isKnown(token)) return "replacing tokens changes this vector by no more than rounding errors";
  if (!tokens.some(isKnown)) return "no token of this text was exchanged";
  if (exchangeable.length > data.exchangeLimit) return `only ${data.exchangeLimit} tokens of this text were exchanged`;
  return "all donor texts have the same token at this position";
}

/** The text for a missing value of the selected measure. */
export const missingText = (token: number | null) =>
  token !== null && state.share.value === OWN_SHARE ? `not known, because ${whyNoExchange(token)}` : "not known";

/** A sentence with the reasons for empty columns; an empty string if no column is empty, or for other measures. */
export function emptyCellsText(texts: number[]): string {
  if (state.share.value !== OWN_SHARE) return "";
  const empty = texts.flatMap(tokensOf).filter((token) => !isKnown(token));
  const reasons = [...new Set(empty.map(whyNoExchange))];
  return reasons.length > 0 ? `Empty columns: ${reasons.join("; ")}.` : "";
}
