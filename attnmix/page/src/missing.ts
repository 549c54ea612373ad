// Reasons for missing own shares by exchange, whose cells are empty in the picture.

import { comparison } from "./comparison";
import { checkpoints, data, documentOf, isSpecial, layers, OWN_SHARE, ratioOf, tokensOf } from "./data";
import { state } from "./state";

const isKnown = (token: number) =>
  checkpoints.some((model) => layers.some((layer) => ratioOf(token, layer, model, OWN_SHARE) !== null));

/** The name of a token's text, which is clear in the comparison of two texts. */
const textName = (token: number) => (comparison.value ? data.documents[documentOf[token]].title : "this text");

/** The reason why a token has no own share by exchange, as a clause. */
function whyNoExchange(token: number): string {
  const tokens = tokensOf(documentOf[token]);
  const exchangeable = tokens.filter((each) => !isSpecial(each));
  if (isSpecial(token)) return "special tokens are not exchanged";
  if (isKnown(token)) return "replacing tokens changes this vector by no more than rounding errors";
  if (exchangeable.length === 1) return `${textName(token)} has no other token to exchange`;
  if (!tokens.some(isKnown)) return `the own share of single tokens was not computed for ${textName(token)}`;
  if (exchangeable.length > data.exchangeLimit)
    return `only ${data.exchangeLimit} tokens of ${textName(token)} were exchanged`;
  return "all donor texts have the same token at this position";
}

/** The text for a missing value of the selected measure. */
export const missingText = (token: number | null) =>
  token !== null && state.share.value === OWN_SHARE ? `not known, because ${whyNoExchange(token)}` : "not known";

/** The reasons for empty columns, and for gaps in compared texts; an empty string if there are none. */
export function emptyCellsText(texts: number[]): string {
  const columns = comparison.value?.columns ?? [];
  const shared = columns.filter(({ first, second }) => first !== null && second !== null);
  const gaps = shared.length < columns.length ? "In the gaps of a text, only the other text has tokens." : "";
  if (state.share.value !== OWN_SHARE) return gaps;
  const tokens = comparison.value ? shared.flatMap(({ first, second }) => [first!, second!]) : texts.flatMap(tokensOf);
  const reasons = [...new Set(tokens.filter((token) => !isKnown(token)).map(whyNoExchange))];
  const empty = reasons.length > 0 ? `Empty columns: ${reasons.join("; ")}.` : "";
  return `${empty} ${gaps}`.trim();
}
