// The measures of the picture, grouped by the question that they answer, each with a short explanation.

import { data, OWN_SHARE } from "./data";
import { shares, state } from "./state";

const [SINCE_INPUT, ONE_LAYER] = ["All layers since the input", "One layer"];
/** The recommended measures for each question; the other measures are for comparisons. */
const GROUPS: Record<string, string[]> = {
  [SINCE_INPUT]: [OWN_SHARE, "parts", "alti_rollout"],
  [ONE_LAYER]: [data.method, "alti"],
};

/** The available measures by the titles of their groups, with the group “More” last. */
export const shareGroups: Record<string, string[]> = (() => {
  const grouped = Object.entries(GROUPS).map(([title, names]): [string, string[]] => [
    title,
    names.filter((name) => shares.includes(name)),
  ]);
  const first = new Set(grouped.flatMap(([, names]) => names));
  const more = shares.filter((name) => !first.has(name));
  return Object.fromEntries([...grouped, ["More", more] as const].filter(([, names]) => names.length > 0));
})();

const RATIO =
  "the length of the other tokens' contribution, divided by the sum of this length and that of the token's own contribution";
const EXPLANATIONS: Record<string, string> = {
  [OWN_SHARE]:
    "The displacement of the vector if its own token is replaced, divided by the sum of this displacement and the displacement if all other tokens are replaced.",
  parts:
    "The vector as a sum of one part for each input token: the length of the token's own part, divided by the sum of this length and the length of the other tokens' summed parts.",
  attention: "The attention weights, averaged over heads, without the lengths of the weighted vectors.",
  contribution_weights:
    "The projection of each weighted value vector onto the attention output, relative to the length of that output (Cunningham and Cirone, 2026).",
  norm: "The lengths of the weighted value vectors whose sum is the attention output.",
  value_zeroing: "How much the direction of the layer's output changes if a token's value vector is set to zero.",
  value_zeroing_without_bias:
    "How much the direction of the layer's output changes if a token's value vector is replaced by the value bias.",
  alti: "How much each token's part reduces the distance to the vector after attention (Ferrando et al., 2022).",
  globenc:
    "The length of each token's part after attention, both skip connections and LayerNorms (Modarressi et al., 2022).",
  attn_w: "The attention weight of all other tokens, averaged over heads, without the lengths of the weighted vectors.",
  attnres_w: "The attention weight of all other tokens, averaged over heads, with the skip connection counted as half.",
  attn_n: `In the attention output: ${RATIO}.`,
  attnres_n: `After attention and the skip connection: ${RATIO}.`,
  attnresln_n: `After attention, skip connection and LayerNorm: ${RATIO}.`,
  enc_n: `After both skip connections and LayerNorms: ${RATIO}.`,
  layer_n: `After the whole layer: ${RATIO}.`,
};
const ROLLOUT = "_rollout";

/** A one-line explanation of a measure. */
export function explainShare(name: string): string {
  if (!name.endsWith(ROLLOUT)) return EXPLANATIONS[name];
  const factor = name.slice(0, -ROLLOUT.length);
  return `The shares of one layer (${data.labels.matrices[factor] ?? factor}), multiplied over all layers since the input.`;
}

export const shareText = () => explainShare(state.share.value);
